"""Batches of whole conversations, packed into rows; a function of the seed and the step only.

Therefore a resumed run gets the same batches. A row holds several conversations, which do not attend to one another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specdec_jax.distillation.shards import Shard

GAP = -1  # the segment of padding
RECENT = 64  # rows among which a conversation is packed


class Batch(NamedTuple):
    """N = R T positions in R rows. Host arrays."""

    tokens: np.ndarray  # [R, T] int32
    positions: np.ndarray  # [R, T] int32, within the conversation
    segments: np.ndarray  # [R, T] int32, index of the conversation in the row; GAP: none
    weight: np.ndarray  # [N] float32, weight of the prediction at this position; 0: padding, or the last of a text
    following: np.ndarray  # [N] int32, the next token, as an index into the candidates
    top: (
        np.ndarray
    )  # [N, k] int32, labels as indices into the candidates; k is 0 if training computes the distributions
    log_prob: np.ndarray  # [N, k] float32, -inf if a label is not a candidate
    candidates: np.ndarray  # [C] int32, the tokens whose logits are computed
    correction: np.ndarray  # [C] float32, log of the number of tokens that a candidate represents
    hidden: np.ndarray | None = None  # [R, T, F, D] bfloat16, the target's at the position before, for reading drafters


@dataclass(frozen=True)
class Packing:
    """Rows of `slots` tokens, `tokens` per batch. `candidates`: logits computed per position (0: whole vocabulary),
    among them `sampled` tokens at random.

    `by_writer`: weights of tokens that are given, generated as the user, and as the assistant. Raises ValueError.
    """

    slots: tuple[int, ...] = (448, 896)
    tokens: int = 7168
    candidates: int = 12288
    sampled: int = 2048
    by_writer: tuple[float, float, float] = (0.2, 0.4, 1.0)

    def __post_init__(self):
        if not self.slots or any(self.tokens % slots for slots in self.slots) or min(self.slots) < 1:
            fits = "lengths of 1 or more" if not self.slots or min(self.slots) < 1 else None
            fits = fits or f"packing.tokens to {-(-self.tokens // math.lcm(*self.slots)) * math.lcm(*self.slots)}"
            raise ValueError(
                f"tokens a batch ({self.tokens}) must be a multiple of every row length {self.slots}: set {fits}"
            )
        if list(self.slots) != sorted(set(self.slots)):
            raise ValueError(f"row lengths must grow, got {self.slots}")
        if self.candidates and not 0 < self.sampled < self.candidates:
            raise ValueError(
                f"sampled ({self.sampled}) must be positive and below candidates ({self.candidates}): "
                f"set packing.sampled to {max(self.candidates // 8, 1)}"
            )
        if min(self.by_writer) < 0 or max(self.by_writer) <= 0:
            raise ValueError(f"weights by writer must not be negative, nor all zero, got {self.by_writer}")


class Corpus:
    """All conversations of some shards, in memory; hidden states stay on disk.

    `layers`: indices of the shards' F hidden states in batches. Raises ValueError if there are no conversations, or
    different numbers of labels.
    """

    def __init__(self, shards: Sequence[Shard], vocab_size: int, layers: Sequence[int] = ()):
        self.vocab_size, self._layers = vocab_size, list(layers)
        self._hidden = [shard.hidden for shard in shards]
        widths = sorted({shard.top.shape[1] for shard in shards})
        if not shards or not sum(len(shard.kind) for shard in shards):
            raise ValueError(
                "there are no conversations to train on: write more tokens, in longer blocks (short.steps)"
            )
        if len(widths) > 1:
            raise ValueError(f"shards keep different numbers of labels: {widths}. Label them anew")
        self.labels = widths[0]
        self._starts = starts = np.cumsum([0] + [shard.num_tokens for shard in shards])
        self.tokens = np.concatenate([shard.tokens for shard in shards])
        self.writer = np.concatenate([shard.writer for shard in shards])
        self.top = np.concatenate([shard.top for shard in shards])
        self.log_prob = np.concatenate([shard.log_prob for shard in shards])
        spans = [
            np.stack([shard.offsets[:-1] + start, shard.offsets[1:] + start], axis=1)
            for shard, start in zip(shards, starts, strict=False)
        ]
        self.spans = np.concatenate(spans)

    def hidden(self, start: int, stop: int) -> np.ndarray | None:
        """Hidden states [stop - start, F, D] of a conversation's tokens; None if batches have none."""
        if not self._layers:
            return None
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        return self._hidden[shard][start - self._starts[shard] : stop - self._starts[shard], self._layers]

    @property
    def counts(self) -> np.ndarray:
        """[V] float64, number of occurrences of each token."""
        return np.bincount(self.tokens, minlength=self.vocab_size).astype(np.float64)


class BatchOrder:
    """The batch of every step: an epoch's conversations in random order, packed first-fit by row length.

    Raises ValueError if a conversation is longer than any row, or for candidates without labels among which to choose.
    """

    def __init__(self, corpus: Corpus, packing: Packing, seed: int):
        if not corpus.labels and packing.candidates:
            raise ValueError("data without labels has no candidates to choose from: label it (--stage label)")
        longest = int(np.max(np.diff(corpus.spans, axis=1)))
        if longest > packing.slots[-1]:
            raise ValueError(f"a conversation has {longest} tokens; the longest rows have {packing.slots[-1]}")
        self._corpus, self._packing, self._seed = corpus, packing, seed
        self._epochs: list[list[tuple[int, list[list[int]]]]] = []
        self._first = [0]  # the first step of each epoch

    def at(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        while self._first[-1] <= step:
            epoch = self._pack(len(self._epochs))
            self._epochs.append(epoch)
            self._first.append(self._first[-1] + len(epoch))
        epoch = int(np.searchsorted(self._first, step, side="right")) - 1
        slots, rows = self._epochs[epoch][step - self._first[epoch]]
        return self._build(slots, rows, np.random.default_rng([self._seed, step, 1]))

    def epoch_of(self, step: int) -> float:
        """The number of epochs before this step."""
        self.at(step)
        epoch = int(np.searchsorted(self._first, step, side="right")) - 1
        return epoch + (step - self._first[epoch]) / (self._first[epoch + 1] - self._first[epoch])

    def _pack(self, epoch: int) -> list[tuple[int, list[list[int]]]]:
        """(row length, conversations of every row) of every batch."""
        rng = np.random.default_rng([self._seed, epoch])
        lengths = np.diff(self._corpus.spans, axis=1)[:, 0]
        batches = []
        for low, slots in zip((0, *self._packing.slots), self._packing.slots, strict=False):
            mine = rng.permutation(np.flatnonzero((lengths > low) & (lengths <= slots)))
            rows, free = list[list[int]](), list[int]()
            for member in mine.tolist():
                recent = range(max(0, len(rows) - RECENT), len(rows))
                at = next((row for row in recent if free[row] >= lengths[member]), len(rows))
                if at == len(rows):
                    rows.append([])
                    free.append(slots)
                rows[at].append(member)
                free[at] -= int(lengths[member])
            size = self._packing.tokens // slots
            while len(rows) % size:  # an incomplete last batch repeats rows of others
                rows.append(rows[rng.integers(len(rows))])
            batches += [(slots, rows[at : at + size]) for at in range(0, len(rows), size)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def _build(self, slots: int, rows: list[list[int]], rng: np.random.Generator) -> Batch:
        corpus, shape = self._corpus, (len(rows), slots)
        source, hidden = np.full(shape, -1, np.int64), None
        positions, segments = np.zeros(shape, np.int32), np.full(shape, GAP, np.int32)
        for row, members in enumerate(rows):
            at = 0
            for segment, member in enumerate(members):
                start, stop = corpus.spans[member]
                size = stop - start
                source[row, at : at + size] = np.arange(start, stop)
                positions[row, at : at + size] = np.arange(size)
                segments[row, at : at + size] = segment
                read = corpus.hidden(start, stop)
                if read is not None:  # hidden states are read at the next token
                    hidden = np.zeros((*shape, *read.shape[1:]), read.dtype) if hidden is None else hidden
                    hidden[row, at + 1 : at + size] = read[:-1]
                at += size
        safe = np.maximum(source, 0).reshape(-1)
        after = np.minimum(safe + 1, len(corpus.tokens) - 1)
        predicts = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] != GAP)
        predicts = np.pad(predicts, ((0, 0), (0, 1))).reshape(-1)
        weight = np.where(predicts, np.array(self._packing.by_writer, np.float32)[corpus.writer[after]], 0.0)
        following = corpus.tokens[after].astype(np.int64)
        top, log_prob = corpus.top[safe].astype(np.int64), corpus.log_prob[safe].astype(np.float32)
        chosen = self._candidates(np.concatenate([following[:, None], top], axis=1)[weight > 0], rng)
        index, candidates, correction = chosen
        log_prob = np.where(index[top] >= 0, log_prob, -np.inf).astype(np.float32)
        weight = np.where(index[following] >= 0, weight, 0.0)
        return Batch(
            np.where(source >= 0, corpus.tokens[np.maximum(source, 0)], 0).astype(np.int32),
            positions,
            segments,
            weight.astype(np.float32),
            np.maximum(index[following], 0).astype(np.int32),
            np.maximum(index[top], 0).astype(np.int32),
            log_prob,
            candidates,
            correction,
            hidden,
        )

    def _candidates(self, wanted: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(index [V] of each token among the candidates or -1, candidates [C], correction [C]).

        They include all tokens and labels of the batch (the most frequent, if there are too many), and a uniform sample
        of the others, weighted to represent all of them.
        """
        vocab, count = self._corpus.vocab_size, self._packing.candidates
        if not count or count >= vocab:
            everything = np.arange(vocab, dtype=np.int32)
            return everything.astype(np.int64), everything, np.zeros((vocab,), np.float32)
        often = np.bincount(wanted.reshape(-1), minlength=vocab)
        often[wanted[:, 0]] += wanted.shape[0]  # tokens take precedence over labels
        order = np.argsort(-often, kind="stable")
        named = order[: min(int((often > 0).sum()), count - self._packing.sampled)]
        others = np.setdiff1d(np.arange(vocab), named, assume_unique=True)
        drawn = rng.choice(others, count - len(named), replace=False)
        index = np.full((vocab,), -1, np.int64)
        index[named] = np.arange(len(named))
        correction = np.zeros((count,), np.float32)
        correction[len(named) :] = np.log(len(others) / len(drawn))
        return index, np.concatenate([named, drawn]).astype(np.int32), correction
