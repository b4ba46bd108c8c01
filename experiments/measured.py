"""Speed-ups that experiments.compare measured, beside what a trace and a cost model predict for the same rules."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments import studies
from experiments.run_folder import MANIFEST, read_rows
from experiments.summary import summarise
from specdec_jax.analysis.cost_model import CostModel, between
from specdec_jax.analysis.replay import replay
from specdec_jax.analysis.statistics import Interval, ratio_of_totals
from specdec_jax.analysis.trace import Trace, select
from specdec_jax.decoding import default_widths
from specdec_jax.types import StoppingPolicy

NEAR = 0.15  # temperatures further apart are not compared


class Point(NamedTuple):
    """A method of a measured run."""

    method: str
    temperature: float
    trace_temperature: float  # the trace's whose texts were replayed
    same_prompts: bool  # those texts answer the run's own prompts
    speedup: Interval  # measured, total over total
    acceptance: float | None
    predicted: Interval
    predicted_acceptance: float


def measured_points(path: str | Path, traces: Mapping[float, Trace], costs: CostModel) -> list[Point]:
    """Every speculative method of a run folder at every temperature that a trace is near to.

    Raises:
        ValueError: no run folder of experiments.compare, a rule that cannot be built again, or no trace near enough.
    """
    try:
        config = json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))["config"]
        methods = {method["name"]: method for method in config["methods"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{str(path)!r} is no run folder of experiments.compare") from None
    rows = read_rows(path)
    prompts = dict.fromkeys(str(row["prompt_id"]) for row in rows)
    points = []
    for entry in summarise(rows):
        near = min(traces, key=lambda heat: abs(heat - entry.temperature))
        method = methods[entry.method]
        if method["policy"] is None or abs(near - entry.temperature) > NEAR:
            continue
        trace, same = _of_prompts(shortened(traces[near], config["max_new_tokens"]), list(prompts))
        predicted, acceptance = _predict(trace, method, config, costs)
        fields = (entry.method, entry.temperature, near, same, entry.speedup_total, entry.draft_acceptance_rate)
        points.append(Point(*fields, predicted, acceptance))
    if not points:
        raise ValueError(f"{str(path)!r} has no speculative method at a temperature near {sorted(traces)}")
    return points


def _of_prompts(trace: Trace, prompts: Sequence[str]) -> tuple[Trace, bool]:
    """The texts of these prompts, or all texts where some are missing."""
    place = {str(name): index for index, name in enumerate(trace.about.get("ids", ()))}
    if not all(prompt in place for prompt in prompts):
        return trace, False
    return select(trace, [place[prompt] for prompt in prompts]), True


def shortened(trace: Trace, most: int) -> Trace:
    """The trace that a run with at most `most` new tokens would have had; exact, for answers are prefixes of longer
    ones and no draft reaches the last token that the budget allows."""
    limit = np.minimum(trace.limit, most).astype(np.int32)
    length = np.minimum(trace.length, limit)
    within = np.arange(trace.accepted.shape[1])[None, :] < length[:, None]
    return trace._replace(limit=limit, length=length, accepted=trace.accepted & within)


def _predict(
    trace: Trace, method: Mapping[str, Any], config: Mapping[str, Any], costs: CostModel
) -> tuple[Interval, float]:
    """Speed-up and acceptance of a replay with the method's own longest draft and the widths its decoder has."""
    longest = int(method["max_draft_length"] or config["max_draft_length"])
    here = between(costs, config["verification_widths"] or default_widths(longest))
    found = replay(trace, _policy(method), method["numbers"], max_draft_length=longest)
    speedup = ratio_of_totals(trace.length * here.plain_pass, found.seconds(here)[0])
    return speedup, float(found.acceptance_rate[0])


def _policy(method: Mapping[str, Any]) -> StoppingPolicy:
    """The rule as the manifest names it, `module:factory` with its structure."""
    try:
        module, factory = method["policy"].split(":")
        return getattr(importlib.import_module(module), factory)(**method["structure"])
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"the rule of {method['name']!r} cannot be built again: {error}") from None


def points_table(points: Sequence[Point], costs: CostModel) -> str:
    """Measured beside predicted, and how far apart they are."""
    head = ["method", "temp.", "measured", "predicted", "ratio", "accepted", "predicted"]
    lines = []
    for point in points:
        heat = f"{point.temperature:g}"
        if point.trace_temperature != point.temperature:
            heat += f" ({point.trace_temperature:g})"
        taken = "–" if point.acceptance is None else f"{point.acceptance:.0%}"
        both = [_interval(point.speedup), _interval(point.predicted)]
        accepted = [taken, f"{point.predicted_acceptance:.0%}"]
        lines.append([point.method, heat, *both, f"{_ratio(point):.2f}", *accepted])
    ratios = [_ratio(point) for point in points]
    same = (
        "the same prompts" if all(point.same_prompts for point in points) else "other prompts where some were missing"
    )
    note = (
        f"Costs: {costs.device or 'unknown device'}, c = {costs.ratio:.3f}; {same}; ± is half of the 95 % interval "
        "over prompts; in brackets the temperature of the trace where there is none of the run's own. Measured over "
        f"predicted: median {np.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}."
    )
    return studies.table(head, lines) + "\n\n" + note


def _ratio(point: Point) -> float:
    return point.speedup.estimate / point.predicted.estimate


def _interval(value: Interval) -> str:
    return f"{value.estimate:.2f} ±{(value.high - value.low) / 2:.2f}"


def points_picture(points: Sequence[Point]) -> Figure:
    """Measured against predicted, with the intervals of both; on the diagonal they agree."""
    figure = Figure(figsize=(6.4, 5.0), dpi=150, layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(point.method for point in points))
    heats = list(dict.fromkeys(point.temperature for point in points))
    colours = studies.colours(names)
    bounds = [bound for point in points for value in (point.speedup, point.predicted) for bound in value]
    ends = [np.nanmin(bounds) - 0.05, np.nanmax(bounds) + 0.05]
    axes.plot(ends, ends, color="#222222", lw=0.8, ls=":")
    for point in points:
        x, y = point.predicted, point.speedup
        spans = {"xerr": [[x[0] - x[1]], [x[2] - x[0]]], "yerr": [[y[0] - y[1]], [y[2] - y[0]]]}
        marker = "os^Dv"[heats.index(point.temperature) % 5]
        label = f"{point.method}, {studies.heat(point.temperature)}"
        style: dict[str, Any] = {"color": colours[point.method], "ms": 7, "lw": 0.8, "label": label}
        axes.errorbar(x[0], y[0], **spans, fmt=marker, **style)
    axes.set(xlim=ends, ylim=ends, xlabel="predicted speed-up", ylabel="measured speed-up")
    studies.plain_axes(axes, "Speed-up over plain decoding, 95 % intervals over prompts")
    axes.legend(*_without_bars(axes), fontsize=8, frameon=False)
    return figure


def _without_bars(axes: Any) -> tuple[list[Any], list[str]]:
    """A legend's handles without their error bars."""
    handles, labels = axes.get_legend_handles_labels()
    return [handle[0] for handle in handles], labels
