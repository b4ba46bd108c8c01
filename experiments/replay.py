"""Any stopping rule over recorded traces, at one setting or many, without a model.

Question:  How many tokens a target pass does a rule give, what does it waste, and what speed-up is that?
Command:   python -m experiments.replay TRACES... [--rules adaedl svip my_rule.py] [--set threshold=0.1:0.9:9]
           [--costs cost_model.json | --ratio 0.1 --slope 0.01]; --time only says how fast replays are
Time:      seconds; --smoke needs no trace
Expected:  the built-in pair, greedy, published settings: adaedl 1.02, adaedl-keep 1.48, the best static length 1.59,
           the oracle 2.06; 1,000 settings of adaedl over 10,000 positions in under 10 s on 2 cores
Output:    runs/replay-<time>/ with manifest.json, results.jsonl (a line a trace, task, rule and setting), table.md and
           replay.png; a stopped run goes on where it was with the same --out

A rule is a name in lib/rules.py at its published setting, or a call of a file of specdec_jax/stopping or of your own:
"at_least(minimum=2, policy=svip)", my_rule.py. --set takes NAME=VALUE, NAME=VALUE,VALUE,... or NAME=LOW:HIGH:COUNT; all
combinations are replayed, for every rule that has a hyperparameter of that name. What is exact in a replay and what is
not: specdec_jax/replay/replay.py. The best static length and the oracle (nothing drafted that is rejected) are known in
hindsight only: they are where the head-room begins and ends.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import studies
from experiments.lib.rule_choice import chosen_rules, entry_settings
from experiments.lib.rules import rule
from experiments.lib.trace_runs import (
    ALL,
    COUNTS,
    Row,
    Run,
    Source,
    TraceOptions,
    acceptance,
    clean_speedup,
    fill,
    find,
    finish,
    fixed,
    mean_speedup,
    of_texts,
    open_run,
    read_sources,
    replayed,
    speedup,
    total,
)
from experiments.lib.trace_tables import NONE, about, legend_below, palette, panels, sections, share, times
from specdec_jax.replay.replay import oracle, replay
from specdec_jax.stopping import adaedl

ORACLE, BEST_STATIC = "oracle", "best static"
MANY = 1000


@dataclass(frozen=True)
class ReplayOptions(TraceOptions):
    """Replay stopping rules over traces."""

    rules: tuple[str, ...] = ("static-3", "static-7", "adaedl", "adaedl-keep", "max-confidence", "svip")
    """Names in experiments/lib/rules.py, files of specdec_jax/stopping, or paths to .py files."""
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """NAME=VALUE, NAME=VALUE,VALUE or NAME=LOW:HIGH:COUNT, for the rules that have such a hyperparameter."""
    time: bool = False
    """Only print how long 1,000 thresholds of adaedl take over the first trace."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the replays; 2 on bad input."""
    return studies.run(ReplayOptions, study, __doc__, arguments)


def study(options: ReplayOptions, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    rules = chosen_rules(options.rules, options.settings)
    whats = {label: (entry, chosen) for entry in rules.values() for label, chosen in entry_settings(entry)}
    if options.time:
        console.print(timed(read_sources(options)[0]))
        return
    run = open_run("replay", options, console)

    def measure(source: Source, what: str) -> Mapping[str, Row]:
        if what == ORACLE:
            return fixed(run, source, oracle(source.trace, options.max_draft_length))
        if what == BEST_STATIC:
            return best_static(run, source)
        entry, chosen = whats[what]
        return fixed(run, source, replayed(run, source, entry, [chosen]), settings=[chosen], rule=entry.name)

    rows = fill(run, (*whats, BEST_STATIC, ORACLE), measure)
    finish(run, report(run, rows, list(whats)), {"replay.png": picture(run, rows, [r.name for r in rules.values()])})


def best_static(run: Run, source: Source) -> dict[str, Row]:
    """The static length that was fastest on the very texts of each task, and what every length gives there."""
    lengths = [{"draft_length": length} for length in range(run.options.max_draft_length + 1)]
    found = replayed(run, source, rule("static"), lengths)
    rows = {}
    for task, texts in source.tasks.items():
        part = of_texts(found, texts)
        best = int(np.argmin(part.seconds(run.costs).sum(axis=1)))
        sums = {name: getattr(part, name).sum(axis=1) for name in ("emitted", *COUNTS)}
        curve = np.stack([sums["passes"], sums["emitted"]]) / sums["rounds"]
        rows[task] = fixed(run, source, found, best, settings=[lengths[best]], curve=curve.T.tolist())[task]
    return rows


def timed(source: Source) -> str:
    """How long many settings of adaedl take, with and without compilation."""
    hyperparameters = {"threshold": np.linspace(0.0, 0.99, MANY)}
    seconds = []
    for _ in range(2):
        watch = time.perf_counter()
        replay(source.trace, adaedl(), hyperparameters)
        seconds.append(time.perf_counter() - watch)
    return (
        f"{MANY:,} settings of adaedl over {source.trace.num_positions:,} positions: {seconds[0]:.2f} s with "
        f"compilation, {seconds[1]:.2f} s without."
    )


def report(run: Run, rows: Sequence[Row], whats: Sequence[str]) -> str:
    """Two tables a trace, of speed and of drafts, and one of speed by task."""
    blocks = ["# Replay", about(run)]
    for source, title in sections(run):
        here = [row for row in rows if (row["drafter"], row["temperature"]) == source[:2]]
        whole = {row["what"]: row for row in here if row["task"] == ALL}
        names = [*whats, BEST_STATIC, ORACLE]
        fast = {what: speedup(whole[what]).estimate for what in names}
        head = ["rule", "speed-up, total", "mean of prompts", "without repeats", "head-room"]
        ends = fast[BEST_STATIC], fast[ORACLE]
        speeds = [
            [
                label(what, whole[what]),
                times(speedup(whole[what])),
                times(mean_speedup(whole[what])),
                times(clean_speedup(whole[what])),
                share((fast[what] - ends[0]) / (ends[1] - ends[0])) if ends[1] > ends[0] else NONE,
            ]
            for what in names
        ]
        blocks += [f"## {title}", studies.table(head, speeds), drafts_table(whole, names)]
        if len(source.tasks) > 1:
            blocks += [tasks_table(source, here, names)]
    return "\n\n".join([*blocks, NOTES, ""])


NOTES = (
    "Speed-up against plain decoding, [95 % bootstrap interval over texts]; total: all tokens over all seconds. "
    "Without repeats: texts with at most 10 % repeated tokens. Head-room: 0 % is the best static length, 100 % the "
    "oracle. Wasted: share of drafter passes that gave no accepted token; discarded: whose distribution gave no "
    "token at all. By task: total speed-up; the best static length is each task's own."
)


def label(what: str, row: Row) -> str:
    """A row's name; the best static length says which it is."""
    return f"{what} ({row['settings'][0]['draft_length']})" if what == BEST_STATIC else what


def drafts_table(whole: Mapping[str, Row], names: Sequence[str]) -> str:
    """What a rule drafts and what becomes of it."""
    head = ["rule", "tokens a pass", "drafted a pass", "accepted", "wasted", "discarded"]
    lines = []
    for what in names:
        row = whole[what]
        rounds, passes = total(row, "rounds"), max(total(row, "passes"), 1)
        lines.append(
            [
                label(what, row),
                f"{total(row, 'emitted') / rounds:.2f}",
                f"{total(row, 'drafted') / rounds:.2f}",
                share(acceptance(row)),
                share((passes - total(row, "accepted")) / passes if total(row, "passes") else 0.0),
                share((total(row, "passes") - total(row, "drafted")) / passes),
            ]
        )
    return studies.table(head, lines)


def tasks_table(source: Source, rows: Sequence[Row], names: Sequence[str]) -> str:
    """Total speed-ups by task."""
    tasks = [task for task in source.tasks if task != ALL]
    cells = {what: [f"{speedup(find(rows, what=what, task=task)).estimate:.2f}" for task in tasks] for what in names}
    return studies.table(["rule", *tasks], [[what, *cells[what]] for what in names])


def picture(run: Run, rows: Sequence[Row], rules: Sequence[str]) -> Figure:
    """What is bought at what cost: tokens against drafter passes, by target pass. A rule's settings are a line."""
    figure, grid = panels([title for _, title in sections(run)], 4.0, sharey=True)
    colours = palette(rules)
    for axes, source in zip(grid[0], run.sources, strict=True):
        here = [row for row in rows if (row["drafter"], row["temperature"], row["task"]) == (*source[:2], ALL)]
        curve = np.array(find(here, what=BEST_STATIC)["curve"])
        axes.plot(*curve.T, ".-", color="#bbbbbb", ms=4, lw=1, label="static, every length", zorder=1)
        points = {
            row["what"]: [total(row, name) / total(row, "rounds") for name in ("passes", "emitted")] for row in here
        }
        for name in rules:
            mine = np.array([points[row["what"]] for row in here if row.get("rule") == name])
            axes.plot(*mine.T, "o-", color=colours[name], ms=5, lw=1, label=name, zorder=3)
        axes.plot(*points[ORACLE], "*", color="#222222", ms=11, label=ORACLE, zorder=4)
        axes.set(xlabel="drafter passes a target pass", xlim=(0, None))
    grid[0][0].set_ylabel("tokens a target pass")
    legend_below(figure, grid[0][0], 4)
    return figure


if __name__ == "__main__":
    sys.exit(main())
