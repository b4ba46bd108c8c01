"""Does AdaEDL's lambda need to move? A fixed lambda against Algorithm 1, from several starts and updated more rarely.

Question:  What does the dynamic part of AdaEDL bring over the best fixed lambda, and over the same start left alone?
Command:   python -m experiments.lambda_dynamics TRACES... [--keep-checked-token] [--costs cost_model.json]
Time:      a minute for 84 prompts and three temperatures on 2 cores; --smoke needs no trace
Expected:  the built-in pair, answers of 128 tokens: Algorithm 1 within half a percent of the best fixed lambda, for it
           moves lambda by 0.001 a round; updates every 4th or 16th round change nothing that can be seen; ten times the
           step loses 2 to 3 % when sampled, and helps only where the start was a bad one
Output:    runs/lambda_dynamics-<time>/ with manifest.json, results.jsonl (a line a trace, task and variant), table.md
           and lambda.png; a stopped run goes on where it was with the same --out

Every variant has the lambda (or the start of lambda) that was fastest on the other half of the prompts of the task, so
none is judged on what it was chosen by, and comparisons are paired by prompt. `update_every` (specdec_jax/stopping)
lets every n-th result through. Ten times the step: Algorithm 1 with epsilon 0.1 instead of 0.01.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import studies
from experiments.lib.plots import COLOURS
from experiments.lib.rules import THRESHOLDS, Rule, rule
from experiments.lib.trace_runs import (
    ALL,
    Row,
    Run,
    Source,
    TraceOptions,
    chosen,
    fill,
    find,
    finish,
    fixed,
    gain,
    of_texts,
    open_run,
    pooled,
    replayed,
    speedup,
    total,
)
from experiments.lib.trace_tables import about, legend_below, panels, percent_more, sections, setting, times
from specdec_jax.stopping.update_every import update_every

LAMBDAS = (0.0, *THRESHOLDS)
STARTS = (0.3, 0.5, 0.6, 0.7, 0.9)  # the paper's
FIXED, DYNAMIC, STEEP = "fixed", "Algorithm 1", "Algorithm 1, ten times the step"
ROUNDS = {"updated every 4th round": 4, "updated every 16th round": 16}
TUNED: dict[str, dict[str, Any]] = {
    FIXED: {"step": 0.0},
    DYNAMIC: {},
    **{name: {"rounds": rounds} for name, rounds in ROUNDS.items()},
    STEEP: {"step": 0.1},
}
FROM = {f"{kind} from {start:g}": (kind, start) for start in STARTS for kind in (FIXED, DYNAMIC, STEEP)}


@dataclass(frozen=True)
class LambdaDynamics(TraceOptions):
    """Compare fixed and moving lambdas of AdaEDL."""

    keep_checked_token: bool = False
    """AdaEDL whose checked token is kept (ours) instead of the published rule."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(LambdaDynamics, study, __doc__, arguments)


def study(options: LambdaDynamics, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    run = open_run("lambda_dynamics", options, console)
    entry = rule("adaedl-keep" if options.keep_checked_token else "adaedl")
    slow = Rule("update-every", update_every(policy=entry.policy))

    def measure(source: Source, what: str) -> Mapping[str, Row]:
        kind, start = FROM.get(what, (what, None))
        values = LAMBDAS if start is None else (start,)
        settings = [TUNED[kind] | {"threshold": value} for value in values]
        found = replayed(run, source, slow if kind in ROUNDS else entry, settings)
        if start is not None:
            return fixed(run, source, found, settings=settings)
        rows = chosen(run, source, found, settings)
        for task, texts in source.tasks.items():
            rows[task]["curve"] = of_texts(found, texts).total_speedup(run.costs).tolist()
        return rows

    rows = fill(run, (*TUNED, *FROM), measure)
    finish(run, report(run, rows), {"lambda.png": picture(run, rows)})


def report(run: Run, rows: Sequence[Row]) -> str:
    """Each temperature's variants against the best fixed lambda, then from given starts, then by task."""
    kept = getattr(run.options, "keep_checked_token", False)
    blocks = ["# Static against dynamic lambda", about(run), f"The checked token is {'kept' if kept else 'discarded'}."]
    for source, title in sections(run):
        here = [row for row in rows if (row["drafter"], row["temperature"]) == source[:2]]
        blocks += [f"## {title}", tuned_table(source, here), starts_table(here)]
        if len(source.tasks) > 1:
            blocks.append(tasks_table(source, here))
    return "\n\n".join([*blocks, NOTES, ""])


NOTES = (
    "Speed-up over plain decoding, total over total, and gains in percent, each with its 95 % bootstrap interval over "
    "prompts, paired; bold: the interval leaves 0 out. Lambda: chosen on one half / on the other. Each task its own: "
    "lambda chosen within the task, the tasks' times added up."
)


def tuned_table(source: Source, rows: Sequence[Row]) -> str:
    """All variants with lambda chosen on the other half."""
    head = ["lambda", "chosen", "speed-up", "over fixed", "each task its own", "over fixed, each its own"]
    tasks = [task for task in source.tasks if task != ALL] or [ALL]
    own = {what: pooled(find(rows, what=what, task=task) for task in tasks) for what in TUNED}
    whole = {what: find(rows, what=what, task=ALL) for what in TUNED}
    lines = []
    for what in TUNED:
        gains = [percent_more(gain(of[what], of[FIXED])) if what != FIXED else "" for of in (whole, own)]
        values = [times(speedup(of[what])) for of in (whole, own)]
        lines.append([what, setting(whole[what]["settings"], "threshold"), values[0], gains[0], values[1], gains[1]])
    return studies.table(head, lines)


def starts_table(rows: Sequence[Row]) -> str:
    """From the same start: what moving contributes, whatever start was chosen."""
    head = ["start", "fixed", DYNAMIC, "moving brings", "ten times the step brings", "rounds a text"]
    lines = []
    for start in STARTS:
        still, moving, steep = (find(rows, what=f"{kind} from {start:g}", task=ALL) for kind in (FIXED, DYNAMIC, STEEP))
        values = [times(speedup(still)), times(speedup(moving))]
        gains = [percent_more(gain(moving, still)), percent_more(gain(steep, still))]
        lines.append([f"{start:g}", *values, *gains, f"{total(moving, 'rounds') / len(moving['rounds']):.0f}"])
    return studies.table(head, lines)


def tasks_table(source: Source, rows: Sequence[Row]) -> str:
    """By task: the fixed lambda chosen, and what Algorithm 1 adds to it."""
    head = ["task", "prompts", "fixed lambda", "speed-up", "start", "Algorithm 1 over fixed"]
    lines = []
    for task in source.tasks:
        still, moving = (find(rows, what=what, task=task) for what in (FIXED, DYNAMIC))
        chosen_values = [setting(row["settings"], "threshold") for row in (still, moving)]
        middle = [str(len(still["emitted"])), chosen_values[0], times(speedup(still)), chosen_values[1]]
        lines.append([task, *middle, percent_more(gain(moving, still))])
    return studies.table(head, lines)


def picture(run: Run, rows: Sequence[Row]) -> Figure:
    """Speed-up against lambda, or its start: the lines lie on each other where moving brings nothing."""
    figure, grid = panels([title for _, title in sections(run)], sharey=True)
    styles = {FIXED: (COLOURS[1], "-"), DYNAMIC: (COLOURS[2], "--"), STEEP: (COLOURS[3], ":")}
    for axes, source in zip(grid[0], run.sources, strict=True):
        here = [row for row in rows if (row["drafter"], row["temperature"], row["task"]) == (*source[:2], ALL)]
        for what, (colour, style) in styles.items():
            axes.plot(LAMBDAS, find(here, what=what)["curve"], color=colour, ls=style, lw=2, label=what)
        axes.axhline(1.0, color="#222222", lw=0.8, ls=":")
        axes.set_xlabel("lambda, or where it starts")
    grid[0][0].set_ylabel("speed-up over plain decoding")
    legend_below(figure, grid[0][0], 3)
    return figure


if __name__ == "__main__":
    sys.exit(main())
