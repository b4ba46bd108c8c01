"""Speed-ups that experiments.compare measured, beside what a trace and a cost model predict for the same rules.

A rule is replayed with the hyperparameters that decoded, which a run folder's rows tell; folders of an earlier version
have them in the manifest, those of the config's calibration under those that its method names. Methods that no trace
tells of are left out: those with another drafter than the traces', and those whose verification keeps other tokens than
token rejection does.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from configs.base import rebuild
from experiments.lib.cells import at_temperature, markdown
from experiments.lib.plots import plain_axes, rule_colours
from experiments.lib.run_folder import MANIFEST, read_rows
from experiments.lib.summary import MethodSummary, summarise
from experiments.lib.trace_tables import plus_minus
from specdec_jax.costs.cost_model import CostModel, between
from specdec_jax.decoding import default_widths
from specdec_jax.loading.builtin import DRAFTERS, drafter_file
from specdec_jax.loading.draft_vocabulary import split_source
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.phase_path import phase_path
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import Trace, select
from specdec_jax.text.calibration import BUILT_IN, FILE, Calibration, hyperparameters_for, read_calibration
from specdec_jax.text.pair import PHASES
from specdec_jax.types import StoppingPolicy

NEAR = 0.15  # temperatures further apart are not compared
ALIKE = {"rejection": float("inf"), "greedy": 0.0, "block": 0.0}  # keep what rejection keeps, up to this temperature


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


class Rule(NamedTuple):
    """A stopping rule as a method decoded with it."""

    policy: StoppingPolicy
    hyperparameters: dict[str, Any]  # of its `init`
    phases: dict[str, Any]  # of the monitor's


def measured_points(path: str | Path, traces: Mapping[float, Trace], costs: CostModel) -> list[Point]:
    """Every method of a run folder that drafts as the traces do, at every temperature that a trace is near to.

    Raises:
        ValueError: no run folder of experiments.compare, a rule that cannot be built again, a calibration that cannot
            be read again, or no such method.
        FileNotFoundError: the run's calibration is gone.
    """
    try:
        config = json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))["config"]
        methods = {method["name"]: method for method in config["methods"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{str(path)!r} is no run folder of experiments.compare") from None
    rows, calibration, told_costs = read_rows(path), _calibration(config), _told_costs(Path(path))
    prompts = dict.fromkeys(str(row["prompt_id"]) for row in rows)
    points = []
    for entry in summarise(rows):
        near = min(traces, key=lambda temperature: abs(temperature - entry.temperature))
        method = methods[entry.method]
        if abs(near - entry.temperature) > NEAR or not _drafts_alike(method, config, entry.temperature):
            continue
        if traces[near].about.get("drafter") not in (None, config.get("drafter")):
            continue
        told = next((row for row in rows if _is_of(row, entry)), {}).get("policy_hyperparameters")
        rule = _rule(method, calibration, entry.temperature, told)
        trace, same = _of_prompts(shortened(traces[near], config["max_new_tokens"]), list(prompts))
        longest = int(method["max_draft_length"] or config["max_draft_length"])
        widths = told_costs.get(entry.method, {}).get("widths") or config["verification_widths"]
        here = between(costs, widths or default_widths(longest))
        predicted, acceptance = _predict(trace, rule, longest, here)
        fields = (entry.method, entry.temperature, near, same, entry.speedup_total, entry.draft_acceptance_rate)
        points.append(Point(*fields, predicted, acceptance))
    if not points:
        raise ValueError(f"{str(path)!r} has no method that traces at {sorted(traces)} tell of")
    return points


def _drafts_alike(method: Mapping[str, Any], config: Mapping[str, Any], temperature: float) -> bool:
    """Whether its rounds are a trace's: the config's own drafter, and verification that keeps what rejection keeps."""
    if method["policy"] is None or method["drafter"] not in (None, config.get("drafter")):
        return False
    return temperature <= ALIKE.get(method["verifier"]["strategy"].rpartition(":")[2], -1.0)


def _calibration(config: Mapping[str, Any]) -> Calibration | None:
    """What the run was calibrated with. It was checked against the pair's weights then, so its name is enough now."""
    source = config.get("calibration")
    if source != BUILT_IN:
        return None if source is None else read_calibration(source)
    name, _ = split_source(config["drafter"])
    if name not in DRAFTERS:
        raise ValueError(
            f"the built-in calibration of {config['drafter']!r} is found by no name: {list(DRAFTERS)} have one"
        )
    return read_calibration(drafter_file(name).parent / FILE)


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


def _told_costs(path: Path) -> dict[str, Any]:
    """What a run's methods were told of costs, and the widths chosen by them; of earlier runs nothing."""
    file = path / "costs.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _predict(trace: Trace, rule: Rule, longest: int, costs: CostModel) -> tuple[Interval, float]:
    """Speed-up and acceptance of a replay with the method's own longest draft and the widths its decoder has."""
    path = phase_path(trace, **rule.phases) if rule.policy.needs_phases else None
    # A hyperparameter that is a vector has a row for every setting, or a replay takes its entries for settings.
    one = {name: np.asarray(value)[None] for name, value in rule.hyperparameters.items()}
    widest = costs.widths[-1] if rule.policy.rounds is not None else None
    found = replay(trace, rule.policy, one, max_draft_length=longest, phases=path, widest=widest)
    speedup = ratio_of_totals(trace.length * costs.plain_pass, found.seconds(costs)[0])
    return speedup, float(found.acceptance_rate[0])


def _is_of(row: Mapping[str, Any], entry: MethodSummary) -> bool:
    return (row["method"], row["temperature"]) == (entry.method, entry.temperature)


def _rule(
    method: Mapping[str, Any], calibration: Calibration | None, temperature: float, told: Mapping[str, Any] | None
) -> Rule:
    """The rule with the hyperparameters its rows tell, or else the calibrated ones under those the method names."""
    policy, learnt, phases = _policy(method), {}, {}
    if calibration is not None:
        learnt = hyperparameters_for(calibration, "policy", policy, temperature)
        phases = hyperparameters_for(calibration, "monitor", PHASES, temperature)
    return Rule(policy, learnt if told is None else dict(told), phases)


def _policy(method: Mapping[str, Any]) -> StoppingPolicy:
    """The rule as the manifest describes it."""
    try:
        return rebuild(method["policy"])
    except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"the rule of {method['name']!r} cannot be built again: {error}") from None


def points_table(points: Sequence[Point], costs: CostModel) -> str:
    """Measured beside predicted, and how far apart they are."""
    head = ["method", "temp.", "measured", "predicted", "ratio", "accepted", "predicted"]
    lines = []
    for point in points:
        temperature = f"{point.temperature:g}"
        if point.trace_temperature != point.temperature:
            temperature += f" ({point.trace_temperature:g})"
        taken = "–" if point.acceptance is None else f"{point.acceptance:.0%}"
        both = [plus_minus(point.speedup), plus_minus(point.predicted)]
        accepted = [taken, f"{point.predicted_acceptance:.0%}"]
        lines.append([point.method, temperature, *both, f"{_ratio(point):.2f}", *accepted])
    ratios = [_ratio(point) for point in points]
    same = (
        "the same prompts" if all(point.same_prompts for point in points) else "other prompts where some were missing"
    )
    note = (
        f"Costs: {costs.device or 'unknown device'}, c = {costs.ratio:.3f}; {same}; ± is half of the 95 % interval "
        "over prompts; in brackets the temperature of the trace where there is none of the run's own; methods whose "
        "drafter or verification is not the traces' are left out. Measured over predicted: median "
        f"{np.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}."
    )
    return markdown(head, lines) + "\n\n" + note


def _ratio(point: Point) -> float:
    return point.speedup.estimate / point.predicted.estimate


def points_picture(points: Sequence[Point]) -> Figure:
    """Measured against predicted, with the intervals of both; on the diagonal they agree."""
    figure = Figure(figsize=(6.4, 5.0), dpi=150, layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(point.method for point in points))
    temperatures = list(dict.fromkeys(point.temperature for point in points))
    colours = rule_colours(names)
    bounds = [bound for point in points for value in (point.speedup, point.predicted) for bound in value]
    ends = [np.nanmin(bounds) - 0.05, np.nanmax(bounds) + 0.05]
    axes.plot(ends, ends, color="#222222", lw=0.8, ls=":")
    for point in points:
        x, y = point.predicted, point.speedup
        spans = {"xerr": [[x[0] - x[1]], [x[2] - x[0]]], "yerr": [[y[0] - y[1]], [y[2] - y[0]]]}
        marker = "os^Dv"[temperatures.index(point.temperature) % 5]
        label = f"{point.method}, {at_temperature(point.temperature)}"
        style: dict[str, Any] = {"color": colours[point.method], "ms": 7, "lw": 0.8, "label": label}
        axes.errorbar(x[0], y[0], **spans, fmt=marker, **style)
    axes.set(xlim=ends, ylim=ends, xlabel="predicted speed-up", ylabel="measured speed-up")
    plain_axes(axes, "Speed-up over plain decoding, 95 % intervals over prompts")
    axes.legend(*_without_bars(axes), fontsize=8, frameon=False)
    return figure


def _without_bars(axes: Any) -> tuple[list[Any], list[str]]:
    """A legend's handles without their error bars."""
    handles, labels = axes.get_legend_handles_labels()
    return [handle[0] for handle in handles], labels
