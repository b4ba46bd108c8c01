"""What a proof put to the test: how often a rule was asked about each draft, how often it said no, what was accepted.

A proof says nothing of what did not occur. A rule that never said no is as good as unread; one that says no only from
the third draft on is unread by drafts of two tokens.
"""

from typing import NamedTuple

import numpy as np


class Coverage(NamedTuple):
    """Counts by draft position 1..K (index 0 is the first draft) of distinct rows."""

    asked: np.ndarray  # [K] int64, times the rule was asked whether to draft this token
    declined: np.ndarray  # [K] int64, times it said no: before its pass was paid (begin, proceed) or after (check)
    lengths: np.ndarray  # [K+1] int64, drafts by their length
    accepted: np.ndarray  # [K+1] int64, outcomes that could occur, by the number of accepted drafts

    @property
    def shown(self) -> int:
        """The last draft that the rule said no to: up to there its decisions were put to the test."""
        declined = np.flatnonzero(self.declined)
        return int(declined[-1]) + 1 if len(declined) else 0

    @property
    def complete(self) -> bool:
        """Whether the rule was seen to decide about the longest draft, and every number of accepted drafts occurred."""
        return self.shown == len(self.asked) and bool(np.all(self.accepted > 0))

    @property
    def never_asked(self) -> tuple[int, ...]:
        """Drafts that never came up."""
        return tuple(int(k) + 1 for k in np.flatnonzero(self.asked == 0))

    @property
    def never_declined(self) -> tuple[int, ...]:
        """Drafts that came up and were never said no to."""
        return tuple(int(k) + 1 for k in np.flatnonzero((self.asked > 0) & (self.declined == 0)))

    @property
    def never_accepted(self) -> tuple[int, ...]:
        """Numbers of accepted drafts that never occurred."""
        return tuple(int(k) for k in np.flatnonzero(self.accepted == 0))

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Lengths of drafts that occurred."""
        return tuple(int(k) for k in np.flatnonzero(self.lengths))

    def __add__(self, other: "Coverage") -> "Coverage":  # type: ignore[override]
        return Coverage(*(mine + yours for mine, yours in zip(self, other, strict=True)))


class Tally:
    """Counts while an enumeration of drafts of up to `most` (K) tokens goes on; `coverage` is the result."""

    def __init__(self, longest: int) -> None:
        self.coverage = Coverage(*(np.zeros(size, np.int64) for size in (longest, longest, longest + 1, longest + 1)))

    def asks(self, drafted: int, goes_on: np.ndarray) -> None:
        """Answers of `begin` or `proceed` of rows that have drafted so many and have room for one more."""
        if goes_on.size == 0:
            return
        self.coverage.asked[drafted] += goes_on.size
        self.coverage.declined[drafted] += int(np.sum(~goes_on))

    def checks(self, drafted: int, draws: np.ndarray) -> None:
        """Answers of `check` of rows that have drafted so many; they were counted as asked before."""
        self.coverage.declined[drafted] += int(np.sum(~draws))

    def accepts(self, drafted: np.ndarray, chance: np.ndarray) -> None:
        """Drafts of lengths [M] and the distributions [M, K+1] of how many of their tokens are accepted."""
        self.coverage.lengths[:] += np.bincount(drafted, minlength=len(self.coverage.lengths))
        self.coverage.accepted[:] += np.sum(chance > 0, axis=0)
