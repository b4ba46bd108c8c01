"""All pictures: lines, heat maps, points with intervals, and their look."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lib.rules import COMPARED
from specdec_jax.metrics.intervals import Interval

# Okabe and Ito's palette, distinct with any colour vision; yellow is left out, too pale on white.
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK = "#222222"
RULE_COLOURS = dict(zip(COMPARED, COLOURS, strict=True))  # the same in every picture
SPARE_COLOURS = ("#8C564B", "#7F7F00", "#17BECF")


def panels(
    titles: Sequence[str], height: float = 3.6, width: float = 4.2, columns: int | None = None, **options: Any
) -> tuple[Figure, Any]:
    """A figure with a panel a title, so many columns of them (all unless given), 6 inches wide at least; axes are
    [rows, columns]. Sizes in inches are a panel's. No pyplot state. `options`: those of `Figure.subplots`."""
    wide = columns or len(titles)
    rows = -(-len(titles) // wide)
    figure = Figure(figsize=(max(width * wide, 6.0), height * rows), dpi=150, layout="constrained")
    grid = figure.subplots(rows, wide, squeeze=False, **options)
    for axes in grid.flat[len(titles) :]:
        axes.set_axis_off()
    for axes, title in zip(grid.flat, titles, strict=False):
        axes.set_title(title, fontsize=11, color=INK)
        axes.grid(color="#e4e4e4", lw=0.6, zorder=0)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


Line = tuple[Sequence[float], Sequence[Interval | float]]  # x, and the figure there
Knob = tuple[str, Sequence[float]]  # a hyperparameter and its values


def lines_figure(
    lines: Mapping[str, Mapping[str, Line]],
    labels: tuple[str, str],
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    columns: int | None = None,
    ticks: Sequence[float] = (),
    log: bool = False,
) -> Figure:
    """One panel per title, one line per name with its intervals as bars; level 1 is marked. `styles`: how matplotlib
    draws a name; others are lines with points. `labels` are the axes', `columns` panels side by side (all unless
    given), `ticks` those of the x axis, `log` whether that is logarithmic."""
    figure, grid = panels([*lines], 3.4, columns=columns, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    names = dict.fromkeys(name for series in lines.values() for name in series)
    spare = [*SPARE_COLOURS, *(colour for name, colour in RULE_COLOURS.items() if name not in names)]
    others = [name for name in names if name not in RULE_COLOURS]
    colours = RULE_COLOURS | {name: spare[at % len(spare)] for at, name in enumerate(others)}
    for axes, series in zip(grid.flat, lines.values(), strict=False):
        for name, (x, values) in series.items():
            estimates = [np.atleast_1d(value)[0] for value in values]
            style = (styles or {}).get(name, {"color": colours[name], "marker": "."})
            (handles[name],) = axes.plot(x, estimates, label=name, **style)
            for at, value in zip(x, values, strict=True):
                if isinstance(value, tuple):
                    axes.plot([at, at], value[1:], color=handles[name].get_color(), lw=0.9, alpha=0.7)
        axes.axhline(1.0, color=INK, lw=0.8, ls=":")
        axes.set(xlabel=labels[0], ylabel=labels[1])
        axes.label_outer()
        if log:
            axes.set_xscale("log")
        if len(ticks):
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
    side_by_side = min(4, 2 * grid.shape[1])
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=side_by_side, frameon=False, fontsize=9)
    return figure


def map_figure(maps: Mapping[str, np.ndarray], across: Knob, up: Knob, label: str) -> Figure:
    """A heat map per title, all on one scale: the figure at each pair of two knobs' values, arrays [up, across]."""
    figure, grid = panels(list(maps), max(2.7, 0.8 + 0.3 * len(up[1])), width=max(3.0, 1.0 + 0.45 * len(across[1])))
    low, high = (float(end(list(maps.values()))) for end in (np.min, np.max))
    for axes, values in zip(grid[0], maps.values(), strict=True):
        axes.grid(visible=False)
        image = axes.imshow(values, cmap="cividis", vmin=low, vmax=high, aspect="auto", origin="lower")
        axes.set_xticks(range(len(across[1])), [f"{value:g}" for value in across[1]])
        axes.set_yticks(range(len(up[1])), [f"{value:g}" for value in up[1]])
        axes.set(xlabel=across[0], ylabel=up[0])
        for (row, column), value in np.ndenumerate(values):
            colour = "white" if 2 * value < low + high else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=list(grid[0]), label=label, pad=0.02)
    return figure


Point = tuple[str, float, float, float]  # name, estimate, low, high


def dots_figure(
    titled: Mapping[str, Sequence[Point]], label: str, rings: Mapping[str, Sequence[float]] | None = None
) -> Figure:
    """Points with intervals by title, and further estimates as rings; rules always compared have their colours."""
    figure, grid = panels(list(titled), 1.2 + 0.27 * max(map(len, titled.values())), width=4.9)
    for axes, (title, points) in zip(grid[0], titled.items(), strict=True):
        for place, (name, estimate, low, high) in enumerate(points):
            colour = RULE_COLOURS.get(name, INK)
            axes.plot([low, high], [place, place], color=colour, lw=1.6, solid_capstyle="butt")
            axes.plot([estimate], [place], "o", color=colour, ms=4.5)
            end = estimate if np.isnan(high) else high  # of a single prompt there is no interval
            axes.annotate(f"{estimate:.2f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
        if rings:
            axes.plot(rings[title], range(len(points)), "o", mfc="white", mec=INK, ms=5, zorder=1)
        axes.axvline(1.0, color="#999999", lw=1, ls="--", zorder=0)
        axes.set_yticks(range(len(points)), [name for name, *_ in points], fontsize=8)
        for tick, (name, *_) in zip(axes.get_yticklabels(), points, strict=True):
            tick.set_color(RULE_COLOURS.get(name, INK))
        axes.set_ylim(len(points) - 0.5, -0.5)
        axes.margins(x=0.12)
    figure.supxlabel(label, fontsize=9)
    return figure
