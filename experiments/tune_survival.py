"""Learn the survival rule's prior for a pair of models, and say what it is worth on prompts it has not seen.

Question:  How much better is a prior learnt for this pair than the built-in one, on other prompts?
Command:   python -m experiments.tune_survival TRACE-OR-FOLDER ... [--judge TRACE-OR-FOLDER ...] [--costs FILE]
Time:      10 seconds a temperature on 2 cores for 84 texts
Output:    runs/tune_survival-<time>/ with manifest.json, results.jsonl, prior.json and table.md

Of every trace a prior is fitted by likelihood (specdec_jax/analysis/calibration.py). With --judge it is judged on those
traces; without, each half of the texts judges the other's. prior.json has the numbers for `survival`:
`policy_numbers={"greedy": [...], "sampled": [...]}`; the sampled one is the mean over temperatures.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.markdown import Markdown

from experiments.rules import rule
from experiments.run_folder import TABLE, RunFolder
from experiments.smoke import made_up_traces
from experiments.studies import run
from experiments.traced import costs_or_default, faster, load_traces
from specdec_jax.analysis.calibration import fit_prior
from specdec_jax.analysis.cost_model import CostModel
from specdec_jax.analysis.replay import replay
from specdec_jax.analysis.trace import Trace, select
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
    traces = made_up_traces() if config.smoke else load_traces(config.traces)
    others = load_traces(config.judge) if config.judge else {}
    costs = costs_or_default(config.costs)
    folder = RunFolder.create("tune_survival", config, config.out)
    known = {row["temperature"] for row in folder.rows()}
    for temperature, trace in traces.items():
        if temperature not in known:
            with console.status(f"Temperature {temperature:g}"):
                folder.append({"temperature": temperature, **learn(trace, others.get(temperature), costs, config)})
    rows = folder.rows()
    folder.write_json("prior.json", priors(rows))
    folder.write_text(TABLE, report(rows) + "\n")
    console.print(Markdown(report(rows)))
    console.print(f"Written to {folder.path}/")


def learn(trace: Trace, other: Trace | None, costs: CostModel, config: TuneSurvival) -> dict[str, Any]:
    """The prior of the whole trace, and what priors are worth where they were not learnt."""
    learnt = fit_prior(trace)
    if other is not None:
        seconds = _judge(other, learnt, costs)
        plain = other.length * costs.plain_pass
    else:
        first = np.random.default_rng(config.seed).permutation(trace.num_texts) < trace.num_texts // 2
        halves = [np.flatnonzero(first), np.flatnonzero(~first)]
        found = [
            _judge(select(trace, judging), fit_prior(select(trace, learning)), costs)
            for learning, judging in (halves, halves[::-1])
        ]
        seconds = {name: np.concatenate([half[name] for half in found]) for name in found[0]}
        plain = np.concatenate([trace.length[half] for half in halves[::-1]]) * costs.plain_pass
    speeds = {name: list(faster(values, plain)) for name, values in seconds.items()}
    over = {name: list(faster(values, seconds["built-in"])) for name, values in seconds.items()}
    return {"prior": learnt._asdict(), "speedups": speeds, "over_built_in": over}


def _judge(trace: Trace, learnt: Prior, costs: CostModel) -> dict[str, np.ndarray]:
    """Seconds [N] of each prior."""
    built_in = SAMPLED if np.any(trace.temperature > 0) else GREEDY
    seconds = {}
    for name, prior in {"built-in": built_in, "learnt": learnt}.items():
        setting = {"greedy": np.array([prior]), "sampled": np.array([prior])}
        entry = rule("survival")
        numbers = entry.numbers([{}], costs, trace.max_draft_length) | setting
        seconds[name] = replay(trace, entry.build(), numbers).seconds(costs)[0]
    return seconds


def priors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers for `survival`: the greedy prior, and the sampled ones' mean and each by temperature."""
    by_temperature = {row["temperature"]: list(row["prior"].values()) for row in rows}
    found: dict[str, Any] = {"fields": list(Prior._fields)}
    sampled = {temperature: weights for temperature, weights in by_temperature.items() if temperature > 0}
    if 0.0 in by_temperature:
        found |= {"greedy": by_temperature[0.0]}
    if sampled:
        found |= {"sampled": np.mean(list(sampled.values()), axis=0).round(4).tolist(), "by_temperature": sampled}
    return found


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
