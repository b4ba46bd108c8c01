"""Does AdaEDL's lambda need to move? A fixed lambda against Algorithm 1, from several starts and updated more rarely.

Question:  What does the dynamic part of AdaEDL bring over the best fixed lambda, and over the same start left alone?
Command:   python -m experiments.lambda_dynamics TRACES... [--keep-checked-token] [--costs cost_model.json]
Time:      a minute for 84 prompts and three temperatures on 2 cores; --smoke needs no trace
Expected:  the built-in pair, answers of 128 tokens: Algorithm 1 within half a percent of the best fixed lambda, for it
           moves lambda by 0.001 a round; updates every 4th or 16th round change nothing that can be seen; ten times the
           step loses 2 to 3 % when sampled, and helps only where the start was a bad one
Output:    runs/lambda_dynamics-<time>/ with manifest.json, results.jsonl (a line a trace, task and variant), table.md
           and lambdas.png; a stopped run goes on where it was with the same --out

Every variant has the lambda (or the start of lambda) that was fastest on the other half of the prompts of the task, so
none is judged on what it was chosen by, and comparisons are paired by prompt. `update_every` (specdec_jax/stopping)
lets every n-th result through. Ten times the step: Algorithm 1 with epsilon 0.1 instead of 0.01.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import interval, markdown
from experiments.lib.commands import command
from experiments.lib.plots import COLOURS
from experiments.lib.rules import THRESHOLDS, Rule, rule
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, Row, Run, Source, TraceOptions, variant
from specdec_jax.stopping.update_every import update_every

LAMBDAS = (0.0, *THRESHOLDS)
STARTS = (0.3, 0.5, 0.6, 0.7, 0.9)  # the paper's
FIXED, DYNAMIC, STEEP = "fixed", "Algorithm 1", "Algorithm 1, ten times the step"
MOVES: dict[str, dict[str, Any]] = {FIXED: {"step": 0.0}, DYNAMIC: {}, STEEP: {"step": 0.1}}
ROUNDS = {"updated every 4th round": {"rounds": 4}, "updated every 16th round": {"rounds": 16}}
TUNED = (FIXED, DYNAMIC, *ROUNDS, STEEP)


@dataclass(frozen=True)
class LambdaDynamics(TraceOptions):
    """Compare fixed and moving lambdas of AdaEDL."""

    keep_checked_token: bool = False
    """AdaEDL whose checked token is kept (ours) instead of the published rule."""


def study(options: LambdaDynamics, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    entry = rule("adaedl-keep" if options.keep_checked_token else "adaedl")
    slow = Rule("update-every", update_every(policy=entry.policy))
    kinds = {name: (entry, fixed) for name, fixed in MOVES.items()} | {n: (slow, fixed) for n, fixed in ROUNDS.items()}
    variants = {
        name: variant(kinds[name][0], [kinds[name][1] | {"threshold": value} for value in LAMBDAS]) for name in TUNED
    }
    variants |= {
        f"{name} from {start:g}": variant(entry, [fixed | {"threshold": start}])
        for start in STARTS
        for name, fixed in MOVES.items()
    }
    run = runs.open_run("lambda_dynamics", options, console)
    rows = runs.compare(run, variants)
    publish(run.folder, report(run, rows), run.console, lambdas=picture(run, rows))


def report(run: Run, rows: Sequence[Row]) -> str:
    """Each temperature's variants against the best fixed lambda, then from given starts, then by task."""
    kept = f"The checked token is {'kept' if run.options.keep_checked_token else 'discarded'}."
    blocks = ["# Static against dynamic lambda", tables.about(run), kept, NOTES]
    for source, title in tables.sections(run):
        here = runs.of_source(rows, source)
        blocks += [f"## {title}", tuned_table(source, here), starts_table(here)]
        if len(source.tasks) > 1:
            blocks.append(tasks_table(source, here))
    return "\n\n".join([*blocks, ""])


NOTES = (
    "Speed-up over plain decoding, total over total, and gains in percent, each with its 95 % bootstrap interval over "
    "prompts, paired; bold: the interval excludes 0. Lambda: chosen on one half / on the other. Each task its own: "
    "lambda chosen within the task, the tasks' times added up."
)


def tuned_table(source: Source, rows: Sequence[Row]) -> str:
    """All variants with lambda chosen on the other half."""
    head = ["lambda", "chosen", "speed-up", "over fixed", "each task its own", "over fixed, each its own"]
    own = {what: runs.each_its_own(source, rows, what) for what in TUNED}
    whole = {what: runs.find(rows, what=what, task=ALL) for what in TUNED}
    lines = []
    for what in TUNED:
        line = [what, tables.setting(whole[what]["settings"], "threshold")]
        for of in (whole, own):
            gain = tables.percent_more(runs.gain(of[what], of[FIXED])) if what != FIXED else ""
            line += [interval(runs.speedup(of[what])), gain]
        lines.append(line)
    return markdown(head, lines)


def starts_table(rows: Sequence[Row]) -> str:
    """From the same start: what moving contributes, whatever start was chosen."""
    head = ["start", "fixed", DYNAMIC, "moving brings", "ten times the step brings", "rounds a text"]
    lines = []
    for start in STARTS:
        still, moving, steep = (runs.find(rows, what=f"{kind} from {start:g}", task=ALL) for kind in MOVES)
        values = [interval(runs.speedup(row)) for row in (still, moving)]
        gains = [tables.percent_more(runs.gain(row, still)) for row in (moving, steep)]
        lines.append([f"{start:g}", *values, *gains, f"{runs.total(moving, 'rounds') / len(moving['rounds']):.0f}"])
    return markdown(head, lines)


def tasks_table(source: Source, rows: Sequence[Row]) -> str:
    """By task: the fixed lambda chosen, and what Algorithm 1 adds to it."""
    head = ["task", "prompts", "fixed lambda", "speed-up", "start", "Algorithm 1 over fixed"]
    lines = []
    for task in source.tasks:
        still, moving = (runs.find(rows, what=what, task=task) for what in (FIXED, DYNAMIC))
        chosen = [tables.setting(row["settings"], "threshold") for row in (still, moving)]
        middle = [str(len(still["emitted"])), chosen[0], interval(runs.speedup(still)), chosen[1]]
        lines.append([task, *middle, tables.percent_more(runs.gain(moving, still))])
    return markdown(head, lines)


def picture(run: Run, rows: Sequence[Row]) -> Figure:
    """Speed-up against lambda, or its start: the lines lie on each other where moving brings nothing."""
    lines = {
        title: {what: (LAMBDAS, runs.find(runs.of_source(rows, source, ALL), what=what)["curve"]) for what in MOVES}
        for source, title in tables.sections(run)
    }
    dashes = zip(MOVES, COLOURS[1:], ("-", "--", ":"), strict=False)
    styles = {what: {"color": colour, "ls": style, "lw": 2} for what, colour, style in dashes}
    return tables.lines_figure(lines, ("lambda, or where it starts", "speed-up over plain decoding"), styles)


main = command(LambdaDynamics, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
