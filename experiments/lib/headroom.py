"""How much could rules gain on public logs and on our traces?

Question:  Between the best static length and the oracle: how much is there, by data set, drafter and c, and how much of
           it do rules get?
Command:   python -m experiments.policies headroom LOGS TRACES... [--ratios 0.05 0.1 0.2] [--slopes 0.02 0.05]
Data:      data/llama3.1-8B of SpecDecode-Bench's simulator; reports of DFlash (tpu-spec-decode, legacy/results/v5p)
Time:      about four minutes of one core for SpecDecode-Bench and six traces
Expected:  docs/advice.md has the table of public logs
Output:    runs/headroom-<time>/; results.jsonl has a line a log, machine, task and rule

On a flat machine verification is free in its width, and a drafter step costs c passes; n-gram lookup costs nothing, and
each of its drafts the slope; so with a block drafter, whose pass is the same at any length. Settings of rules are
chosen on the other half of the texts, by data set; those of `goodput, default` are not chosen. Of logs that hold
accepted lengths alone, rules that read distributions are left out; positions that a log leaves open are drawn.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib.commands import command
from experiments.lib.plots import Point, dots_figure
from experiments.lib.rules import COMPARED, STATIC, Rule, rule
from experiments.lib.tables import Row, at_temperature, gain, markdown, speedup
from experiments.lib.trace_runs import ALL, ORACLE, REFERENCES, TraceFiles, drafter_of, variant
from specdec_jax.contrib.engine_logs import costs_named
from specdec_jax.contrib.engine_logs.readers import DRAFTERS, kind_of, read_log
from specdec_jax.stopping import goodput

LENGTH_RULES = ("hf-heuristic", "accepted-length-ema", "goodput", "bandit")
LOOKUP, BLOCK = BY_WIDTH = ("n-gram lookup", "block")  # drafters whose cost is that of verification
UNTUNED = "goodput, default"


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
            trace = read_log(path, drafter=drafter).likely
            name, temperature = Path(drafter_of(trace)).name, round(float(trace.temperature.max()), 6)
            free = "0" if name == LOOKUP else "1e-9"  # of a block: not 0, for which a rule keeps its default of c
            words = [f"{free},{slope:g}" for slope in options.slopes] if name in BY_WIDTH else map(str, options.ratios)
            for word in words:
                costs = costs_named(word, longest=options.max_draft_length)
                source = path.stem if name == BLOCK else name
                sources.append(runs.source_of(f"{source}: {word}", temperature, trace, costs))
    run = runs.open_traces("headroom", options, console, sources)
    rows: list[Row] = []
    for lengths_only in (True, False):
        mine = [source for source in sources if source.trace.lengths_only == lengths_only]
        names = (STATIC, *LENGTH_RULES) if lengths_only else (*COMPARED, *LENGTH_RULES)
        variants = {name: variant(rule(name)) for name in names} | {ORACLE: REFERENCES[ORACLE]}
        variants |= {UNTUNED: variant(Rule(UNTUNED, goodput()))}
        rows += runs.sweep(run._replace(sources=mine), variants)
    lines: list[list[str]] = []  # one per machine and trace, or data set of a public log
    points: dict[str, list[Point]] = {}  # the best rule's, a panel a public drafter and one for traces
    rings: dict[str, list[float]] = {}  # the oracle's
    for source in sources:
        public, costs, decoding = source.trace.lengths_only, source.costs, at_temperature(source.temperature)
        several, drafter = public and len(source.tasks) > 1, source.group.rpartition(": ")[0]
        machine = f"c = {costs.ratio:g}" if costs.ratio > 1e-6 else f"slope {costs.pass_times(1)[1] - 1:.2g}"
        for task in [task for task in source.tasks if (task != ALL) == several]:
            here = runs.by_name(rows, source, task)
            static = here[STATIC]
            over = {name: gain(row, static) for name, row in here.items() if name != STATIC}
            best = max((name for name in over if name != ORACLE), key=lambda name: over[name].estimate)
            length = rule(STATIC).settings()[int(np.argmax(static["curve"]))]["draft_length"]  # over all texts
            speeds = [f"{speedup(static).estimate:.2f} ({length:g})", f"{speedup(here[ORACLE]).estimate:.2f}"]
            more = [f"{i.estimate:.2f} ({i.low:.2f}–{i.high:.2f})" for i in (over[ORACLE], over[best], over[UNTUNED])]
            where = [drafter, decoding, task, str(len(static["emitted"])), machine]
            lines.append([*where, *speeds, more[0], f"{best}: {more[1]}", more[2]])
            name = f"{task}, {machine}" if public else f"{drafter}, {decoding}, {machine}"
            points.setdefault(drafter if public else "traces", []).append((name, *over[best]))
            rings.setdefault(drafter if public else "traces", []).append(over[ORACLE].estimate)
    heads = ["drafter", "decoding", "data set", "texts", "machine", "best static (drafts)", "oracle"]
    table = markdown([*heads, "oracle over static", "best rule over static", UNTUNED], lines)
    label = "over the best static length: oracle (ring), best rule (dot, 95 %)"
    runs.write(run, "Head-room", [table], headroom=dots_figure(points, label, rings))


main = command(Headroom, headroom, __doc__, "python -m experiments.policies headroom")
