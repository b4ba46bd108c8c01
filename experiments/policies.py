"""All stopping rules side by side: at their published settings, and at those chosen on the other half of the prompts.

Question:  Which rule makes decoding fastest, where, and how much of what could be gained does it gain?
Command:   python -m experiments.policies TRACE-OR-FOLDER ... [--costs FILE] [--rules adaedl survival ...]
Time:      two minutes on 2 cores for 240 texts at three temperatures
Expected:  docs/results.md has the tables
Output:    runs/policies-<time>/ with manifest.json, results.jsonl, table.md and policies.png

Replays of traces (`python -m experiments.record`); time is the cost model's. A setting is chosen per task, on the half
of its prompts that it is not judged on. Head-room is what lies between the best static length, chosen likewise, and the
oracle, which never drafts a token that will be rejected. "Knows the overlap" is the survival rule told before every
draw the true sum of min(p, q): the target's opinion, which no drafter has.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console

from experiments.lib.dots import dots_figure
from experiments.lib.rules import RULES, Rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.studies import (
    RULE_COLOURS,
    STATIC,
    at_temperature,
    chosen_rules,
    missing,
    publish,
    run,
    table,
    traces_of,
)
from experiments.lib.trace_runs import of_texts
from experiments.lib.traced import (
    MOST_REPEATED,
    chosen_on_other_half,
    costs_or_default,
    faster,
    repeated_shares,
    replay_rule,
    texts_by_task,
)
from specdec_jax.replay.cost_model import CostModel
from specdec_jax.replay.oracle_acceptance import oracle_acceptance
from specdec_jax.replay.replay import oracle
from specdec_jax.replay.trace import Trace

ORACLE, CLAIRVOYANT = "oracle", "oracle acceptance"
LIMITS = (CLAIRVOYANT, ORACLE)
HEAD = ("rule", "publ.", "chosen", "over static (95 %)", "head-room", "rank", "acc.", "tokens", "wasted")


@dataclass(frozen=True)
class Policies:
    """Compare every rule on traces."""

    traces: tyro.conf.Positional[tuple[str, ...]] = ()
    """Traces, one a temperature, or folders of them."""
    rules: tuple[str, ...] = ()
    """Names of experiments/lib/rules.py; none: all. The static length is always there."""
    costs: str | None = None
    """A cost model (cost_model.json of experiments.step_cost); none: configs/costs/cpu.json."""
    max_draft_length: int = 16
    """Most drafts a round."""
    seed: int = 0
    """Of the halves and the intervals."""
    smoke: bool = False
    """Seconds, on made-up traces."""
    out: str | None = None
    """Run folder; none: runs/policies-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 on bad input."""
    return run(Policies, compare, __doc__, arguments)


def compare(config: Policies, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    chosen = chosen_rules(config.rules) if config.rules else list(RULES)
    traces = traces_of(config.traces, config.smoke, config.max_draft_length)
    costs = costs_or_default(config.costs)
    folder = RunFolder.create("policies", config, config.out)
    entries = {entry.name: entry for entry in chosen} | {name: name for name in LIMITS}
    wanted = [(t, name) for t in traces for name in entries if not (name == CLAIRVOYANT and t == 0)]
    for temperature, name in missing(folder, ("temperature", "rule"), wanted):
        with console.status(f"{name}, {at_temperature(temperature)}"):
            found = measure(traces[temperature], entries[name], costs, config)
        folder.append({"temperature": temperature, "rule": name, **found})
    rows = folder.rows()
    with folder.replacing("policies.png") as path:
        dots_figure(
            points(rows), "speed-up over plain decoding, setting chosen on other prompts", RULE_COLOURS
        ).savefig(path)
    publish(folder, "\n\n".join(report(rows, temperature) for temperature in traces) + "\n", console)


def measure(trace: Trace, entry: Rule | str, costs: CostModel, config: Policies) -> dict[str, Any]:
    """Lists over texts: seconds at the published setting and at the chosen one, and the counts of the latter."""
    longest, settings = config.max_draft_length, [{}] if isinstance(entry, str) else entry.settings()
    if isinstance(entry, Rule):
        found = replay_rule(trace, entry, costs, longest, settings)
    else:
        found = oracle(trace, longest) if entry == ORACLE else oracle_acceptance(trace, costs, longest)
    kept = {key: np.zeros(trace.num_texts) for key in ("seconds", "rounds", "drafted", "accepted", "passes")}
    picked = {}
    for task, texts in texts_by_task(trace).items():
        judged = chosen_on_other_half(of_texts(found, texts), costs, settings, config.seed)
        picked[task] = judged.settings
        for key, values in kept.items():
            values[texts] = getattr(judged, key)
    return {
        "published": np.round(found.seconds(costs)[0], 7).tolist(),
        **{key: np.round(values, 7).tolist() for key, values in kept.items()},
        "settings": picked,
        "plain": (trace.length * costs.plain_pass).round(7).tolist(),
        "emitted": trace.length.tolist(),
        "tasks": trace.about.get("tasks") or ["all"] * trace.num_texts,
        "repeated": np.round(repeated_shares(trace), 4).tolist(),
    }


class Line(NamedTuple):
    """A rule at a temperature, over some texts."""

    rule: str
    published: float  # speed-ups over plain decoding, total over total
    chosen: Any  # Interval
    over_static: Any  # Interval
    headroom: float
    rank: float  # mean over tasks
    rate: float  # acceptance
    tokens: float  # a round
    wasted: float  # share of drafter passes


def lines(rows: Sequence[Mapping[str, Any]], temperature: float, clean: bool = False) -> list[Line]:
    """The rules of one temperature, fastest first, limits last; `clean` leaves out texts that repeat themselves."""
    here = {row["rule"]: row for row in rows if row["temperature"] == temperature}
    first = here[STATIC]
    keep = np.array(first["repeated"]) <= MOST_REPEATED if clean else np.ones(len(first["plain"]), bool)
    if not keep.any():
        return []
    plain = np.array(first["plain"])[keep]
    seconds = {name: np.array(row["seconds"])[keep] for name, row in here.items()}
    ranked = {name: values for name, values in seconds.items() if name not in LIMITS}
    ranks = _ranks(ranked, np.array(first["tasks"])[keep])
    least, most = (plain.sum() / seconds[name].sum() for name in (STATIC, ORACLE))
    found = []
    for name, row in here.items():
        counts = {key: np.array(row[key])[keep].sum() for key in ("rounds", "drafted", "accepted", "passes", "emitted")}
        speed = faster(seconds[name], plain)
        found.append(
            Line(
                name,
                plain.sum() / np.array(row["published"])[keep].sum(),
                speed,
                faster(seconds[name], seconds[STATIC]),
                (speed.estimate - least) / (most - least),
                ranks.get(name, float("nan")),
                counts["accepted"] / max(counts["drafted"], 1),
                counts["emitted"] / counts["rounds"],
                1 - counts["accepted"] / max(counts["passes"], 1),
            )
        )
    return sorted(found, key=lambda line: (line.rule in LIMITS, -line.chosen.estimate))


def _ranks(seconds: Mapping[str, np.ndarray], tasks: np.ndarray) -> dict[str, float]:
    """Mean rank over tasks, 1 the fastest."""
    places: dict[str, list[int]] = {name: [] for name in seconds}
    for task in dict.fromkeys(tasks.tolist()):
        totals = {name: values[tasks == task].sum() for name, values in seconds.items()}
        for place, name in enumerate(sorted(totals, key=totals.__getitem__), start=1):
            places[name].append(place)
    return {name: float(np.mean(found)) for name, found in places.items()}


def report(rows: Sequence[Mapping[str, Any]], temperature: float) -> str:
    """The tables of a temperature: over all texts, and over those that do not repeat themselves."""
    first = next(row for row in rows if row["temperature"] == temperature)
    share = float(np.average(first["repeated"], weights=first["emitted"]))
    parts = []
    for clean in (False, True):
        found = lines(rows, temperature, clean)
        if not found:
            continue
        count = sum(value <= MOST_REPEATED for value in first["repeated"]) if clean else len(first["plain"])
        about = "texts with hardly a repeat" if clean else f"texts, {share:.0%} of their tokens repeat earlier ones"
        parts.append(f"**{at_temperature(temperature)}**, {count} {about}\n\n" + table(HEAD, map(_cells, found)))
    return "\n\n".join(parts)


def _cells(line: Line) -> list[str]:
    return [
        line.rule,
        f"{line.published:.2f}",
        f"{line.chosen.estimate:.3f}",
        "–" if line.rule == STATIC else _interval(line.over_static),
        f"{line.headroom:.0%}",
        "–" if line.rule in LIMITS else f"{line.rank:.1f}",
        f"{line.rate:.2f}",
        f"{line.tokens:.2f}",
        f"{line.wasted:.0%}",
    ]


def _interval(value: Any) -> str:
    return f"{value.estimate:.3f} ({value.low:.3f}–{value.high:.3f})"


def points(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, float, float, float]]]:
    """(rule, estimate, low, high) by temperature, for the picture."""
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    return {at_temperature(t): [(line.rule, *line.chosen) for line in lines(rows, t)] for t in temperatures}


if __name__ == "__main__":
    sys.exit(main())
