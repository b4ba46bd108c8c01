"""Tables as all reports make them, in Markdown, and what stands in their cells."""

from collections.abc import Iterable, Sequence

import numpy as np

NONE = "–"
BRACKETS, PARENTHESES, WORDS = "[{}–{}]", "({}–{})", "({} to {})"  # how bounds are written


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(heads) - 1), *lines[1:]])


def interval(value: Sequence[float], form: str = ".2f", bounds: str = BRACKETS) -> str:
    """An estimate with its two bounds; alone where a single prompt, or no spread, gives none."""
    numbers = np.asarray(value, float)  # None of a row that was read is NaN
    estimate, low, high = (format(number, form) for number in numbers)
    return f"{estimate} {bounds.format(low, high)}" if numbers[2] > numbers[1] else estimate  # NaN is not above


def at_temperature(temperature: float) -> str:
    """How a title calls a temperature."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"
