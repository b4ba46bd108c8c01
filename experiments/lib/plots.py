"""The picture of a comparison: speed-up over plain decoding, a panel a temperature."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.lib.summary import MethodSummary, prompt_speedups, summarise
from experiments.lib.table import mean_text

# Okabe and Ito's palette, told apart with any colour vision; yellow is left out, too pale on white.
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK = "#222222"
VALUE_STYLE: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 9, "fontweight": "bold", "color": INK}


def speedup_figure(rows: Iterable[Mapping[str, Any]], title: str = "", baseline: str | None = None) -> Figure:
    """Bars of the mean speed-up with its 95 % interval, a dot a prompt, the value printed at the bar. No pyplot state.

    Raises:
        ValueError: as `summarise`.
    """
    rows = list(rows)
    summaries = summarise(rows, baseline)
    ratios = prompt_speedups(rows, baseline)
    temperatures = list(dict.fromkeys(summary.temperature for summary in summaries))
    methods = list(dict.fromkeys(summary.method for summary in summaries))
    height = 1.9 + 0.52 * len(methods)
    figure = Figure(figsize=(max(4.6 * len(temperatures), 6.4), height), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharex=True, sharey=True, squeeze=False)[0]
    most = max(max(values) for values in ratios.values())
    for axes, temperature in zip(panels, temperatures, strict=True):
        chosen = [summary for summary in summaries if summary.temperature == temperature]
        _panel(axes, chosen, ratios, methods, most)
        axes.set_title("greedy" if temperature == 0 else f"sampled, temperature {temperature:g}", fontsize=11)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.supxlabel("speed-up over plain decoding: bar, mean; line and [ ], 95 % interval; dots, prompts", fontsize=9)
    return figure


def save_speedups(rows: Iterable[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Writes `speedup_figure` to a file, whose ending says the format."""
    speedup_figure(rows, title).savefig(path)


def _panel(
    axes: Axes,
    summaries: Sequence[MethodSummary],
    ratios: Mapping[tuple[float, str], Sequence[float]],
    methods: Sequence[str],
    most: float,
) -> None:
    for summary in summaries:
        place = methods.index(summary.method)
        mean = summary.speedup.mean
        dots = ratios[summary.temperature, summary.method]
        axes.barh(place, mean.estimate, height=0.62, color=COLOURS[place % len(COLOURS)], alpha=0.85, zorder=2)
        if mean.high > mean.low:  # plain decoding against itself does not vary
            axes.plot([mean.low, mean.high], [place, place], color=INK, lw=2, solid_capstyle="butt", zorder=4)
            shifts = [place + (0.18 if i % 2 else -0.18) for i in range(len(dots))]  # beside the interval, not on it
            axes.scatter(dots, shifts, s=9, color="white", edgecolors=INK, linewidths=0.6, zorder=3)
        # A column at the right edge: beside a bar, the number would stand next to some prompt's dot and seem its value.
        axes.text(1.0, place, mean_text(summary.speedup), transform=axes.get_yaxis_transform(), **VALUE_STYLE)
    axes.axvline(1.0, color=INK, lw=1, ls="--", zorder=1)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.45)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5]))
    axes.grid(axis="x", color="#dddddd", lw=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
