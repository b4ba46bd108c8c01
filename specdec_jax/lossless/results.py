"""The result of testing a property, counterexamples, and coverage: what a policy decided, and what was accepted.

A proof does not cover what did not occur. A policy that never stopped was not tested; one that stops only from the
third draft on is not tested by drafts of two tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Counterexample(NamedTuple):
    """One token whose probability is wrong, given the text before it."""

    proof: str  # the failed proof, such as "round by round"
    prompt: tuple[int, ...]  # the last tokens of the text at the round's beginning, or all
    warp: Mapping[str, Any]  # the arguments of `make_warp` that are not at their defaults
    tokens: tuple[int, ...]  # emitted tokens; only the last one has a wrong probability
    probability: float  # probability of the last token
    expected: float  # its probability under the target
    draft: tuple[int, ...] | None = None  # a draft with which it is emitted; None: the proof sums over drafts
    sampled: bool = False  # whether both are frequencies in sampled texts


class Result(NamedTuple):
    """What a test of one property drew, and the worst that it measured."""

    measure: float  # a total variation, or a p-value
    counts: Mapping[str, int]  # what was drawn, by unit
    wrong: str = ""  # a sentence on what does not hold; "": nothing
    counterexample: Counterexample | None = None


def shortest(counterexamples: Sequence[Counterexample | None]) -> Counterexample | None:
    """The counterexample at the first position, there with the largest difference; exact ones before sampled ones."""

    def size(wrong: Counterexample) -> Any:
        return wrong.sampled, len(wrong.tokens), -abs(wrong.probability - wrong.expected)

    return min(filter(None, counterexamples), key=size, default=None)


def shown_warp(warp: Any, request: int) -> dict[str, float]:
    """The numbers of one request's warp that are not at their defaults; the temperature always."""
    default = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    numbers = {name: leaf[request].item() for name, leaf in warp._asdict().items()}
    return {name: number for name, number in numbers.items() if number != default.get(name)}


class Coverage(NamedTuple):
    """Counts by draft position 1..K (index 0 is the first draft) of distinct rows, added to during an enumeration."""

    asked: np.ndarray  # [K] int64, number of decisions whether to draft this token
    declined: np.ndarray  # [K] int64, number of stops: before its pass (begin, proceed) or after it (check)
    lengths: np.ndarray  # [K+1] int64, number of drafts by length
    accepted: np.ndarray  # [K+1] int64, number of possible outcomes, by the number of accepted drafts

    @property
    def shown(self) -> int:
        """The last draft position at which the policy stopped: up to there its decisions were tested."""
        declined = np.flatnonzero(self.declined)
        return int(declined[-1]) + 1 if len(declined) else 0

    @classmethod
    def of(cls, longest: int) -> "Coverage":
        """No counts, of drafts of up to `longest` (K) tokens."""
        return cls(*(np.zeros(size, np.int64) for size in (longest, longest, longest + 1, longest + 1)))

    def asks(self, drafted: int, goes_on: np.ndarray) -> None:
        """Counts decisions of `begin` or `proceed` for rows that have drafted `drafted` tokens and have budget."""
        if goes_on.size:
            self.asked[drafted] += goes_on.size
            self.declined[drafted] += int(np.sum(~goes_on))

    def checks(self, drafted: int, draws: np.ndarray) -> None:
        """Counts decisions of `check` for rows that have drafted `drafted` tokens, already counted in `asked`."""
        self.declined[drafted] += int(np.sum(~draws))

    def accepts(self, drafted: np.ndarray, chance: np.ndarray) -> None:
        """Counts drafts of lengths [M] with the distributions [M, K+1] of their number of accepted tokens."""
        self.lengths[:] += np.bincount(drafted, minlength=len(self.lengths))
        self.accepted[:] += np.sum(chance > 0, axis=0)
