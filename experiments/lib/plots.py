"""The look of all pictures, and that of a comparison: speed-up over plain decoding, a panel a temperature."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.lib.cells import interval
from experiments.lib.rules import COMPARED
from experiments.lib.summary import summarise

# Okabe and Ito's palette, distinct with any colour vision; yellow is left out, too pale on white.
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK = "#222222"
RULE_COLOURS = dict(zip(COMPARED, ("#999999", "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00"), strict=True))
SPARE_COLOURS = ("#CC79A7", "#8C564B", "#7F7F00", "#17BECF")
VALUE_STYLE: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9, "fontweight": "bold", "color": INK}


def panels(
    titles: Sequence[str], height: float = 3.6, rows: int = 1, width: float = 4.2, least: float = 6.0, **options: Any
) -> tuple[Figure, Any]:
    """A figure with a column a title; axes are [rows, columns]. Sizes in inches: a panel's, and the least width of all.

    No pyplot state. `options`: those of `Figure.subplots`.
    """
    figure = Figure(figsize=(max(width * len(titles), least), height * rows), dpi=150, layout="constrained")
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


def speedup_figure(rows: Iterable[Mapping[str, Any]], title: str = "") -> Figure:
    """Bars of the mean speed-up with its 95 % interval, one dot per prompt, the value printed at the bar.

    Raises:
        ValueError: as `summarise`.
    """
    summaries = summarise(rows)
    temperatures = list(dict.fromkeys(summary.temperature for summary in summaries))
    methods = list(dict.fromkeys(summary.method for summary in summaries))
    titles = ["greedy" if value == 0 else f"sampled, temperature {value:g}" for value in temperatures]
    figure, grid = panels(titles, 1.9 + 0.52 * len(methods), width=4.6, least=6.4, sharex=True, sharey=True)
    for summary in summaries:
        axes, place = grid[0][temperatures.index(summary.temperature)], methods.index(summary.method)
        mean, dots = summary.speedup.mean, summary.speedups
        axes.barh(place, mean.estimate, height=0.62, color=COLOURS[place % len(COLOURS)], alpha=0.85, zorder=2)
        if mean.high > mean.low:  # plain decoding against itself does not vary
            axes.plot([mean.low, mean.high], [place, place], color=INK, lw=2, solid_capstyle="butt", zorder=4)
            shifts = [place + (0.18 if i % 2 else -0.18) for i in range(len(dots))]  # next to the interval, not on it
            axes.scatter(dots, shifts, s=9, color="white", edgecolors=INK, linewidths=0.6, zorder=3)
        # A column at the right edge: beside a bar, the number would stand next to some prompt's dot and seem its value.
        axes.text(1.0, place, interval(mean), transform=axes.get_yaxis_transform(), **VALUE_STYLE)
    for axes in grid[0]:
        axes.axvline(1.0, color=INK, lw=1, ls="--", zorder=1)
        axes.set_yticks(range(len(methods)), methods)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlim(0, max(max(summary.speedups) for summary in summaries) * 1.45)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5]))
        axes.grid(visible=False, axis="y")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.supxlabel("speed-up over plain decoding: bar, mean; line and [ ], 95 % interval; dots, prompts", fontsize=9)
    return figure
