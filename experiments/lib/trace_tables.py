"""Cells, headings and panels that tables and pictures of traces share."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib import studies
from experiments.lib.trace_runs import Run, Source
from specdec_jax.metrics.intervals import Interval

NONE = "–"


def times(value: Interval | None, digits: int = 2) -> str:
    """A ratio with its interval."""
    if value is None:
        return NONE
    if not value.high > value.low:  # NaN of a single text, or no spread
        return f"{value.estimate:.{digits}f}"
    return f"{value.estimate:.{digits}f} [{value.low:.{digits}f}–{value.high:.{digits}f}]"


def percent_more(value: Interval | None) -> str:
    """A ratio as the percentage above 1, with its interval; bold where the interval leaves 1 out."""
    if value is None:
        return NONE
    texts = [f"{100 * (bound - 1):+.1f}" for bound in value]
    if not value.high > value.low:
        return f"{texts[0]} %"
    text = f"{texts[0]} % [{texts[1]}, {texts[2]}]"
    return f"**{text}**" if value.low > 1 or value.high < 1 else text


def share(value: float) -> str:
    """A share as a percentage."""
    return f"{value:.0%}"


def number(value: Any) -> str:
    """A setting's number, short."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def setting(settings: Sequence[Mapping[str, Any]], name: str | None = None) -> str:
    """What was chosen on either half: 'threshold 0.3 / 0.4'; only the values of one number if its name is given."""
    texts = []
    for chosen in settings:
        values = {key: value for key, value in chosen.items() if name in (None, key)}
        texts.append(", ".join(number(v) if name else f"{key} {number(v)}" for key, v in values.items()))
    return " / ".join(dict.fromkeys(text or "as published" for text in texts))


def about(run: Run) -> str:
    """One sentence on the traces and one on the machine."""
    costs = run.costs
    machine = costs.device or f"a machine with {costs.target_pass[-1] / costs.target_pass[0]:.2f} for its widest pass"
    return f"{about_traces(run)} Replayed; time: {machine}, c = {costs.ratio:.3f}."


def about_traces(run: Run) -> str:
    """One sentence on the traces."""
    first = run.sources[0]
    texts = {source.trace.num_texts for source in run.sources}
    positions = sum(source.trace.num_positions for source in run.sources)
    names = ", ".join(dict.fromkeys(source.drafter for source in run.sources))
    made_up = " **Made-up traces: the numbers mean nothing.**" if run.options.smoke else ""
    return (
        f"Traces of {first.trace.about.get('target', 'a target')} with {names}: "
        f"{' or '.join(map(str, sorted(texts)))} texts a trace, {positions} tokens in all.{made_up}"
    )


def sections(run: Run) -> list[tuple[Source, str]]:
    """Every source with its heading."""
    several = len({source.drafter for source in run.sources}) > 1
    names = [
        f"{source.drafter}, {studies.at_temperature(source.temperature)}"
        if several
        else studies.at_temperature(source.temperature)
        for source in run.sources
    ]
    return [(source, name[0].upper() + name[1:]) for source, name in zip(run.sources, names, strict=True)]


def panels(
    titles: Sequence[str], height: float = 3.6, rows: int = 1, width: float = 4.2, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure with a column a title; axes are [rows, columns]."""
    wide = max(width * len(titles), 6.0)
    figure = Figure(figsize=(wide, height * rows), dpi=150, layout="constrained")
    grid = figure.subplots(rows, len(titles), squeeze=False, **options)
    for row in range(rows):
        for axes, title in zip(grid[row], titles, strict=True):
            studies.plain_axes(axes, title if row == 0 else "")
    return figure, grid


def palette(names: Sequence[str]) -> dict[str, str]:
    """A colour for each rule; those of these commands have the same in all their pictures."""
    return studies.colours(list(dict.fromkeys(("max-confidence", "svip", *names))))


def band(axes: Axes, x: Sequence[float], values: Sequence[Interval], colour: str, **options: Any) -> None:
    """A line with its interval as a band."""
    axes.plot(x, [value.estimate for value in values], color=colour, **options)
    axes.fill_between(x, [v.low for v in values], [v.high for v in values], color=colour, alpha=0.13, lw=0)


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
