"""How much could rules gain on public logs and on our traces?

Question:  Between the best static length and the oracle: how much is there, by data set, drafter and c, and how much of
           it do rules get?
Command:   python -m experiments.policies headroom LOGS TRACES... [--ratios 0.05 0.1 0.2]
           [--slopes 0.02 0.05] [--out FOLDER]
Data:      data/llama3.1-8B of SpecDecode-Bench's simulator
Time:      about four minutes of one core for SpecDecode-Bench and six traces
Expected:  docs/headroom.md has the tables
Output:    runs/headroom-<time>/ with manifest.json, results.jsonl (a line a log, machine, task and rule), table.md and
           headroom.png; a stopped run goes on with the same --out

On a flat machine verification is free in its width, and a drafter step costs c passes; n-gram lookup costs nothing, and
each of its drafts the slope. Settings of rules are chosen on the other half of the texts, by data set. Of logs that
hold accepted lengths alone, rules that read distributions are left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib.cells import at_temperature, markdown
from experiments.lib.commands import command
from experiments.lib.plots import INK, plain_axes
from experiments.lib.rules import STATIC, rule
from experiments.lib.trace_runs import ALL, ORACLE, REFERENCES, Source, TraceFiles, drafter_of, variant
from specdec_jax.contrib.engine_logs import costs_named
from specdec_jax.contrib.engine_logs.readers import DRAFTERS, kind_of, read_exact
from specdec_jax.costs.cost_model import CostModel

LENGTH_RULES = ("hf-heuristic", "accepted-length-ema", "goodput", "bandit")
READING_RULES = ("adaedl-keep", "max-confidence-keep", "survival")
LOOKUP = "n-gram lookup"


@dataclass(frozen=True)
class Headroom(TraceFiles):
    """Head-room by log."""

    ratios: tuple[float, ...] = (0.05, 0.1, 0.2)
    """c of model drafters, on a flat machine."""
    slopes: tuple[float, ...] = (0.02, 0.05)
    """Cost of a verified token in passes, for lookup drafters."""
    max_draft_length: int = 15
    """Longest draft."""


def headroom(options: Headroom, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    sources = sources_of(options)
    run = runs.open_traces("headroom", options, console, sources=sources)
    rows: list[runs.Row] = []
    for lengths_only in (True, False):
        mine = [source for source in sources if source.trace.lengths_only == lengths_only]
        names = (STATIC, *LENGTH_RULES) if lengths_only else (STATIC, *LENGTH_RULES, *READING_RULES)
        variants = {name: variant(rule(name)) for name in names} | {ORACLE: REFERENCES[ORACLE]}
        rows += runs.sweep(run._replace(sources=mine), variants)
    lines = [line for source in sources for line in lines_of(source, rows)]
    runs.write(run, "Head-room", [table(lines)], headroom=picture(lines))


def sources_of(options: Headroom) -> list[Source]:
    """Every log on every machine; SpecDecode-Bench's once per drafter."""
    options.check()
    sources = []
    for path in map(Path, options.traces):
        drafters = list(DRAFTERS) if path.exists() and kind_of(path) == "SpecDecode-Bench" else [None]
        for drafter in drafters:
            trace = read_exact(path, drafter=drafter)
            name, temperature = Path(drafter_of(trace)).name, round(float(trace.temperature.max()), 6)
            words = [f"0,{slope:g}" for slope in options.slopes] if name == LOOKUP else map(str, options.ratios)
            for word in words:
                costs = costs_named(word, longest=options.max_draft_length)
                sources.append(runs.source_of(f"{name}: {word}", temperature, trace, costs))
    return sources


class Line(NamedTuple):
    """A data set with a drafter on a machine."""

    drafter: str
    temperature: float
    task: str
    texts: int
    costs: CostModel
    length: float  # the best static one, over all texts
    speedup: dict[str, runs.Interval]  # by rule, over plain decoding
    over: dict[str, runs.Interval]  # over the best static length, paired
    public: bool  # a log of accepted lengths, not a trace

    @property
    def machine(self) -> str:
        """c, or the slope where drafting is free."""
        if self.costs.ratio:
            return f"c = {self.costs.ratio:g}"
        return f"slope {self.costs.pass_times(1)[1] - 1:.2g}"


def lines_of(source: Source, rows: Sequence[runs.Row]) -> list[Line]:
    """One row per data set of a public log, and one per own trace."""
    lines, several = [], len(source.tasks) > 1 and source.trace.lengths_only
    for task, texts in source.tasks.items():
        if (task == ALL) == several:
            continue
        here = {row["what"]: row for row in runs.by_source(rows, source, task)}
        static = here[STATIC]
        length = rule(STATIC).settings()[int(np.argmax(static["curve"]))]["draft_length"]
        over = {name: runs.gain(row, static) for name, row in here.items() if name != STATIC}
        speedup = {name: runs.speedup(row) for name, row in here.items()}
        name, public = source.group.rpartition(": ")[0], source.trace.lengths_only
        lines.append(Line(name, source.temperature, task, len(texts), source.costs, length, speedup, over, public))
    return lines


def table(lines: Sequence[Line]) -> str:
    """One row per data set and machine: the best rule is the fastest one."""
    cells = []
    for line in lines:
        best = max((name for name in line.over if name != ORACLE), key=lambda name: line.over[name].estimate)
        numbers = [f"{line.speedup[STATIC].estimate:.2f} ({line.length:g})", f"{line.speedup[ORACLE].estimate:.2f}"]
        gains = [f"{i.estimate:.2f} ({i.low:.2f}–{i.high:.2f})" for i in (line.over[ORACLE], line.over[best])]
        where = [line.drafter, at_temperature(line.temperature), line.task, str(line.texts), line.machine]
        cells.append([*where, *numbers, gains[0], f"{best}: {gains[1]}"])
    heads = ["drafter", "decoding", "data set", "texts", "machine", "best static (drafts)", "oracle"]
    return markdown([*heads, "oracle over static", "best rule over static"], cells)


def picture(lines: Sequence[Line]) -> Figure:
    """Oracle (rings) and the best rule (dots) over the best static length: a panel a public drafter, one for traces."""
    panels: dict[str, dict[str, Line]] = defaultdict(dict)
    for line in lines:
        if line.public:
            panels[line.drafter][f"{line.task}, {line.machine}"] = line
        else:
            panels["traces"][f"{line.drafter}, {at_temperature(line.temperature)}, {line.machine}"] = line
    figure = Figure(figsize=(4.6 * len(panels), 1.2 + 0.27 * max(map(len, panels.values()))), dpi=110)
    figure.set_layout_engine("constrained")
    for axes, (title, mine) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharex=True)[0], panels.items(), strict=True
    ):
        for place, line in enumerate(mine.values()):
            ceiling = line.over[ORACLE]
            rules = [interval for name, interval in line.over.items() if name != ORACLE]
            best = max(rules, key=lambda interval: interval.estimate)
            axes.plot([1, ceiling.estimate], [place, place], color="#cccccc", lw=3, zorder=0)
            axes.plot([ceiling.estimate], [place], "o", mfc="white", mec=INK, ms=5)
            axes.plot([best.low, best.high], [place, place], color="#1f77b4", lw=1.4)
            axes.plot([best.estimate], [place], "o", color="#1f77b4", ms=4)
        axes.axvline(1.0, color="#999999", lw=1, ls="--", zorder=0)
        axes.set_yticks(range(len(mine)), list(mine), fontsize=7)
        axes.set_ylim(len(mine) - 0.5, -0.5)
        plain_axes(axes, title)
    figure.supxlabel("over the best static length: oracle (ring), best rule (dot, 95 %)", fontsize=9)
    return figure


main = command(Headroom, headroom, __doc__, "python -m experiments.policies headroom")
