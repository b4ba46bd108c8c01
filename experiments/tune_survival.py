"""Learn the survival rule's prior for a pair of models, and say what it is worth on prompts it has not seen.

Question:  How much better is a prior learnt for this pair than the built-in one, on other prompts?
Command:   python -m experiments.tune_survival TRACE-OR-FOLDER ... [--judge TRACE-OR-FOLDER ...] [--costs FILE]
Time:      10 seconds a temperature on 2 cores for 84 texts
Output:    runs/tune_survival-<time>/ with manifest.json, results.jsonl, prior.json and table.md

Of the greedy trace, and of all sampled ones together, a prior is fitted by likelihood
(specdec_jax/metrics/prior.py). With --judge it is judged on those traces; without, each half of the texts judges
the other's. prior.json has the hyperparameters for `survival`:
`survival(greedy=[...], sampled=[...])`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from experiments.lib.rules import rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.studies import publish, run, traces_of
from experiments.lib.traced import costs_or_default, faster, load_traces
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.replay.cost_model import CostModel
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import Trace, select
from specdec_jax.stopping.survival import GREEDY, SAMPLED, Prior


@dataclass(frozen=True)
class TuneSurvival:
    """Learn a prior from traces."""

    traces: tyro.conf.Positional[tuple[str, ...]] = ()
    """Traces of a pair of models, one a temperature, or folders of them."""
    judge: tuple[str, ...] = ()
    """Traces of other prompts to judge on; none: the halves judge each other."""
    costs: str | None = None
    """A cost model; none: configs/costs/cpu.json."""
    seed: int = 0
    """Of the halves and the intervals."""
    smoke: bool = False
    """Seconds, on made-up traces."""
    out: str | None = None
    """Run folder; none: runs/tune_survival-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Learns and judges; 2 on bad input."""
    return run(TuneSurvival, tune, __doc__, arguments)


def tune(config: TuneSurvival, console: Console) -> None:
    """Learns what is missing and writes the run folder."""
    traces = traces_of(config.traces, config.smoke, 1)
    others = load_traces(config.judge) if config.judge else {}
    costs = costs_or_default(config.costs)
    folder = RunFolder.create("tune_survival", config, config.out)
    known = {row["temperature"] for row in folder.rows()}
    for kind in ("greedy", "sampled"):
        group = {
            temperature: trace for temperature, trace in traces.items() if (temperature > 0) == (kind == "sampled")
        }
        if any(temperature not in known for temperature in group):
            with console.status(f"Learning the {kind} prior"):
                for row in learn(
                    kind, group, {temperature: others.get(temperature) for temperature in group}, costs, config
                ):
                    if row["temperature"] not in known:
                        folder.append(row)
    rows = folder.rows()
    folder.write_json("prior.json", priors(rows))
    publish(folder, report(rows) + "\n", console)


def learn(
    kind: str, traces: dict[float, Trace], others: dict[float, Trace | None], costs: CostModel, config: TuneSurvival
) -> list[dict[str, Any]]:
    """A row a temperature: the prior of all these traces, and what priors are worth where they were not learnt."""
    learnt = fit_prior(*traces.values())
    halves = {
        temperature: np.random.default_rng(config.seed).permutation(trace.num_texts) % 2
        for temperature, trace in traces.items()
    }
    by_half = []
    if None in others.values():
        for half in (0, 1):
            parts = [
                select(trace, np.flatnonzero(halves[temperature] == half)) for temperature, trace in traces.items()
            ]
            by_half.append(fit_prior(*parts))
    rows = []
    for temperature, trace in traces.items():
        judged, other = others[temperature] or trace, others[temperature]
        seconds = _judge(judged, kind, learnt, costs)
        if other is None:
            found = [_judge(trace, kind, by_half[half], costs)["learnt"] for half in (1, 0)]
            seconds["learnt"] = np.where(halves[temperature] == 0, *found)
        plain = judged.length * costs.plain_pass
        rows.append(
            {
                "temperature": temperature,
                "kind": kind,
                "prior": learnt._asdict(),
                "speedups": {name: list(faster(values, plain)) for name, values in seconds.items()},
                "over_built_in": {name: list(faster(v, seconds["built-in"])) for name, v in seconds.items()},
            }
        )
    return rows


def _judge(trace: Trace, kind: str, learnt: Prior, costs: CostModel) -> dict[str, np.ndarray]:
    """Seconds [N] of each prior."""
    built_in = SAMPLED if kind == "sampled" else GREEDY
    entry, seconds = rule("survival"), {}
    for name, prior in {"built-in": built_in, "learnt": learnt}.items():
        setting = {"greedy": np.array([prior]), "sampled": np.array([prior])}
        hyperparameters = entry.hyperparameters([{}], costs, trace.max_draft_length) | setting
        seconds[name] = replay(trace, entry.policy, hyperparameters).seconds(costs)[0]
    return seconds


def priors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Hyperparameters for `survival`, by kind of decoding."""
    by_kind = {row["kind"]: [round(weight, 4) for weight in row["prior"].values()] for row in rows}
    return {"fields": list(Prior._fields), **by_kind}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A line a temperature and prior."""
    lines = ["| temperature | prior | speed-up (95 %) | over the built-in one (95 %) |", "| ---: | --- | ---: | ---: |"]
    for row in rows:
        for name, speed in row["speedups"].items():
            cells = [f"{v[0]:.3f} ({v[1]:.3f}–{v[2]:.3f})" for v in (speed, row["over_built_in"][name])]
            lines.append(f"| {row['temperature']:g} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
