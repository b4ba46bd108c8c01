"""Rounds of other engines as traces, for policies that depend on accepted lengths only.

A log of rounds (numbers of drafted and accepted tokens) determines whether the drafter's token is accepted at every
position, with one exception: if all drafts of a round were accepted, the bonus token was not drafted. Such positions
are open. `StepLog.filled` sets all of them to the same value, or at random; for a static length the number of rounds is
minimal if all are accepted and maximal if none is, because more accepted tokens never make the n-th round end earlier.
For policies that learn, the two cases are examples and not bounds.

This assumes that the drafter's token is a function of the text, as for a language model. The drafts of a drafter that
reads its target also depend on where the round began: for its logs replays of other lengths are approximate.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.decoding.state import laid
from specdec_jax.replay.trace import FEATURES, TRUNCATIONS, Trace

LONGEST = 16  # maximum draft length of a replay of steps, for any drafted length
REJECTED, ACCEPTED, OPEN = 0, 1, -1


class Steps(NamedTuple):
    """The rounds of a request in order."""

    drafted: Sequence[int]
    accepted: Sequence[int]
    emitted: int | None = None  # emitted tokens, if the last round was cut; None: it was not
    id: str = ""
    task: str = "all"

    def rounds(self) -> tuple[np.ndarray, np.ndarray]:
        """`drafted` and `accepted`, int64. Raises ValueError for rounds that accept more than they draft."""
        drafted, accepted = np.asarray(self.drafted, np.int64), np.asarray(self.accepted, np.int64)
        if drafted.shape != accepted.shape or drafted.ndim != 1 or np.any((accepted < 0) | (accepted > drafted)):
            raise ValueError(
                f"request {self.id!r}: every round accepts 0 to as many tokens as it drafts, got "
                f"{drafted.tolist()} drafted and {accepted.tolist()} accepted"
            )
        return drafted, accepted


class StepLog(NamedTuple):
    """The acceptance at every position of N answers, as far as determined by rounds."""

    bits: list[np.ndarray]  # one per answer, [n] int8: ACCEPTED, REJECTED or OPEN
    chance: float  # acceptance probability of open positions: that of the last drafts of rounds that reached them
    about: dict[str, object]
    notes: Sequence[str]
    longest_draft: int

    @property
    def num_open(self) -> int:
        """Number of open positions."""
        return sum(int((bits == OPEN).sum()) for bits in self.bits)

    def filled(self, answer: int | None = None) -> Trace:
        """The trace with all open positions ACCEPTED or REJECTED, or (None) drawn with `chance` by a fixed seed."""
        rng, runs = np.random.default_rng(0), []
        for bits in self.bits:
            drawn = (rng.random(len(bits)) < self.chance).astype(np.int8) if answer is None else answer
            hit, run = np.where(bits == OPEN, drawn, bits), np.zeros(len(bits) + 1, np.int64)
            for at in range(len(bits) - 1, -1, -1):
                run[at] = run[at + 1] + 1 if hit[at] else 0
            runs.append(run[:-1].tolist())
        return trace_of_runs(runs, self.about, longest=LONGEST)


def log_of_steps(requests: Sequence[Steps], about: Mapping[str, object], notes: Sequence[str] = ()) -> StepLog:
    """The log of all positions from rounds. Requests without a token are omitted.

    Raises:
        ValueError: rounds that accept more than they draft, lists of different lengths, or empty ones.
    """
    bits, ids, tasks, last = [], [], [], np.zeros(2)
    for request in requests:
        drafted, accepted = request.rounds()
        pairs = zip(drafted, accepted, strict=True)
        lengths = [bit for d, a in pairs for bit in [ACCEPTED] * a + [OPEN if a == d else REJECTED]][: request.emitted]
        reached = (drafted > 0) & (accepted >= drafted - 1)
        last += reached.sum(), (reached & (accepted == drafted)).sum()
        if lengths:
            bits.append(np.array(lengths, np.int8))
            ids.append(request.id or str(len(ids)))
            tasks.append(request.task)
    if not bits:
        raise ValueError("a log of steps needs a request with a round")
    longest = max(max(request.drafted, default=0) for request in requests)
    return StepLog(bits, float(last[1] / max(last[0], 1)), {**about, "ids": ids, "tasks": tasks}, notes, longest)


def trace_of_runs(
    runs: list[list[int]], about: dict[str, object], answers: list[list[int]] | None = None, longest: int = 1
) -> Trace:
    """A trace without distributions, from the number of drafts accepted in a round that begins at each position.

    Args:
        runs: one list per text, with an entry for every token of the answer.
        answers: their token ids, if known.
        longest: minimum of the trace's maximum draft length, which is at least the longest run.

    Raises:
        ValueError: no texts, or an empty one.
    """
    if not runs or not all(runs):
        raise ValueError("accepted lengths need at least one text, and every text at least one position")
    length = np.array([len(text) for text in runs], np.int32)
    texts, positions = len(runs), int(length.max()) + 1
    run = np.zeros((texts, positions), np.int32)
    for row, text in zip(run, runs, strict=True):
        row[: len(text)] = np.minimum(text, np.arange(len(text), 0, -1))  # no token is accepted beyond a text's end
    tokens = laid(
        [answer[: len(text)] for answer, text in zip(answers or [[]] * texts, runs, strict=True)], positions - 1
    )
    unknown = np.broadcast_to(np.float32(np.nan), (texts, positions))
    measures = ("overlap", "cross_entropy", "target_entropy", "raw_target_entropy")
    nothing = np.broadcast_to(np.float32(np.nan), (texts, positions, len(FEATURES)))
    return Trace(
        path=nothing,
        accepted=run > 0,
        tail_of=np.zeros((texts, positions), np.int32),
        tails=np.broadcast_to(np.float32(np.nan), (1, max(int(run.max()), longest), len(FEATURES))),
        length=length,
        limit=length,
        prompt_length=np.ones(texts, np.int32),
        seed=np.arange(texts, dtype=np.uint32),
        temperature=np.zeros(texts, np.float32),
        tokens=np.asarray(tokens),
        **dict.fromkeys(measures, unknown),
        about=dict(about),
        run=run,
        truncation=np.tile(np.array(list(TRUNCATIONS.values()), np.float32), (texts, 1)),
        prompt_hash=np.zeros(texts, np.uint32),
    )
