"""Cells, headings and pictures that studies over traces share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.lib import trace_runs as runs
from experiments.lib.cells import NONE, at_temperature, interval, markdown
from experiments.lib.plots import INK, panels, plain_axes, rule_colours
from experiments.lib.trace_runs import Row, Run, Source
from specdec_jax.metrics.intervals import Interval


def percent_more(value: Interval) -> str:
    """A ratio as the percentage above 1, with its interval; bold where the interval excludes 1."""
    texts = [f"{100 * (bound - 1):+.1f}" for bound in value]
    if not value.high > value.low:
        return f"{texts[0]} %"
    text = f"{texts[0]} % [{texts[1]}, {texts[2]}]"
    return f"**{text}**" if excludes_one(value) else text


def plus_minus(value: Interval, digits: int = 2) -> str:
    """An estimate and half of its interval, where there is one."""
    text = f"{value.estimate:.{digits}f}"
    return f"{text} ±{(value.high - value.low) / 2:.{digits}f}" if value.high > value.low else text


def excludes_one(value: Interval) -> bool:
    """Whether an interval says that a ratio is not 1."""
    return value.low > 1 or value.high < 1


def number(value: Any) -> str:
    """A setting's number, short."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def setting(settings: Sequence[Mapping[str, Any]], name: str) -> str:
    """The hyperparameter that was chosen on either half: '0.3 / 0.4'."""
    return " / ".join(dict.fromkeys(number(chosen[name]) for chosen in settings))


def about(run: Run) -> str:
    """One sentence on the traces and one on the machines."""
    machines = {source.costs for source in run.sources}
    named = [f"{costs.device or 'flat costs'}, c = {costs.ratio:.3f}" for costs in machines]
    return f"{about_traces(run)} Replayed; time: {'; '.join(sorted(named))}."


def about_traces(run: Run) -> str:
    """One sentence on the traces."""
    sources = list({id(source.trace): source for source in reversed(run.sources)}.values())[::-1]
    traces = [source.trace for source in sources]
    texts = " or ".join(map(str, sorted({trace.num_texts for trace in traces})))
    targets = ", ".join(dict.fromkeys(str(trace.about.get("target", "a target")) for trace in traces))
    names = ", ".join(dict.fromkeys(str(source.trace.about.get("drafter", source.group)) for source in sources))
    made_up = " **The numbers mean nothing.**" if run.options.smoke else ""
    pair = "Synthetic traces" if made_up else f"Traces of {targets} with {names}"
    positions = sum(trace.num_positions for trace in traces)
    return f"{pair}: {texts} texts a trace, {positions} tokens in all.{made_up}"


def sections(run: Run) -> list[tuple[Source, str]]:
    """Every source with its heading."""
    several = len({source.group for source in run.sources}) > 1
    names = [(f"{source.group}, " if several else "") + at_temperature(source.temperature) for source in run.sources]
    return [(source, name[0].upper() + name[1:]) for source, name in zip(run.sources, names, strict=True)]


def compared(
    rows: Mapping[str, Row],
    over: Sequence[str] = (),
    *,
    chosen: str | None = None,
    more: Mapping[str, Callable[[Row], str]] | None = None,
) -> str:
    """One table row per row: speed-up, gain over each of some rows, acceptance; Markdown.

    Args:
        over: names of rows of the same texts.
        chosen: a hyperparameter; which value was chosen on either half.
        more: further columns.
    """
    more, lines = more or {}, []
    for name, row in rows.items():
        gains = [NONE if name == other else percent_more(runs.gain(row, rows[other])) for other in over]
        picked = [] if chosen is None else [setting(row["settings"], chosen)]
        figures = [f"{runs.acceptance(row):.0%}", f"{runs.per_round(row, 'emitted'):.2f}"]
        lines.append([name, *picked, interval(runs.speedup(row)), *gains, *figures, *(of(row) for of in more.values())])
    heads = ["rule", *([] if chosen is None else ["chosen"]), "speed-up", *(f"over {name}" for name in over)]
    return markdown([*heads, "accepted", "tokens a pass", *more], lines)


def tasks_table(tasks: Mapping[str, Mapping[str, Row]], over: str, without: Sequence[str] = ()) -> str:
    """Rows down, tasks across: gains over one of them, whose own line is its speed-up over plain decoding."""
    lines = []
    for name in [over, *(name for name in next(iter(tasks.values())) if name not in (over, *without))]:
        texts = [f"{runs.speedup(rows[over]).estimate:.2f}" for rows in tasks.values()] if name == over else []
        for rows in tasks.values() if name != over else ():
            value = runs.gain(rows[name], rows[over])
            texts.append(f"**{plus_minus(value)}**" if excludes_one(value) else plus_minus(value))
        lines.append([name, *texts])
    head = [f"{task.replace('_', ' ')} ({len(rows[over]['emitted'])})" for task, rows in tasks.items()]
    return markdown(["rule", *head], lines)


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
    """One panel per title, one line per name with its intervals as bars; level 1 is marked.

    Args:
        labels: of the axes.
        styles: how matplotlib draws a name; others are lines with points, in a rule's usual colour.
        columns: panels side by side; all unless given.
        ticks: of the x axis.
        log: whether that is logarithmic.
    """
    wide = columns or len(lines)
    figure, grid = panels([""] * wide, 3.4, rows=-(-len(lines) // wide), sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    colours = rule_colours(list(dict.fromkeys(name for series in lines.values() for name in series)))
    for axes in grid.flat[len(lines) :]:
        axes.set_axis_off()
    for axes, (title, series) in zip(grid.flat, lines.items(), strict=False):
        if not series:
            axes.set_axis_off()
            continue
        axes.set_title(title, fontsize=11, color=INK)
        for name, (x, values) in series.items():
            estimates = [np.atleast_1d(value)[0] for value in values]
            style = (styles or {}).get(name, {"color": colours[name], "marker": "."})
            (handles[name],) = axes.plot(x, estimates, label=name, **style)
            for at, value in zip(x, values, strict=True):
                if isinstance(value, tuple):
                    axes.plot([at, at], value[1:], color=handles[name].get_color(), lw=0.9, alpha=0.7)
        axes.axhline(1.0, color=INK, lw=0.8, ls=":")
        if log:
            axes.set_xscale("log")
        if len(ticks):
            axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
    for axes in grid[-1]:
        axes.set_xlabel(labels[0])
    for axes in grid[:, 0]:
        axes.set_ylabel(labels[1])
    columns = min(4, 2 * wide)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def map_figure(maps: Mapping[str, np.ndarray], across: Knob, up: Knob, label: str) -> Figure:
    """A heat map per title, all on one scale: the figure at each pair of two knobs' values, arrays [up, across]."""
    figure, grid = panels(list(maps), max(2.7, 0.8 + 0.3 * len(up[1])), width=max(3.0, 1.0 + 0.45 * len(across[1])))
    low, high = (float(end(list(maps.values()))) for end in (np.min, np.max))
    for axes, values in zip(grid[0], maps.values(), strict=True):
        axes.grid(visible=False)
        image = axes.imshow(values, cmap="cividis", vmin=low, vmax=high, aspect="auto", origin="lower")
        axes.set_xticks(range(len(across[1])), [number(value) for value in across[1]])
        axes.set_yticks(range(len(up[1])), [number(value) for value in up[1]])
        axes.set(xlabel=across[0], ylabel=up[0])
        for (row, column), value in np.ndenumerate(values):
            colour = "white" if 2 * value < low + high else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=list(grid[0]), label=label, pad=0.02)
    return figure


Point = tuple[str, float, float, float]  # name, estimate, low, high


def dots_figure(panels: Mapping[str, Sequence[Point]], label: str, marked: Mapping[str, str]) -> Figure:
    """Points with intervals, in the order given; `marked` names get a colour of their own."""
    columns = max(len(points) for points in panels.values())
    figure = Figure(figsize=(4.9 * len(panels), 1.2 + 0.27 * columns), dpi=150, layout="constrained")
    axes_row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, points) in zip(axes_row, panels.items(), strict=True):
        for place, (name, estimate, low, high) in enumerate(points):
            colour = marked.get(name, INK)
            axes.plot([low, high], [place, place], color=colour, lw=1.6, solid_capstyle="butt")
            axes.plot([estimate], [place], "o", color=colour, ms=4.5)
            end = estimate if np.isnan(high) else high  # of a single prompt there is no interval
            axes.annotate(f"{estimate:.2f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
        axes.axvline(1.0, color="#999999", lw=1, ls="--", zorder=0)
        axes.set_yticks(range(len(points)), [name for name, *_ in points], fontsize=8)
        for tick, (name, *_) in zip(axes.get_yticklabels(), points, strict=True):
            tick.set_color(marked.get(name, INK))
        axes.set_ylim(len(points) - 0.5, -0.5)
        axes.margins(x=0.12)
        plain_axes(axes, title)
    figure.supxlabel(label, fontsize=9)
    return figure
