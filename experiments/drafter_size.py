"""A larger drafter is accepted more often and costs more: which size is worth it, and does the rule matter?

Question:  What are a drafter's acceptance and cost, and which drafter does each stopping rule make the most of?
Command:   python -m experiments.drafter_size --groups nano:runs/nano:runs/nano-costs/cost_model.json base:runs/base:0.1
Time:      half a minute a drafter (84 prompts, three temperatures) on 2 cores; seconds with --smoke (made-up traces)
Expected:  the built-in drafter at c = 0.096, greedy: acceptance 0.59, best static length 1.59, survival 1.70; were a
           step to cost 0.03 or 0.25 of a pass, 1.87 and 1.96, or 1.25 and 1.34
Output:    runs/drafter_size-<time>/ with manifest.json, results.jsonl (a line a drafter, temperature and rule),
           table.md and drafters.png; a stopped run goes on where it was with the same --out

A group is NAME:TRACES:COSTS: traces of the target with that drafter (experiments.record, the same prompts for all), and
its costs: the cost_model.json of experiments.step_cost, or a number c, with which the target's passes are those of
--costs. Settings are chosen for each drafter on the other half of the prompts. Acceptance is the mean overlap of the
two distributions along the target's texts; under greedy decoding, how often the drafter names the target's token.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import Console

from experiments.lib import studies
from experiments.lib.rules import rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import made_up_traces
from experiments.lib.studies import as_judged, as_row, cell, chosen_rules, judged
from experiments.lib.traced import costs_or_default, load_traces, replay_rule
from specdec_jax.metrics.acceptance import expected_speedup, expected_tokens
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.cost_model import CostModel, load_cost_model
from specdec_jax.replay.replay import oracle
from specdec_jax.replay.trace import Trace

KEYS = ("drafter", "temperature", "rule")
ORACLE = "oracle"
RULES = tuple(name for name in studies.COMPARED if name not in ("adaedl", "max-confidence-keep"))
LONG = "static-7"  # tokens a pass of one fixed length compare drafters whatever they cost
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class DrafterSize:
    """Compare drafters of one target."""

    groups: tuple[str, ...] = ()
    """NAME:TRACES:COSTS each; COSTS is a cost_model.json or a number c."""
    rules: tuple[str, ...] = RULES
    """Names in experiments/lib/rules.py; the best static length is always among them."""
    costs: str | None = None
    """cost_model.json whose target passes groups with a number c have; none: two x86 cores."""
    max_draft_length: int = 16
    """Most drafts a round."""
    seed: int = 0
    """Of the halves of the prompts and of the intervals."""
    smoke: bool = False
    """Two made-up drafters."""
    out: str | None = None
    """Run folder; none: runs/drafter_size-<time>."""


class Group(NamedTuple):
    name: str
    traces: dict[float, Trace]  # by temperature
    costs: CostModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(DrafterSize, study, __doc__, arguments)


def study(config: DrafterSize, console: Console) -> None:
    """Judges what is missing and writes the run folder."""
    chosen_rules(config.rules)
    shared = costs_or_default(config.costs)
    groups = _made_up(shared) if config.smoke else [_group(text, config, shared) for text in config.groups]
    if not groups or len({group.name for group in groups}) < len(groups):
        raise ValueError(f"name drafters by different names (--groups NAME:TRACES:COSTS ...), got {config.groups}")
    folder = RunFolder.create("drafter_size", config, config.out)
    for group in groups:
        for temperature, trace in group.traces.items():
            with console.status(f"Replaying {group.name}, {studies.at_temperature(temperature)}"):
                _add(config, folder, group, temperature, trace)
    rows = folder.rows()
    with folder.replacing("drafters.png") as path:
        picture(rows).savefig(path)
    studies.publish(folder, report(rows), console)


def _group(text: str, config: DrafterSize, shared: CostModel) -> Group:
    """Reads NAME:TRACES:COSTS."""
    name, _, rest = text.partition(":")
    traces, _, costs = rest.rpartition(":")
    if not (name and traces and costs):
        raise ValueError(f"a group is NAME:TRACES:COSTS, got {text!r}")
    try:
        ratio = float(costs)
    except ValueError:
        model = load_cost_model(costs)
    else:
        if not 0 < ratio < 10:
            raise ValueError(f"c must lie above 0 and below 10, got {costs} in {text!r}")
        model = shared._replace(drafter_step=ratio * shared.plain_pass)
    model.pass_times(config.max_draft_length)
    return Group(name, load_traces([Path(traces)], config.max_draft_length), model)


def _made_up(costs: CostModel) -> list[Group]:
    scaled = [costs._replace(drafter_step=ratio * costs.plain_pass) for ratio in (0.05, 0.2)]
    return [Group("small", made_up_traces(), scaled[0]), Group("large", made_up_traces(boost=0.7), scaled[1])]


def acceptance(trace: Trace) -> Interval:
    """The mean overlap of the distributions over the emitted positions; for greedy texts, of the tokens they name."""
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[:, None]
    greedy = trace.temperature[:, None] <= 0
    values = np.where(greedy, trace.accepted, np.where(within, trace.overlap, 0.0))
    return ratio_of_totals(np.where(within, values, 0.0).sum(axis=1), trace.length)


def _add(config: DrafterSize, folder: RunFolder, group: Group, temperature: float, trace: Trace) -> None:
    """The rows of a drafter and temperature that are not there."""
    rules = {entry.name: entry for entry in chosen_rules(config.rules)}
    wanted = [(group.name, temperature, name) for name in (LONG, *rules, ORACLE)]
    taken = acceptance(trace)
    for key in studies.missing(folder, KEYS, wanted):
        name, longest = key[2], config.max_draft_length
        if name == ORACLE:
            found = as_judged(oracle(trace, longest), group.costs)
        elif name == LONG:
            found = as_judged(replay_rule(trace, rule(LONG), group.costs, longest), group.costs)
        else:
            found = judged(trace, rules[name], group.costs, longest, seed=config.seed)
        drafter = {"ratio": group.costs.ratio, "mean_acceptance": taken.estimate}
        drafter |= {"mean_acceptance_low": taken.low, "mean_acceptance_high": taken.high}
        row = as_row(cell(trace, found, group.costs, seed=config.seed))
        folder.append(dict(zip(KEYS, key, strict=True)) | drafter | row)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table a temperature: drafters down, rules across."""
    parts = [
        "# Drafters",
        "Acceptance a: mean overlap of the distributions (greedy: agreement) along the texts, ± half of the 95 % "
        "interval. Tokens a pass: with 7 drafts a round, in brackets what a would give if positions were independent. "
        "Then the speed-up over plain decoding, in brackets the share of the drafted tokens that were accepted, the "
        "best rule in bold; settings were chosen on the other half of the prompts.",
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        mine = [row for row in rows if row["temperature"] == temperature]
        parts += [f"## {studies.at_temperature(temperature).capitalize()}", _by_drafter(mine)]
    return "\n\n".join(parts) + "\n"


def _by_drafter(rows: Sequence[dict[str, Any]]) -> str:
    names = [name for name in dict.fromkeys(row["rule"] for row in rows) if name not in (LONG, ORACLE)]
    lines = []
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        here = {row["rule"]: row for row in rows if row["drafter"] == drafter}
        long = here[LONG]
        half = (long["mean_acceptance_high"] - long["mean_acceptance_low"]) / 2
        independent = expected_tokens(long["mean_acceptance"], 7)
        texts = [f"{here[name]['speedup']:.2f} ({here[name]['acceptance']:.0%})" for name in names]
        best = studies.emphasised(texts, [here[name]["speedup"] for name in names])
        figures = [f"{long['mean_acceptance']:.3f} ±{half:.3f}", f"{long['tokens_per_pass']:.2f} ({independent:.2f})"]
        lines.append([drafter, f"{long['ratio']:.3f}", *figures, *best, f"{here[ORACLE]['speedup']:.2f}"])
    return studies.table(["drafter", "c", "a", "tokens a pass", *studies.headings([*names, ORACLE])], lines)


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Acceptance against cost, a panel a temperature, over the speed-up that the two predict for the best length."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = Figure(figsize=(max(3.9 * len(temperatures), 5.0), 4.0), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharex=True, sharey=True, squeeze=False)[0]
    ratios = [row["ratio"] for row in rows]
    ends = min(0.02, 0.7 * min(ratios)), max(0.5, 1.4 * max(ratios))
    for axes, temperature in zip(panels, temperatures, strict=True):
        _panel(axes, [row for row in rows if row["temperature"] == temperature], ends)
        axes.set_title(studies.at_temperature(temperature), fontsize=11)
        axes.set_xlabel("c, a drafter step over a target pass")
    panels[0].set_ylabel("mean acceptance")
    figure.suptitle("Points: the best rule's speed-up. Lines: what independent positions would give", fontsize=10)
    return figure


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], ends: tuple[float, float]) -> None:
    ratios, shares = np.geomspace(*ends, 60), np.linspace(0.2, 0.95, 60)
    lengths = np.arange(17)[:, None, None]
    surface = expected_speedup(shares[None, :, None], lengths, ratios[None, None, :]).max(axis=0)
    axes.set_xscale("log")  # before the lines get their labels, or these sit beside their gaps
    levels = [1.01, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0]
    lines = axes.contour(ratios, shares, surface, levels, colors="#bbbbbb", linewidths=0.9)
    axes.clabel(lines, fmt=lambda value: f"{value:.2g}", fontsize=8)
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        here = [row for row in rows if row["drafter"] == drafter and row["rule"] not in (LONG, ORACLE)]
        best = max(here, key=lambda row: row["speedup"])
        x, y = best["ratio"], best["mean_acceptance"]
        spread = [[y - best["mean_acceptance_low"]], [best["mean_acceptance_high"] - y]]
        axes.errorbar(x, y, spread, fmt="o", ms=6, lw=1.2, color="#0072B2")
        box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 1.0}
        style: dict[str, Any] = {"fontsize": 8.5, "ha": "center", "va": "bottom", "bbox": box, "zorder": 6}
        axes.annotate(f"{drafter}\n{best['speedup']:.2f}", (x, y), (0, 14), textcoords="offset points", **style)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
