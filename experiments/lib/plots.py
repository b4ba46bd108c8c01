"""The look of all pictures."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.rules import COMPARED

# Okabe and Ito's palette, distinct with any colour vision; yellow is left out, too pale on white.
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK = "#222222"
RULE_COLOURS = dict(zip(COMPARED, ("#999999", "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00"), strict=True))
SPARE_COLOURS = ("#CC79A7", "#8C564B", "#7F7F00", "#17BECF")


def panels(
    titles: Sequence[str], height: float = 3.6, rows: int = 1, width: float = 4.2, **options: Any
) -> tuple[Figure, Any]:
    """A figure with a column a title, 6 inches wide at least; axes are [rows, columns]. Sizes in inches are a panel's.

    No pyplot state. `options`: those of `Figure.subplots`.
    """
    figure = Figure(figsize=(max(width * len(titles), 6.0), height * rows), dpi=150, layout="constrained")
    grid = figure.subplots(rows, len(titles), squeeze=False, **options)
    for row, line in enumerate(grid):
        for axes, title in zip(line, titles, strict=True):
            plain_axes(axes, title if row == 0 else "")
    return figure, grid


def plain_axes(axes: Axes, title: str = "") -> None:
    """The house's look."""
    axes.set_title(title, fontsize=11, color=INK)
    axes.grid(color="#e4e4e4", lw=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def rule_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each rule, the same in every picture for those that are always compared."""
    others = [name for name in names if name not in RULE_COLOURS]
    return RULE_COLOURS | {name: SPARE_COLOURS[at % len(SPARE_COLOURS)] for at, name in enumerate(others)}
