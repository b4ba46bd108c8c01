"""Counterexamples of failed proofs: the shortest text with a wrong probability."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Counterexample(NamedTuple):
    """One token whose probability is wrong, given the text before it."""

    proof: str  # the failed proof, such as "round by round"
    prompt: tuple[int, ...]  # the last tokens of the text at the round's beginning, or all
    warp: Mapping[str, Any]
    tokens: tuple[int, ...]  # emitted tokens; only the last one has a wrong probability
    position: int  # position of the last token; the first token after the prompt has 1
    probability: float  # probability of the last token
    expected: float  # its probability under the target
    draft: tuple[int, ...] | None = None  # a draft with which it is emitted; None: the proof sums over drafts
    sampled: bool = False  # whether both are frequencies in sampled texts


def first_wrong(joint: np.ndarray, target: np.ndarray, tolerance: float) -> tuple[tuple[int, ...], float, float] | None:
    """The shortest (tokens, probability of the last one, expected probability) for two distributions [V] * tokens.

    None: their total variation is at most the tolerance at every length.
    """
    for length in range(1, joint.ndim + 1):
        beyond = tuple(range(length, joint.ndim))
        probability, expected = joint.sum(axis=beyond), target.sum(axis=beyond)
        if not 0.5 * np.abs(probability - expected).sum() <= tolerance:
            difference = np.nan_to_num(np.abs(probability - expected), nan=np.inf)
            tokens = np.unravel_index(np.argmax(difference), probability.shape)
            before = expected.sum(axis=-1)[tokens[:-1]] or probability.sum(axis=-1)[tokens[:-1]]  # 0: impossible text
            return tuple(map(int, tokens)), float(probability[tokens] / before), float(expected[tokens] / before)
    return None


def shortest(counterexamples: Sequence[Counterexample | None]) -> Counterexample | None:
    """The counterexample at the first position, there with the largest difference; exact ones before sampled ones."""

    def size(wrong: Counterexample) -> Any:
        return wrong.sampled, wrong.position, -abs(wrong.probability - wrong.expected)

    return min(filter(None, counterexamples), key=size, default=None)
