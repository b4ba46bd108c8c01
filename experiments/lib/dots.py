"""A picture of estimates with their intervals: a panel a temperature, a line a rule."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from experiments.lib.plots import INK

Point = tuple[str, float, float, float]  # name, estimate, low, high


def dots_figure(panels: Mapping[str, Sequence[Point]], label: str, marked: Mapping[str, str] | None = None) -> Figure:
    """Points with intervals, in the order given; `marked` names get a colour of their own. No pyplot state."""
    colours = marked or {}
    most = max(len(points) for points in panels.values())
    figure = Figure(figsize=(4.9 * len(panels), 1.2 + 0.27 * most), dpi=150, layout="constrained")
    axes_row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, points) in zip(axes_row, panels.items(), strict=True):
        for place, (name, estimate, low, high) in enumerate(points):
            colour = colours.get(name, INK)
            axes.plot([low, high], [place, place], color=colour, lw=1.6, solid_capstyle="butt")
            axes.plot([estimate], [place], "o", color=colour, ms=4.5)
            axes.annotate(f"{estimate:.2f}", (high, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
        axes.axvline(1.0, color="#999999", lw=1, ls="--", zorder=0)
        axes.set_yticks(range(len(points)), [name for name, *_ in points], fontsize=8)
        for tick, (name, *_) in zip(axes.get_yticklabels(), points, strict=True):
            tick.set_color(colours.get(name, INK))
        axes.set_ylim(len(points) - 0.5, -0.5)
        axes.margins(x=0.12)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", color="#dddddd", lw=0.6, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(label, fontsize=9)
    return figure
