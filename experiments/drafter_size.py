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

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import at_temperature, emphasised, markdown
from experiments.lib.commands import command
from experiments.lib.plots import panels
from experiments.lib.rules import COMPARED, STATIC, headings, rule
from experiments.lib.smoke import made_up_traces
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, ORACLE, REFERENCES, Row, Run, Source, TraceOptions, source_of, variant
from experiments.lib.traced import load_traces
from specdec_jax.costs.cost_model import CostModel, load_cost_model
from specdec_jax.metrics.acceptance import expected_speedup, expected_tokens
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.trace import Trace

RULES = tuple(name for name in COMPARED if name not in ("adaedl", "max-confidence-keep"))
LONG = "static-7"  # tokens a pass of one fixed length compare drafters whatever they cost
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class DrafterSize(TraceOptions):
    """Compare drafters of one target."""

    groups: tuple[str, ...] = ()
    """NAME:TRACES:COSTS each, instead of traces; COSTS is a cost_model.json or a number c."""
    rules: tuple[str, ...] = RULES
    """Names in experiments/lib/rules.py; the best static length is always among them."""

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        self.check_numbers()
        if not self.groups and not self.smoke or self.traces:
            raise ValueError(f"name drafters (--groups NAME:TRACES:COSTS ...), got {self.groups or self.traces}")


def study(options: DrafterSize, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    options.check()
    sources = _made_up(options.machine()) if options.smoke else _read(options)
    run = runs.open_run("drafter_size", options, console, sources=sources)
    names = list(dict.fromkeys((STATIC, *options.rules)))
    variants = {name: variant(rule(name)) for name in (LONG, *names)}
    rows = runs.compare(run, variants | {ORACLE: REFERENCES[ORACLE]})
    publish(run.folder, report(run, rows, names), run.console, drafters=picture(run, rows))


def _read(options: DrafterSize) -> list[Source]:
    """The traces of every NAME:TRACES:COSTS."""
    found: dict[str, list[Source]] = {}
    for text in options.groups:
        name, _, rest = text.partition(":")
        traces, _, costs = rest.rpartition(":")
        if not (name and traces and costs):
            raise ValueError(f"a group is NAME:TRACES:COSTS, got {text!r}")
        if name in found:
            raise ValueError(f"name drafters by different names, got {name!r} twice")
        model = _costs(costs, text, options.machine())
        model.pass_times(options.longest)
        found[name] = [source_of(name, t, trace, model) for t, trace in load_traces([traces], options.longest).items()]
    return [source for sources in found.values() for source in sources]


def _costs(told: str, text: str, shared: CostModel) -> CostModel:
    """A cost model's, or those of the machine with that c."""
    try:
        ratio = float(told)
    except ValueError:
        return load_cost_model(told)
    if not 0 < ratio < 10:
        raise ValueError(f"c must lie above 0 and below 10, got {told} in {text!r}")
    return shared._replace(drafter_step=ratio * shared.plain_pass)


def _made_up(costs: CostModel) -> list[Source]:
    made_up = (("small", 0.05, 0.0), ("large", 0.2, 0.7))
    return [
        source_of(name, temperature, trace, costs._replace(drafter_step=ratio * costs.plain_pass))
        for name, ratio, boost in made_up
        for temperature, trace in made_up_traces(boost=boost).items()
    ]


def acceptance(trace: Trace) -> Interval:
    """The mean overlap of the distributions over the emitted positions; for greedy texts, of the tokens they name."""
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[:, None]
    greedy = trace.temperature[:, None] <= 0
    values = np.where(greedy, trace.accepted, np.where(within, trace.overlap, 0.0))
    return ratio_of_totals(np.where(within, values, 0.0).sum(axis=1), trace.length)


def report(run: Run, rows: Sequence[Row], names: Sequence[str]) -> str:
    """A table a temperature: drafters down, rules across."""
    blocks = ["# Drafters", tables.about(run), NOTES]
    for temperature in sorted({source.temperature for source in run.sources}):
        mine = [source for source in run.sources if source.temperature == temperature]
        blocks += [f"## {at_temperature(temperature).capitalize()}", _by_drafter(mine, rows, names)]
    return "\n\n".join([*blocks, ""])


NOTES = (
    "Acceptance a: mean overlap of the distributions (greedy: agreement) along the texts, ± half of the 95 % interval. "
    "Tokens a pass: with 7 drafts a round, in brackets what a would give if positions were independent. Then the "
    "speed-up over plain decoding, in brackets the share of the drafted tokens that were accepted, the best rule in "
    "bold; settings were chosen on the other half of the prompts."
)


def _by_drafter(sources: Sequence[Source], rows: Sequence[Row], names: Sequence[str]) -> str:
    lines = []
    for source in sources:
        here = {row["what"]: row for row in runs.of_source(rows, source, ALL)}
        taken, fast = acceptance(source.trace), {what: runs.speedup(row).estimate for what, row in here.items()}
        texts = [f"{fast[name]:.2f} ({runs.acceptance(here[name]):.0%})" for name in names]
        figures = [
            f"{source.costs.ratio:.3f}",
            tables.plus_minus(taken, 3),
            f"{runs.per_round(here[LONG], 'emitted'):.2f} ({expected_tokens(taken.estimate, 7):.2f})",
        ]
        best = emphasised(texts, [fast[name] for name in names])
        lines.append([source.group, *figures, *best, f"{fast[ORACLE]:.2f}"])
    return markdown(["drafter", "c", "a", "tokens a pass", *headings([*names, ORACLE])], lines)


def picture(run: Run, rows: Sequence[Row]) -> Figure:
    """Acceptance against cost, a panel a temperature, over the speed-up that the two predict for the best length."""
    temperatures = sorted({source.temperature for source in run.sources})
    titles = [at_temperature(temperature) for temperature in temperatures]
    figure, grid = panels(titles, 4.0, sharex=True, sharey=True)
    ratios = [source.costs.ratio for source in run.sources]
    ends = min(0.02, 0.7 * min(ratios)), max(0.5, 1.4 * max(ratios))
    for axes, temperature in zip(grid[0], temperatures, strict=True):
        _panel(axes, [source for source in run.sources if source.temperature == temperature], rows, ends)
        axes.set_xlabel("c, a drafter step over a target pass")
    grid[0][0].set_ylabel("mean acceptance")
    figure.suptitle("Points: the best rule's speed-up. Lines: what independent positions would give", fontsize=10)
    return figure


def _panel(axes: Axes, sources: Sequence[Source], rows: Sequence[Row], ends: tuple[float, float]) -> None:
    ratios, shares = np.geomspace(*ends, 60), np.linspace(0.2, 0.95, 60)
    lengths = np.arange(17)[:, None, None]
    surface = expected_speedup(shares[None, :, None], lengths, ratios[None, None, :]).max(axis=0)
    axes.set_xscale("log")  # before the lines get their labels, or these sit beside their gaps
    levels = [1.01, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0]
    lines = axes.contour(ratios, shares, surface, levels, colors="#bbbbbb", linewidths=0.9)
    axes.clabel(lines, fmt=lambda value: f"{value:.2g}", fontsize=8)
    box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 1.0}
    for source in sources:
        here = [row for row in runs.of_source(rows, source, ALL) if row["what"] not in (LONG, ORACLE)]
        best, taken = max(runs.speedup(row).estimate for row in here), acceptance(source.trace)
        x, y = source.costs.ratio, taken.estimate
        axes.errorbar(x, y, [[y - taken.low], [taken.high - y]], fmt="o", ms=6, lw=1.2, color="#0072B2")
        style = {"fontsize": 8.5, "ha": "center", "va": "bottom", "bbox": box, "zorder": 6}
        axes.annotate(f"{source.group}\n{best:.2f}", (x, y), (0, 14), textcoords="offset points", **style)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


main = command(DrafterSize, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
