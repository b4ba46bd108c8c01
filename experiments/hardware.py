"""What would each rule bring on another machine? Speed-ups predicted from a trace for every cost ratio c.

Question:  How does the speed-up over plain decoding depend on c (a drafter step over a target pass), rule by rule, and
           does the prediction agree with what was measured here?
Command:   python -m experiments.hardware TRACES... [--ratios 0.05 0.1] [--measured RUN_FOLDER]
Time:      under a minute for 84 prompts and three temperatures on 2 cores; seconds with --smoke (made-up traces)
Expected:  the built-in pair, greedy, at c = 0.1 with measured widths: adaedl 1.38, the best static length 1.57,
           adaedl-keep 1.60, survival 1.68, oracle 2.05; from c = 0.5 on nothing that drafts is worth it when sampled
Output:    runs/hardware-<time>/ with manifest.json, results.jsonl (a line a machine, temperature and rule), table.md
           and speedups.png, with --measured also measured.png; a stopped run goes on where it was with the same --out

Look your machine up by its c, which `python -m experiments.step_cost` measures. Two kinds of machine: `flat` verifies
16 drafts in the time of none, as accelerators nearly do for one text; `measured` needs the target's time by width of
--costs, and only the drafter's step is scaled. Every rule has the setting that was fastest at that c on the other half
of the prompts, rules that weigh time are told c, and the oracle drafts only what will be accepted. --measured takes run
folders of experiments.compare and sets their speed-ups beside what a replay of the same rules, calibrated as they were,
with the costs of --costs predicts for the texts of the traces: the same prompts if the traces have them all.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import at_temperature, emphasised, markdown
from experiments.lib.commands import command
from experiments.lib.measured import Point, measured_points, points_picture, points_table
from experiments.lib.plots import INK, rule_colours
from experiments.lib.rules import COMPARED, STATIC, headings, rule
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, ORACLE, REFERENCES, Row, Run, Source, TraceOptions, variant
from specdec_jax.costs.cost_model import CostModel, flat

KINDS = {"flat": "verification free in its width", "measured": "widths as measured"}
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Hardware(TraceOptions):
    """Predict speed-ups for machines of every c."""

    ratios: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
    """c, a drafter step over a pass of plain decoding."""
    rules: tuple[str, ...] = COMPARED
    """Names in experiments/lib/rules.py; the best static length is always among them."""
    measured: tuple[str, ...] = ()
    """Run folders of experiments.compare to check the prediction against."""

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        super().check()
        if self.ratio is not None:
            raise ValueError(f"--ratios says c, and --costs how long wider passes take: leave out --ratio {self.ratio}")
        if not self.ratios or not all(0 < ratio < 10 for ratio in self.ratios):
            raise ValueError(f"ratios must be one or more numbers above 0 and below 10, got {self.ratios}")


class Machine(NamedTuple):
    """What kind of machine, and its c."""

    kind: str
    ratio: float

    @property
    def name(self) -> str:
        """The group of its rows."""
        return f"{self.kind}, c = {self.ratio:g}"

    def costs(self, known: CostModel, longest: int) -> CostModel:
        """Its costs, the target's by width those of `known` unless they are flat."""
        if self.kind == "flat":
            return flat(self.ratio, longest)
        return known._replace(drafter_step=self.ratio * known.plain_pass)


def study(options: Hardware, console: Console) -> None:
    """Predicts what is missing and writes the run folder."""
    traces, costs = runs.read_sources(options), options.machine()
    drafters = dict.fromkeys(source.group for source in traces)
    if len(drafters) > 1:
        raise ValueError(f"this takes traces of one drafter, got those of {', '.join(drafters)}")
    machines = [Machine(kind, ratio) for kind in KINDS for ratio in options.ratios[:: 5 if options.smoke else 1]]
    points = [
        point
        for path in options.measured
        for point in measured_points(path, {source.temperature: source.trace for source in traces}, costs)
    ]
    sources = [
        source._replace(group=machine.name, costs=machine.costs(costs, options.longest), tasks={ALL: source.tasks[ALL]})
        for source in traces
        for machine in machines
    ]
    run = runs.open_run("hardware", options, console, sources=sources)
    variants = {name: variant(rule(name)) for name in dict.fromkeys((STATIC, *options.rules))}
    variants[ORACLE] = REFERENCES[ORACLE]

    def measure(source: Source, what: str) -> Mapping[str, Row]:
        row = runs.rows_of(run, source, variants[what])[ALL]
        figures = {"speedup": list(runs.speedup(row)), "acceptance": runs.acceptance(row)}
        return {ALL: figures | {"ratio": source.costs.ratio, "settings": row["settings"]}}

    rows = runs.fill(run, tuple(variants), measure)
    figures = {"speedups": picture(run, rows, machines)}
    if points:
        figures["measured"] = points_picture(points)
    publish(run.folder, report(run, rows, machines, points, costs), run.console, **figures)


def report(
    run: Run, rows: Sequence[Row], machines: Sequence[Machine], points: Sequence[Point], costs: CostModel
) -> str:
    """A table a kind of machine and temperature, and the comparison with what was measured."""
    blocks = [
        "# Speed-up over plain decoding by c",
        f"{tables.about_traces(run)} Predicted; in brackets the share of the drafted tokens that were accepted; the "
        "best rule in bold. Settings were chosen at each c on the other half of the prompts; intervals and settings "
        f"are in results.jsonl. Measured widths: {costs.device}.",
    ]
    for kind, about in KINDS.items():
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            here = [row for row in rows if row["temperature"] == temperature]
            title = f"## {at_temperature(temperature).capitalize()}, {about}"
            blocks += [title, _lookup(here, [machine for machine in machines if machine.kind == kind])]
    if points:
        blocks += ["## Measured and predicted", points_table(points, costs)]
    return "\n\n".join([*blocks, ""])


def _lookup(rows: Sequence[Row], machines: Sequence[Machine]) -> str:
    """Ratios down, rules across; the oracle takes no part in the contest."""
    names = [name for name in dict.fromkeys(row["what"] for row in rows) if name != ORACLE]
    lines = []
    for machine in machines:
        here = {row["what"]: row for row in rows if row["group"] == machine.name}
        values = [here[name]["speedup"][0] for name in names]
        texts = [f"{value:.2f} ({here[name]['acceptance']:.0%})" for name, value in zip(names, values, strict=True)]
        lines.append([f"{machine.ratio:g}", *emphasised(texts, values), f"{here[ORACLE]['speedup'][0]:.2f}"])
    return markdown(["c", *headings(names), ORACLE], lines)


def picture(run: Run, rows: Sequence[Row], machines: Sequence[Machine]) -> Figure:
    """Speed-up against c: a column a temperature, a row a kind of machine."""
    names = list(dict.fromkeys(row["what"] for row in rows))
    temperatures = list(dict.fromkeys(source.temperature for source in run.sources))
    colours = rule_colours([name for name in names if name != ORACLE]) | {ORACLE: INK}
    styles = {name: {"color": colours[name], "ls": "--" if name == ORACLE else "-"} for name in names}
    lines = {}
    for kind, about in KINDS.items():
        mine = [machine for machine in machines if machine.kind == kind]
        for temperature in temperatures:
            here = {(row["group"], row["what"]): row["speedup"] for row in rows if row["temperature"] == temperature}
            lines[f"{at_temperature(temperature)}, {about}"] = {
                name: ([m.ratio for m in mine], [here[m.name, name][0] for m in mine]) for name in names
            }
    labels = "c, a drafter step over a target pass", "speed-up over plain decoding"
    return tables.lines_figure(lines, labels, styles, columns=len(temperatures), ticks=TICKS, log=True)


main = command(Hardware, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
