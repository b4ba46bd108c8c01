"""How much could rules gain on public logs and on our traces?

Question:  Between the best static length and the oracle: how much is there, by data set, drafter and c, and how much of
           it do rules get?
Command:   python -m experiments.policies headroom LOGS TRACES... [--ratios 0.05 0.1 0.2]
           [--slopes 0.02 0.05] [--out FOLDER]
Data:      data/llama3.1-8B of SpecDecode-Bench's simulator
Time:      about four minutes of one core for SpecDecode-Bench and six traces
Expected:  docs/headroom.md has the tables
Output:    runs/headroom-<time>/; results.jsonl has a line a log, machine, task and rule

On a flat machine verification is free in its width, and a drafter step costs c passes; n-gram lookup costs nothing, and
each of its drafts the slope. Settings of rules are chosen on the other half of the texts, by data set. Of logs that
hold accepted lengths alone, rules that read distributions are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib.commands import command
from experiments.lib.plots import INK, panels
from experiments.lib.rules import STATIC, rule
from experiments.lib.tables import Row, at_temperature, gain, markdown, speedup
from experiments.lib.trace_runs import ALL, ORACLE, REFERENCES, Source, TraceFiles, drafter_of, variant
from specdec_jax.contrib.engine_logs import costs_named
from specdec_jax.contrib.engine_logs.readers import DRAFTERS, kind_of, read_exact
from specdec_jax.metrics.intervals import Interval

LENGTH_RULES = ("hf-heuristic", "accepted-length-ema", "goodput", "bandit")
READING_RULES = ("adaedl-keep", "max-confidence-keep", "survival")
LOOKUP = "n-gram lookup"
Gains = tuple[Interval, Interval]  # over the best static length, paired: the oracle's and the fastest rule's


@dataclass(frozen=True)
class Headroom(TraceFiles):
    """Head-room by log."""

    ratios: tuple[float, ...] = (0.05, 0.1, 0.2)  # c of model drafters, on a flat machine.
    slopes: tuple[float, ...] = (0.02, 0.05)  # Cost of a verified token in passes, for lookup drafters.
    max_draft_length: int = 15  # Longest draft.


def headroom(options: Headroom, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    options.check()
    sources = []  # every log on every machine; SpecDecode-Bench's once per drafter
    for path in map(Path, options.traces):
        drafters = list(DRAFTERS) if path.exists() and kind_of(path) == "SpecDecode-Bench" else [None]
        for drafter in drafters:
            trace = read_exact(path, drafter=drafter)
            name, temperature = Path(drafter_of(trace)).name, round(float(trace.temperature.max()), 6)
            words = [f"0,{slope:g}" for slope in options.slopes] if name == LOOKUP else map(str, options.ratios)
            for word in words:
                costs = costs_named(word, longest=options.max_draft_length)
                sources.append(runs.source_of(f"{name}: {word}", temperature, trace, costs))
    run = runs.open_traces("headroom", options, console, sources)
    rows: list[Row] = []
    for lengths_only in (True, False):
        mine = [source for source in sources if source.trace.lengths_only == lengths_only]
        names = (STATIC, *LENGTH_RULES) if lengths_only else (STATIC, *LENGTH_RULES, *READING_RULES)
        variants = {name: variant(rule(name)) for name in names} | {ORACLE: REFERENCES[ORACLE]}
        rows += runs.sweep(run._replace(sources=mine), variants)
    lines, gains = report(sources, rows)
    heads = ["drafter", "decoding", "data set", "texts", "machine", "best static (drafts)", "oracle"]
    table = markdown([*heads, "oracle over static", "best rule over static"], lines)
    runs.write(run, "Head-room", [table], headroom=picture(gains))


def report(sources: Sequence[Source], rows: Sequence[Row]) -> tuple[list[list[str]], dict[str, dict[str, Gains]]]:
    """The table's lines, one per machine and trace, or data set of a public log; and their gains, by panel and name."""
    lines: list[list[str]] = []
    gains: dict[str, dict[str, Gains]] = {}
    for source in sources:
        public = source.trace.lengths_only
        several = public and len(source.tasks) > 1
        for task in [task for task in source.tasks if (task != ALL) == several]:
            here = runs.by_name(rows, source, task)
            static, drafter, decoding = (
                here[STATIC],
                source.group.rpartition(": ")[0],
                at_temperature(source.temperature),
            )
            over = {name: gain(row, static) for name, row in here.items() if name != STATIC}
            best = max((name for name in over if name != ORACLE), key=lambda name: over[name].estimate)
            costs = source.costs
            machine = f"c = {costs.ratio:g}" if costs.ratio else f"slope {costs.pass_times(1)[1] - 1:.2g}"
            length = rule(STATIC).settings()[int(np.argmax(static["curve"]))]["draft_length"]  # over all texts
            speeds = [f"{speedup(static).estimate:.2f} ({length:g})", f"{speedup(here[ORACLE]).estimate:.2f}"]
            more = [f"{i.estimate:.2f} ({i.low:.2f}–{i.high:.2f})" for i in (over[ORACLE], over[best])]
            where = [drafter, decoding, task, str(len(static["emitted"])), machine]
            lines.append([*where, *speeds, more[0], f"{best}: {more[1]}"])
            name = f"{task}, {machine}" if public else f"{drafter}, {decoding}, {machine}"
            gains.setdefault(drafter if public else "traces", {})[name] = over[ORACLE], over[best]
    return lines, gains


def picture(gains: Mapping[str, Mapping[str, Gains]]) -> Figure:
    """Oracle (rings) and the best rule (dots) over the best static length: a panel a public drafter, one for traces."""
    figure, grid = panels(list(gains), 1.2 + 0.27 * max(map(len, gains.values())), width=4.6, sharex=True)
    for axes, mine in zip(grid[0], gains.values(), strict=True):
        for place, (ceiling, best) in enumerate(mine.values()):
            axes.plot([1, ceiling.estimate], [place, place], color="#cccccc", lw=3, zorder=0)
            axes.plot([ceiling.estimate], [place], "o", mfc="white", mec=INK, ms=5)
            axes.plot([best.low, best.high], [place, place], color="#1f77b4", lw=1.4)
            axes.plot([best.estimate], [place], "o", color="#1f77b4", ms=4)
        axes.axvline(1.0, color="#999999", lw=1, ls="--", zorder=0)
        axes.set_yticks(range(len(mine)), list(mine), fontsize=7)
        axes.set_ylim(len(mine) - 0.5, -0.5)
    figure.supxlabel("over the best static length: oracle (ring), best rule (dot, 95 %)", fontsize=9)
    return figure


main = command(Headroom, headroom, __doc__, "python -m experiments.policies headroom")
