"""What experiments on traces share: traces by temperature, rules over them, and choosing on one half of the prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.rules import Rule
from experiments.lib.smoke import made_up_traces
from specdec_jax.costs.cost_model import CostModel, cost_model, load_cost_model
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.metrics.repetition import repeated_share
from specdec_jax.replay.phase_path import percentile_thresholds, phase_path
from specdec_jax.replay.replay import Replay, replay
from specdec_jax.replay.trace import Trace, load_trace

COSTS = Path(__file__).resolve().parents[2] / "configs" / "costs" / "cpu.json"
MOST_REPEATED = 0.1  # texts with a larger share of repeated tokens are left out where repeats are


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files; a folder stands for all trace-*.npz in it.

    Raises:
        FileNotFoundError: a folder that holds none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("trace-*.npz")) if path.is_dir() else [path]
        if not found:
            raise FileNotFoundError(f"no trace-*.npz in {str(path)!r}; python -m experiments.record writes them")
        files += found
    return files


def load_traces(paths: Sequence[str | Path], least: int = 1) -> dict[float, Trace]:
    """Traces of one drafter by temperature, ascending; a folder stands for all trace-*.npz in it.

    Raises:
        FileNotFoundError, ValueError: as `load_by_drafter`, or traces of several drafters.
    """
    groups = load_by_drafter(paths, least)
    if len(groups) > 1:
        raise ValueError(f"this takes traces of one drafter, got those of {', '.join(groups)}")
    return next(iter(groups.values()), {})


def traces_of(paths: Sequence[str], smoke: bool, longest: int) -> dict[float, Trace]:
    """Traces of one drafter by temperature, or made-up ones. Raises as `load_traces`."""
    if not paths and not smoke:
        raise ValueError("name traces that python -m experiments.record wrote, or give --smoke")
    return made_up_traces() if smoke else load_traces(paths, longest)


def load_by_drafter(paths: Sequence[str | Path], least: int = 1) -> dict[str, dict[float, Trace]]:
    """Traces by the drafter that they name and by temperature, ascending.

    Raises:
        FileNotFoundError: a file or folder that is not there or holds none.
        ValueError: two traces of one temperature, one of several temperatures, or tails shorter than `least`.
    """
    groups: dict[str, dict[float, Trace]] = {}
    for file in trace_files(paths):
        trace = load_trace(file)
        traces = groups.setdefault(str(trace.about.get("drafter", "drafter")), {})
        # 0.7, not float32's 0.69999999
        temperatures = np.unique(np.round(trace.temperature.astype(np.float64), 6)).tolist()
        if len(temperatures) > 1 or temperatures[0] in traces:
            raise ValueError(f"{file}: one trace a temperature, got {temperatures} beside {sorted(traces)}")
        if trace.max_draft_length < least:
            most = trace.max_draft_length
            raise ValueError(
                f"{file} holds drafts of up to {most} tokens, {least} are asked for: give --max-draft-length {most}, "
                f"or record longer ones (python -m experiments.record --max-draft-length {least})"
            )
        traces[temperatures[0]] = trace
    return {drafter: dict(sorted(traces.items())) for drafter, traces in groups.items()}


def texts_by_task(trace: Trace) -> dict[str, np.ndarray]:
    """Indices of each task's texts, tasks in order of appearance."""
    tasks = np.array(trace.about.get("tasks") or ["all"] * trace.num_texts)
    return {task: np.flatnonzero(tasks == task) for task in dict.fromkeys(tasks.tolist())}


def repeated_shares(trace: Trace) -> np.ndarray:
    """The share [N] of each answer's tokens that repeat earlier ones (loops of a small target)."""
    return np.array([repeated_share(trace.tokens[text, : trace.length[text]]) for text in range(trace.num_texts)])


def costs_or_default(path: str | Path | None) -> CostModel:
    """The cost model at `path`, or of that name in configs/costs (tpu-v5e: its compiler's estimate).

    Without one, what was measured on two x86 cores (docs/performance.md).
    """
    named = COSTS if path is None else COSTS.parent / f"{path}.json"
    return load_cost_model(named if named.is_file() else path)


def flat_costs(ratio: float, slope: float, longest: int) -> CostModel:
    """A machine by two numbers: c, and what one more verified token costs in target passes."""
    return cost_model(ratio, {width: 1.0 + slope * (width - 1) for width in range(1, longest + 2)})


def replay_rule(
    trace: Trace,
    rule: Rule,
    costs: CostModel,
    longest: int,
    settings: Sequence[Mapping[str, Any]] | None = None,
    phases: Mapping[str, Any] | None = None,
) -> Replay:
    """A rule's settings (its published one unless given) over a trace, told the machine's costs.

    One that reads phases gets them at the hyperparameters `phases`, or at percentiles of the texts' own running
    entropy.
    """
    chosen, policy = [rule.settings()[0]] if settings is None else list(settings), rule.policy
    path = phase_path(trace, **(phases or percentile_thresholds(trace))) if policy.needs_phases else None
    widest = costs.widths[-1] if policy.rounds is not None else None
    told = rule.hyperparameters(chosen, costs, longest)
    return replay(trace, policy, told, max_draft_length=longest, phases=path, widest=widest)


class Judged(NamedTuple):
    """A rule whose setting was chosen on other prompts. Arrays are [N], one entry a text."""

    seconds: np.ndarray
    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    passes: np.ndarray
    settings: tuple[dict[str, Any], ...]  # chosen on the first half and on the second


def chosen_on_other_half(found: Replay, costs: CostModel, settings: Sequence[dict[str, Any]], seed: int = 0) -> Judged:
    """Every text at the setting that was fastest, total over total, on the half of the texts it does not belong to."""
    texts = found.emitted.shape[1]
    first = np.random.default_rng(seed).permutation(texts) < texts // 2
    seconds = found.seconds(costs)
    fields = {name: np.zeros(texts) for name in Judged._fields[:-1]}
    chosen = []
    for half in (first, ~first):
        best = int(np.argmin(seconds[:, half].sum(axis=1))) if half.any() else 0
        chosen.append(settings[best])
        fields["seconds"][~half] = seconds[best, ~half]
        for name in ("rounds", "drafted", "accepted", "passes"):
            fields[name][~half] = getattr(found, name)[best, ~half]
    return Judged(**fields, settings=tuple(chosen))


def faster(seconds: np.ndarray, than: np.ndarray, seed: int = 0) -> Interval:
    """How many times faster, total over total, with a paired bootstrap interval over the texts."""
    return ratio_of_totals(than, seconds, seed=seed)
