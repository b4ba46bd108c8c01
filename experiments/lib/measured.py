"""Speed-ups that experiments.compare measured, and what a trace and a cost model predict for the same rules.

A rule is replayed with the hyperparameters that decoded, which the rows of a run folder hold. Methods that a trace
cannot play are left out: those with another drafter than the traces', and those whose verification accepts other
tokens than token rejection does.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.base import rebuild
from experiments.lib.cells import markdown
from experiments.lib.run_folder import read_manifest, read_rows
from experiments.lib.summary import summarise
from experiments.lib.trace_tables import plus_minus
from specdec_jax.costs.cost_model import CostModel, between
from specdec_jax.decoding import default_widths
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.phase_path import phase_path
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import Trace, select
from specdec_jax.types import StoppingPolicy

NEAR = 0.15  # temperatures further apart are not compared
ALIKE = {"rejection": float("inf"), "greedy": 0.0, "block": 0.0}  # accept what rejection does up to this temperature


class Point(NamedTuple):
    """A method of a measured run."""

    method: str
    temperature: float
    trace_temperature: float  # temperature of the replayed trace
    same_prompts: bool  # whether its texts answer the run's prompts
    speedup: Interval  # measured, total over total
    acceptance: float | None
    predicted: Interval
    predicted_acceptance: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.speedup.estimate / self.predicted.estimate


def measured_points(path: str | Path, traces: Mapping[float, Trace], costs: CostModel) -> list[Point]:
    """Every method of a run folder that drafts as the traces do, at every temperature that a trace is near to.

    Raises:
        ValueError: no run folder of experiments.compare, or of a version whose rows do not hold the hyperparameters,
            a rule that cannot be built again, or no such method.
    """
    try:
        config, rows = read_manifest(path)["config"], read_rows(path)
        methods = {method["name"]: method for method in config["methods"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{str(path)!r} is no run folder of experiments.compare") from None
    file = Path(path) / "costs.json"
    run_costs = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    prompts = dict.fromkeys(str(row["prompt_id"]) for row in rows)
    points = []
    for entry in summarise(rows):
        near, method = min(traces, key=lambda t: abs(t - entry.temperature)), methods[entry.method]
        if abs(near - entry.temperature) > NEAR or not _drafts_alike(method, config, entry.temperature, traces[near]):
            continue
        row = next(row for row in rows if (row["method"], row["temperature"]) == (entry.method, entry.temperature))
        if not {"policy_hyperparameters", "monitor_hyperparameters"} <= row.keys():
            raise ValueError(f"{str(path)!r} is of an earlier version: its rows do not hold the hyperparameters")
        trace = shortened(traces[near], config["max_new_tokens"])
        place = {str(name): index for index, name in enumerate(trace.about.get("ids", ()))}
        same = all(prompt in place for prompt in prompts)
        trace = select(trace, [place[prompt] for prompt in prompts]) if same else trace
        longest = int(method["max_draft_length"] or config["max_draft_length"])
        widths = run_costs.get(entry.method, {}).get("widths") or config["verification_widths"]
        here = between(costs, widths or default_widths(longest))
        try:
            policy = rebuild(method["policy"])
        except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"the rule of {method['name']!r} cannot be built again: {error}") from None
        predicted = _predict(trace, policy, row, longest, here)
        fields = (entry.method, entry.temperature, near, same, entry.speedup_total, entry.draft_acceptance_rate)
        points.append(Point(*fields, *predicted))
    if not points:
        raise ValueError(f"{str(path)!r} has no method that traces at {sorted(traces)} can play")
    return points


def _drafts_alike(method: Mapping[str, Any], config: Mapping[str, Any], temperature: float, trace: Trace) -> bool:
    """Whether its rounds are a trace's: the same drafter, and verification that accepts what rejection accepts."""
    drafter = config.get("drafter")
    if method["policy"] is None or method["drafter"] not in (None, drafter):
        return False
    if trace.about.get("drafter") not in (None, drafter):
        return False
    return temperature <= ALIKE.get(method["verifier"]["strategy"].rpartition(":")[2], -1.0)


def shortened(trace: Trace, longest: int) -> Trace:
    """The trace that a run with at most `longest` new tokens would have had; exact, for answers are prefixes of longer
    ones and no draft reaches the last token that the budget allows."""
    limit = np.minimum(trace.limit, longest).astype(np.int32)
    length = np.minimum(trace.length, limit)
    within = np.arange(trace.accepted.shape[1])[None, :] < length[:, None]
    return trace._replace(limit=limit, length=length, accepted=trace.accepted & within)


def _predict(
    trace: Trace, policy: StoppingPolicy, row: Mapping[str, Any], longest: int, costs: CostModel
) -> tuple[Interval, float]:
    """Speed-up and acceptance of a replay with a row's hyperparameters, the method's limit and the decoder's widths."""
    # A hyperparameter that is a vector has a row for every setting, or a replay takes its entries for settings.
    hyperparameters = {name: np.asarray(value)[None] for name, value in row["policy_hyperparameters"].items()}
    path = phase_path(trace, **row["monitor_hyperparameters"]) if policy.needs_phases else None
    widest = costs.widths[-1] if policy.rounds is not None else None
    result = replay(trace, policy, hyperparameters, max_draft_length=longest, phases=path, widest=widest)
    speedup = ratio_of_totals(trace.length * costs.plain_pass, result.seconds(costs)[0])
    return speedup, float(result.acceptance_rate[0])


def points_table(points: Sequence[Point], costs: CostModel) -> str:
    """Measured next to predicted, and how far apart they are."""
    lines = []
    for point in points:
        temperature = f"{point.temperature:g}"
        if point.trace_temperature != point.temperature:
            temperature += f" ({point.trace_temperature:g})"
        taken = "–" if point.acceptance is None else f"{point.acceptance:.0%}"
        both = [plus_minus(point.speedup), plus_minus(point.predicted)]
        accepted = [taken, f"{point.predicted_acceptance:.0%}"]
        lines.append([point.method, temperature, *both, f"{point.ratio:.2f}", *accepted])
    ratios = [point.ratio for point in points]
    same = "the same prompts" if all(point.same_prompts for point in points) else "other prompts where some are missing"
    note = (
        f"Costs: {costs.device or 'unknown device'}, c = {costs.ratio:.3f}; {same}; ± is half of the 95 % interval "
        "over prompts; in brackets the temperature of the trace where none has the run's; methods whose drafter or "
        "verification is not the traces' are left out. Measured over predicted: median "
        f"{np.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}."
    )
    head = ["method", "temp.", "measured", "predicted", "ratio", "accepted", "predicted"]
    return markdown(head, lines) + "\n\n" + note
