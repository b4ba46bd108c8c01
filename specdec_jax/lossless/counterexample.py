"""The shortest text whose probability is wrong: what a proof shows of a rule that fails."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Counterexample(NamedTuple):
    """One token whose probability is wrong, given the text before it."""

    proof: str  # which one fails, such as "round by round"
    prompt: tuple[int, ...]  # the last tokens of the text where the round began, or all of it
    warp: Mapping[str, Any]
    tokens: tuple[int, ...]  # emitted; the last one has a wrong probability, those before it do not
    position: int  # of the last one; the first token after the prompt has 1
    probability: float  # of the last one
    expected: float  # what the target gives it
    draft: tuple[int, ...] | None = None  # one with which it is emitted; None: the proof sums over drafts
    sampled: bool = False  # both are shares of texts that were drawn


def first_wrong(joint: np.ndarray, target: np.ndarray, tolerance: float) -> tuple[tuple[int, ...], float, float] | None:
    """(tokens, probability of the last one, what it should be): of two distributions [V] * tokens, as short as can be.

    None: their total variation is at most the tolerance at every length.
    """
    for length in range(1, joint.ndim + 1):
        beyond = tuple(range(length, joint.ndim))
        probability, expected = joint.sum(axis=beyond), target.sum(axis=beyond)
        if not 0.5 * np.abs(probability - expected).sum() <= tolerance:
            difference = np.nan_to_num(np.abs(probability - expected), nan=np.inf)
            tokens = np.unravel_index(np.argmax(difference), probability.shape)
            before = expected.sum(axis=-1)[tokens[:-1]]
            return tuple(map(int, tokens)), float(probability[tokens] / before), float(expected[tokens] / before)
    return None


def shortest(counterexamples: Sequence[Counterexample | None]) -> Counterexample | None:
    """The one at the first position, and there the largest difference; exact ones before samples."""

    def size(wrong: Counterexample) -> Any:
        return wrong.sampled, wrong.position, -abs(wrong.probability - wrong.expected)

    return min(filter(None, counterexamples), key=size, default=None)
