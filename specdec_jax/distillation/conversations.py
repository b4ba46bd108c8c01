"""Conversion of requests to rows of the writer, and of its output to shards, on the host (`writing`: on the device)."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.distillation import writing
from specdec_jax.distillation.prompts import HeldOut, Request, RequestSource
from specdec_jax.distillation.shards import Shard, token_dtype
from specdec_jax.distillation.writing import ASSISTANT, BY_ASSISTANT, USER, Rows, Turns
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.ranges import Between, check_fields
from specdec_jax.types import LanguageModel, Params

TRIES = 50  # maximum draws of a request until one fits the rows and shares nothing with held-out texts
STEPS = 32  # steps per call of the device
FOLLOW_UP = 40  # maximum tokens of a user's later turn if the first was given
TURN = (
    256  # slots per answer: a conversation has at most slots // TURN answers, and up to 3 in rows of under 1,024 slots
)
_MARK = "\u2063mark\u2063"  # a marker that no template changes


@dataclass(frozen=True)
class Pool:
    """Rows of one length, with `steps` per block; a block is written (or lost) as a whole. Raises ValueError."""

    batch: Annotated[int, Between(1)]
    slots: Annotated[int, Between(1)]
    steps: Annotated[int, Between(1)]

    def __post_init__(self):
        check_fields(self)

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a block."""
        return self.batch * -(-self.steps // STEPS) * STEPS


@dataclass(frozen=True)
class Temperatures:
    """Temperatures of texts: answers use one of `answer` with `weights`, generated user turns `user`."""

    answer: Annotated[tuple[float, ...], Between(0)] = (0.0, 0.3, 0.7, 1.0)
    weights: Annotated[tuple[float, ...], Between(0)] = (0.45, 0.15, 0.3, 0.1)
    user: Annotated[float, Between(0)] = 0.8

    def __post_init__(self):
        check_fields(self)
        if len(self.answer) != len(self.weights) or not sum(self.weights):
            raise ValueError(f"temperatures need a weight each, not all zero, got {self!r}")


def read_template(tokenizer: Tokenizer) -> Turns:
    """The tokens between turns. Raises ValueError if turns do not end in a special token."""
    close = tokenizer.chat([{"role": "user", "content": _MARK}]).split(_MARK)[1]
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": _MARK},
        {"role": "user", "content": _MARK},
    ]
    between = tokenizer.chat(talk).split(_MARK)[1]
    close_user, close_assistant = (np.array(tokenizer.encode(text), np.int32) for text in (close, between))
    if close_user[0] not in tokenizer.eos_ids or close_assistant[0] not in tokenizer.eos_ids:
        raise ValueError(
            "the chat template ends a turn with ordinary tokens, so a model cannot be let on as the user: "
            f"{close!r} after the user, {between!r} after the assistant"
        )
    return Turns(close_user, close_assistant, np.array(tokenizer.eos_ids, np.int32))


class Author:
    """A target that writes shards, one block at a time; the contents of a block depend on its number only.

    `labels` is the number of log-probabilities stored per position (0: none), in `label_dtype`; `layers` are those
    whose hidden states are stored, for drafters that read them.
    """

    def __init__(
        self,
        model: LanguageModel,
        params: Params,
        tokenizer: Tokenizer,
        source: RequestSource,
        held_out: HeldOut,
        *,
        temperatures: Temperatures = Temperatures(),  # noqa: B008 - frozen
        labels: int = 16,
        label_dtype: Any = np.float16,
        layers: tuple[int, ...] = (),
        seed: int = 0,
        chunk: int = STEPS,
        several_turns: float = 0.2,
    ):
        self._model, self._params, self._tokenizer = model, params, tokenizer
        self._source, self._held_out, self._temperatures = source, held_out, temperatures
        self._label_dtype = label_dtype
        self._seed, self._chunk, self._several = seed, chunk, several_turns
        self._turns = read_template(tokenizer)
        writing.check_layers(model, layers)
        self._start, self._write = writing.build_writer(model, self._turns, steps=chunk, k=labels, layers=layers)

    def block(
        self, number: int, pool: Pool, *, long: bool, progress: Callable[[int, int], None] | None = None
    ) -> tuple[Shard, dict[str, Any]]:
        """One block as a shard, and entries of the manifest: idle share, dropped conversations.

        `progress(done, total)` counts tokens, after every call of the device.
        """
        rng = np.random.default_rng([self._seed, number])
        rows = self._start(self._params, pool.batch, pool.slots)
        book: list[tuple[str, float]] = []  # kind and temperature by conversation number
        openings, ready, written = self._openings(rng, book, pool, long, number), deque(), []
        for done in range(0, pool.steps, self._chunk):
            rows = _refill(rows, ready, openings)
            rows, chunk = self._write(self._params, rows)
            if done + self._chunk < pool.steps:  # while the device computes
                ready.extend(itertools.islice(openings, pool.batch // 4 - len(ready)))
            written.append(jax.tree.map(np.asarray, chunk))
            if progress is not None:
                progress((done + self._chunk) * pool.batch, pool.steps * pool.batch)
        whole = writing.Written(*(np.concatenate(parts) for parts in zip(*written, strict=True)))
        return self._stitch(whole, book)

    def _openings(self, rng, book: list, pool: Pool, long: bool, number: int) -> Iterator[writing.Opening]:
        """The block's conversations in order, without padding; each is entered in the book."""
        temperatures, turns = self._temperatures, max(3, pool.slots // TURN)
        shares = np.array(temperatures.weights) / sum(temperatures.weights)
        while True:
            request, tokens = self._request(rng, pool.slots, long)
            temperature = rng.choice(temperatures.answer, p=shares)
            book.append((request.kind, float(temperature)))
            yield writing.Opening(
                tokens,
                len(tokens),
                USER if request.open else ASSISTANT,
                request.turn_limit or FOLLOW_UP,
                1 + (rng.random() < self._several) * rng.integers(1, turns),
                temperature,
                temperatures.user,
                np.random.SeedSequence([self._seed, number, len(book) - 1]).generate_state(1)[0],
                len(book) - 1,
            )

    def _request(self, rng, slots: int, long: bool) -> tuple[Request, list[int]]:
        """A request and its tokens, with room for an answer."""
        longest = slots - max(slots // 8, min(64, slots // 2))
        tokens: list[int] = []
        for _ in range(TRIES):
            request = self._source.draw(rng, long=long)
            if self._held_out.touches(request.text):
                continue
            message = {"role": "user", "content": request.text}
            tokens = self._tokenizer.encode(self._tokenizer.chat([message], parse_special=False))
            if request.open:
                del tokens[-len(self._turns.close_user) :]
            if len(tokens) + request.turn_limit <= longest:
                return request, tokens
        last = f"the last has {len(tokens)} tokens" if tokens else "all touch what is held out"
        raise ValueError(
            f"{TRIES} requests in a row did not fit rows of {slots} tokens: {last}. Longer rows are "
            "short.slots and long.slots"
        )

    def _stitch(self, written: writing.Written, book: list[tuple[str, float]]) -> tuple[Shard, dict[str, Any]]:
        """Sorts tokens by conversation; drops conversations that share text with a held-out one or have no answer."""
        ids = written.id.T.reshape(-1)  # row by row, so that a conversation's tokens are adjacent
        order = np.argsort(ids, kind="stable")
        order = order[np.searchsorted(ids[order], 0) :]
        starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
        groups = np.split(order, starts[1:])

        def flat(array: np.ndarray) -> np.ndarray:
            return array.swapaxes(0, 1).reshape(array.shape[0] * array.shape[1], *array.shape[2:])

        tokens, writer, top, log_prob, hidden = (flat(array) for array in written[1:])
        groups_to_write = [group for group in groups if self._keeps(tokens[group], writer[group])]
        facts = {
            "idle": round(float(np.mean(ids < 0)), 4),
            "dropped": len(groups) - len(groups_to_write),
            "answers": int(sum((writer[group] == BY_ASSISTANT).sum() for group in groups_to_write)),
        }
        numbers = [ids[group[0]] for group in groups_to_write]
        kinds = tuple(sorted({book[number][0] for number in numbers}))
        together = np.concatenate(groups_to_write) if groups_to_write else np.zeros((0,), np.int64)
        dtype = token_dtype(self._model.spec.vocab_size)
        return Shard(
            tokens[together].astype(dtype),
            writer[together].astype(np.uint8),
            np.cumsum([0, *map(len, groups_to_write)]),
            np.array([kinds.index(book[n][0]) for n in numbers], np.uint8),
            np.array([book[n][1] for n in numbers], np.float32),
            top[together].astype(dtype),
            log_prob[together].astype(self._label_dtype),
            kinds,
            hidden[together],
        ), facts

    def _keeps(self, tokens: np.ndarray, writer: np.ndarray) -> bool:
        return bool((writer == BY_ASSISTANT).any()) and not self._held_out.touches(
            self._tokenizer.decode(tokens.tolist())
        )


def _refill(rows: Rows, ready: deque, openings: Iterator[writing.Opening]) -> Rows:
    """Gives a conversation to every row without a spare one, those that are ready first."""
    spare = jax.tree.map(np.array, rows.spare)
    for row in np.nonzero(spare.id < 0)[0]:
        tokens, *numbers = ready.popleft() if ready else next(openings)
        spare.tokens[row, : len(tokens)] = tokens
        for array, number in zip(spare[1:], numbers, strict=True):
            array[row] = number
    return rows._replace(spare=jax.tree.map(jnp.asarray, spare))
