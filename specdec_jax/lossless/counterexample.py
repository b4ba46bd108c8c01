"""The result of testing a property, and counterexamples: the shortest text with a wrong probability."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


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

    @property
    def position(self) -> int:
        """Position of the last token; the first one after the prompt has 1."""
        return len(self.tokens)


class Result(NamedTuple):
    """What a test of one property drew, and the worst that it measured."""

    measure: float  # a total variation, or a p-value
    counts: Mapping[str, int]  # what was drawn, by unit
    wrong: str = ""  # a sentence on what does not hold; "": nothing
    counterexample: Counterexample | None = None


def shortest(counterexamples: Sequence[Counterexample | None]) -> Counterexample | None:
    """The counterexample at the first position, there with the largest difference; exact ones before sampled ones."""

    def size(wrong: Counterexample) -> Any:
        return wrong.sampled, wrong.position, -abs(wrong.probability - wrong.expected)

    return min(filter(None, counterexamples), key=size, default=None)


def shown_warp(warp: Any, request: int) -> dict[str, float]:
    """The numbers of one request's warp that are not at their defaults; the temperature always."""
    default = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    numbers = {name: leaf[request].item() for name, leaf in warp._asdict().items()}
    return {name: number for name, number in numbers.items() if number != default.get(name)}
