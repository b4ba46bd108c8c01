"""What would each rule bring on another machine? Speed-ups predicted from a trace for every cost ratio c.

Question:  How does the speed-up over plain decoding depend on c (a drafter step over a target pass), rule by rule, and
           does the prediction agree with what was measured here?
Command:   python -m experiments.hardware TRACES... [--ratios 0.05 0.1] [--measured RUN_FOLDER]
Time:      under a minute for 84 prompts and three temperatures on 2 cores; seconds with --smoke (made-up traces)
Expected:  the built-in pair, greedy, at c = 0.1 with measured widths: adaedl 1.38, the best static length 1.57,
           adaedl-keep 1.60, survival 1.68, oracle 2.05; from c = 0.5 on nothing that drafts is worth it when sampled
Output:    runs/hardware-<time>/ with manifest.json, results.jsonl (a line a machine, temperature, c and rule), table.md
           and speedups.png, with --measured also measured.png; a stopped run goes on where it was with the same --out

Look your machine up by its c, which `python -m experiments.step_cost` measures. Two kinds of machine: `flat` verifies
16 drafts in the time of none, as accelerators nearly do for one text; `measured` needs the target's time by width of
--costs, and only the drafter's step is scaled. Every rule has the setting that was fastest at that c on the other half
of the prompts, rules that weigh time are told c, and the oracle drafts only what will be accepted. --measured takes run
folders of experiments.compare and sets their speed-ups beside what a replay of the same rules, calibrated as they were,
with the costs of --costs predicts for the texts of the traces: the same prompts if the traces have them all.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import Console
from tyro.conf import Positional

from experiments.lib import studies
from experiments.lib.measured import Point, measured_points, points_picture, points_table
from experiments.lib.rules import Rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.studies import COMPARED, as_judged, as_row, cell, chosen_rules, judged, missing
from experiments.lib.traced import costs_or_default
from specdec_jax.replay.cost_model import CostModel, flat
from specdec_jax.replay.replay import Replay, oracle
from specdec_jax.replay.trace import Trace

KINDS = ("flat", "measured")
ORACLE = "oracle"
KEYS = ("machine", "temperature", "ratio", "rule")
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Hardware:
    """Predict speed-ups for machines of every c."""

    traces: Positional[tuple[str, ...]] = ()
    """Traces, or folders of them, that experiments.record wrote."""
    ratios: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
    """c, a drafter step over a pass of plain decoding."""
    rules: tuple[str, ...] = COMPARED
    """Names in experiments/lib/rules.py; the best static length is always among them."""
    costs: str | None = None
    """cost_model.json of the machine whose widths count; none: two x86 cores."""
    measured: tuple[str, ...] = ()
    """Run folders of experiments.compare to check the prediction against."""
    max_draft_length: int = 16
    """Most drafts a round."""
    seed: int = 0
    """Of the halves of the prompts and of the intervals."""
    smoke: bool = False
    """Made-up traces and three ratios."""
    out: str | None = None
    """Run folder; none: runs/hardware-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(Hardware, study, __doc__, arguments)


def study(config: Hardware, console: Console) -> None:
    """Predicts what is missing and writes the run folder."""
    ratios = config.ratios[::5] if config.smoke else config.ratios
    if not ratios or not all(0 < ratio < 10 for ratio in ratios):
        raise ValueError(f"ratios must be one or more numbers above 0 and below 10, got {config.ratios}")
    rules, costs = chosen_rules(config.rules), costs_or_default(config.costs)
    costs.pass_times(config.max_draft_length)
    traces = studies.traces_of(config.traces, config.smoke, config.max_draft_length)
    points = [point for path in config.measured for point in measured_points(path, traces, costs)]
    folder = RunFolder.create("hardware", config, config.out)
    for temperature, trace in traces.items():
        with console.status(f"Replaying, {studies.at_temperature(temperature)}"):
            _predict(config, folder, costs, rules, temperature, trace, ratios)
    rows = folder.rows()
    with folder.replacing("speedups.png") as path:
        picture(rows).savefig(path)
    if points:
        with folder.replacing("measured.png") as path:
            points_picture(points).savefig(path)
    studies.publish(folder, report(rows, points, costs), console)


def machine(kind: str, ratio: float, costs: CostModel, longest: int) -> CostModel:
    """The costs of a machine of that kind and c."""
    return flat(ratio, longest) if kind == "flat" else costs._replace(drafter_step=ratio * costs.plain_pass)


def _predict(
    config: Hardware,
    folder: RunFolder,
    costs: CostModel,
    rules: Sequence[Rule],
    temperature: float,
    trace: Trace,
    ratios: Sequence[float],
) -> None:
    """Adds the rows of one temperature that are not there yet."""
    longest, known = config.max_draft_length, {}
    names = {entry.name: entry for entry in rules}
    wanted = [(kind, temperature, ratio, name) for kind in KINDS for ratio in ratios for name in (*names, ORACLE)]
    limit: Replay | None = None
    for key in missing(folder, KEYS, wanted):
        kind, _, ratio, name = key
        here = machine(kind, ratio, costs, longest)
        if name == ORACLE:
            limit = limit or oracle(trace, longest)
            found = as_judged(limit, here)
        else:
            found = judged(trace, names[name], here, longest, known, config.seed)
        folder.append(dict(zip(KEYS, key, strict=True)) | as_row(cell(trace, found, here, seed=config.seed)))


def report(rows: Sequence[dict[str, Any]], points: Sequence[Point], costs: CostModel) -> str:
    """A table a machine and temperature, and the comparison with what was measured."""
    parts = [
        "# Speed-up over plain decoding by c",
        "Predicted; in brackets the share of the drafted tokens that were accepted; the best rule in bold. Settings "
        "were chosen at each c on the other half of the prompts. Intervals and settings are in results.jsonl.",
    ]
    for kind in dict.fromkeys(row["machine"] for row in rows):
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            chosen = [row for row in rows if row["machine"] == kind and row["temperature"] == temperature]
            what = "verification free in its width" if kind == "flat" else f"widths as on {costs.device}"
            parts += [f"## {studies.at_temperature(temperature).capitalize()}, {what}", _lookup(chosen)]
    if points:
        parts += ["## Measured and predicted", points_table(points, costs)]
    return "\n\n".join(parts) + "\n"


def _lookup(rows: Sequence[dict[str, Any]]) -> str:
    """Ratios down, rules across; the oracle takes no part in the contest."""
    names = [name for name in dict.fromkeys(row["rule"] for row in rows) if name != ORACLE]
    lines = []
    for ratio in sorted({row["ratio"] for row in rows}):
        here = {row["rule"]: row for row in rows if row["ratio"] == ratio}
        texts = [f"{here[name]['speedup']:.2f} ({here[name]['acceptance']:.0%})" for name in names]
        best = studies.emphasised(texts, [here[name]["speedup"] for name in names])
        lines.append([f"{ratio:g}", *best, f"{here[ORACLE]['speedup']:.2f}"])
    return studies.table(["c", *studies.headings(names), ORACLE], lines)


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Speed-up against c: a column a temperature, a row a kind of machine."""
    kinds = list(dict.fromkeys(row["machine"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = Figure(
        figsize=(max(3.7 * len(temperatures), 5.0) + 0.6, 3.1 * len(kinds) + 0.9), dpi=150, layout="constrained"
    )
    panels = figure.subplots(len(kinds), len(temperatures), sharex=True, sharey="col", squeeze=False)
    for line, kind in zip(panels, kinds, strict=True):
        for axes, temperature in zip(line, temperatures, strict=True):
            chosen = [row for row in rows if row["machine"] == kind and row["temperature"] == temperature]
            _panel(axes, chosen)
            width = "flat verification" if kind == "flat" else "measured widths"
            studies.plain_axes(axes, f"{studies.at_temperature(temperature)}, {width}")
            if axes in panels[-1]:
                axes.set_xlabel("c, a drafter step over a target pass")
            if axes in panels[:, 0]:
                axes.set_ylabel("speed-up over plain decoding")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _panel(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["rule"] for row in rows))
    colours = studies.colours(names)
    for name in names:
        mine = sorted((row["ratio"], row["speedup"]) for row in rows if row["rule"] == name)
        style = {"color": "#222222", "ls": "--", "lw": 1.2} if name == ORACLE else {"color": colours[name], "lw": 1.8}
        axes.plot(*zip(*mine, strict=True), label=name, **style)
    axes.axhline(1.0, color="#222222", lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


if __name__ == "__main__":
    sys.exit(main())
