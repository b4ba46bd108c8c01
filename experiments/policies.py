"""All stopping rules side by side on recorded traces, by task and temperature; your own rule and settings among them.

Question:  Which rule makes decoding fastest, where, and how much of what could be gained does it gain?
Command:   python -m experiments.policies TRACES... [--rules survival my_rule.py "at_least(minimum=2, policy=svip)"]
           [--set threshold=0.1:0.9:9] [--over static adaedl] [--costs cost_model.json | --ratio 0.1 --slope 0.01]
Time:      two minutes on 2 cores for 240 texts at three temperatures, seconds for one rule; --smoke needs no trace
Expected:  docs/results.md has the tables; 1,000 settings of adaedl over 10,000 positions in under 10 s (--time)
Output:    runs/policies-<time>/ with manifest.json, results.jsonl (a line a trace, task and rule), table.md,
           policies.png, tasks.png and drafting.png; a stopped run goes on where it was with the same --out

Replays of traces (`python -m experiments.record`), exact up to what specdec_jax/replay/replay.py says; time is the cost
model's. A setting is chosen on the half of the prompts that it is not judged on, by task (--tuning all: one for all
tasks, as for a user who does not know what comes). --set takes NAME=VALUE, NAME=VALUE,VALUE,... or NAME=LOW:HIGH:COUNT:
every combination is then a line of its own, of every rule that has such a hyperparameter. Head-room is what lies
between the best static length, chosen likewise, and the oracle, which never drafts a token that will be rejected.
"Survival, true acceptance" is that rule with the true sum of min(p, q) for its estimate: no bound for other rules.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import NONE, PARENTHESES, interval, markdown
from experiments.lib.commands import command
from experiments.lib.plots import INK, RULE_COLOURS, legend_below, panels, rule_colours
from experiments.lib.rule_choice import variants_of
from experiments.lib.rules import RULES, STATIC, headings
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, ORACLE, REFERENCES, TRUE_ACCEPTANCE, Row, Run, Source, TraceOptions
from experiments.lib.trace_tables import share
from experiments.lib.traced import MOST_REPEATED
from specdec_jax.replay.replay import replay
from specdec_jax.stopping import adaedl

HEAD = ("rule", "publ.", "chosen", "{over}", "head-room", "rank", "acc.", "tokens", "drafted", "discarded", "wasted")
MANY = 1000


@dataclass(frozen=True)
class Policies(TraceOptions):
    """Compare stopping rules on traces."""

    rules: tuple[str, ...] = ()
    """Names of experiments/lib/rules.py, calls of files of specdec_jax/stopping, or paths to .py files; none: all."""
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """NAME=VALUE, NAME=VALUE,VALUE or NAME=LOW:HIGH:COUNT, for the rules that have such a hyperparameter."""
    over: tuple[str, ...] = (STATIC,)
    """Rules that the others are compared with, prompt by prompt."""
    tuning: Literal["task", "all"] = "task"
    """Settings are chosen for each task, or one for all."""
    time: bool = False
    """Only print how long 1,000 thresholds of adaedl take over the first trace."""


def study(options: Policies, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    over = variants_of(options.over or (STATIC,), ())
    every = tuple(entry.name for entry in RULES)
    variants_of(options.rules or every, options.settings)  # bad names are told before anything is read
    if options.time:
        console.print(timed(runs.read_sources(options)[0]))
        return
    run = runs.open_run("policies", options, console)
    played = variants_of(options.rules or _rules_of(run), options.settings)
    variants = over | variants_of((STATIC,), ()) | played
    rows = runs.compare(run, variants | REFERENCES)
    shown = [_shown(run, source, runs.of_source(rows, source)) for source in run.sources]
    figures = {"policies": dots(run, shown), "drafting": drafting(run, shown)}
    if any(entry.tasks for entry in shown):
        figures["tasks"] = heat(run, shown, next(iter(over)))
    publish(run.folder, report(run, shown, list(over)), run.console, **figures)


def _rules_of(run: Run) -> tuple[str, ...]:
    """All that the traces can play."""
    if all(source.trace.candidate is not None for source in run.sources):
        return tuple(entry.name for entry in RULES)
    run.console.print("Traces that were recorded before siblings were: rules with siblings are left out.")
    return tuple(entry.name for entry in RULES if entry.policy.rounds is None)


class Shown(NamedTuple):
    """The rows of a trace by rule."""

    whole: dict[str, Row]  # over all texts, fastest first and reference lines last
    tasks: dict[str, dict[str, Row]]  # by task; {} where there is one only


def timed(source: Source) -> str:
    """How long many settings of adaedl take, with and without compilation."""
    hyperparameters, seconds = {"threshold": np.linspace(0.0, 0.99, MANY)}, []
    for _ in range(2):
        watch = time.perf_counter()
        replay(source.trace, adaedl(), hyperparameters)
        seconds.append(time.perf_counter() - watch)
    return (
        f"{MANY:,} settings of adaedl over {source.trace.num_positions:,} positions: {seconds[0]:.2f} s with "
        f"compilation, {seconds[1]:.2f} s without."
    )


def _shown(run: Run, source: Source, rows: Sequence[Row]) -> Shown:
    """Without the true acceptance where decoding is greedy: it is the oracle there."""
    names = [row["what"] for row in rows if row["task"] == ALL]
    names = [name for name in names if not (name == TRUE_ACCEPTANCE and source.temperature == 0)]
    together = {row["what"]: row for row in rows if row["task"] == ALL}
    each = run.options.tuning == "task"
    tasks = {
        task: {
            name: runs.find(rows, what=name, task=task) if each else runs.part(together[name], texts) for name in names
        }
        for task, texts in source.tasks.items()
        if task != ALL
    }
    return Shown(
        _ordered({name: runs.each_its_own(source, rows, name) if each else together[name] for name in names}), tasks
    )


def _ordered(found: Mapping[str, Row]) -> dict[str, Row]:
    return dict(sorted(found.items(), key=lambda item: (item[0] in REFERENCES, runs.total(item[1], "seconds"))))


def _clean(shown: Shown) -> Shown:
    """Without the texts that repeat themselves."""
    tasks = {
        task: {name: kept for name, row in rows.items() if (kept := runs.without_repeats(row)) is not None}
        for task, rows in shown.tasks.items()
    }
    kept = {name: runs.without_repeats(row) or row for name, row in shown.whole.items()}
    return Shown(_ordered(kept), {task: rows for task, rows in tasks.items() if rows})


def report(run: Run, shown: Sequence[Shown], over: Sequence[str]) -> str:
    """The tables of every trace: over all texts, over those that do not repeat themselves, and by task."""
    blocks = [tables.about(run), NOTES]
    for entry, (source, title) in zip(shown, tables.sections(run), strict=True):
        repeated = np.average(source.repeated, weights=source.trace.length)
        about = f"{source.trace.num_texts} texts, {repeated:.0%} of their tokens repeat earlier ones:"
        blocks += [f"## {title}", about, rules_table(entry, over)]
        clean = source.repeated <= MOST_REPEATED
        if clean.any() and not clean.all():
            about = f"The {clean.sum()} texts with at most {MOST_REPEATED:.0%} repeated tokens:"
            blocks += [about, rules_table(_clean(entry), over)]
        if entry.tasks:
            blocks += [f"By task, over {', then over '.join(headings(over))}:"]
            blocks += [tasks_table(entry.tasks, name) for name in over]
    return "\n\n".join(["# Stopping rules", *blocks, ""])


NOTES = (
    "Speed-ups over plain decoding, total over total: at the published setting (a line of --set: at that one), and at "
    "the setting chosen on other prompts. Over a rule: how many times faster, with the 95 % bootstrap interval over "
    "texts, paired. Head-room: 0 % is the best static length, 100 % the oracle. Rank: mean over tasks. Acc.: accepted "
    "over drafted tokens. Tokens and drafted: by target pass. Discarded: the share of drafter passes whose "
    "distribution gave no token; wasted: of those that gave no accepted token. By task: the first line is a speed-up "
    "over plain decoding, the others are gains over that rule, bold where the interval excludes 1."
)


def rules_table(shown: Shown, over: Sequence[str]) -> str:
    """A line a rule."""
    found, places = shown.whole, ranks(shown.tasks or {ALL: shown.whole})
    fast = {name: runs.speedup(row).estimate for name, row in found.items()}
    least, most = fast[STATIC], fast[ORACLE]
    lines = []
    for name, row in found.items():
        published = runs.total(row, "plain_seconds") / runs.total(row, "first_seconds")
        gains = [
            NONE if name == other else interval(runs.gain(row, found[other]), ".3f", PARENTHESES) for other in over
        ]
        room = share((fast[name] - least) / (most - least)) if most > least else NONE
        drafts = [f"{runs.acceptance(row):.2f}", *(f"{runs.per_round(row, key):.2f}" for key in ("emitted", "drafted"))]
        rank = f"{places[name]:.1f}" if name in places else NONE
        speeds = [f"{published:.2f}", f"{fast[name]:.3f}", *gains, room, rank]
        lines.append([name, *speeds, *drafts, share(runs.discarded(row)), share(runs.wasted(row))])
    return markdown(heads(over), lines)


def heads(over: Sequence[str]) -> list[str]:
    """The columns, with one for every rule that the others are compared with."""
    compared = [f"over {name} (95 %)" for name in over]
    return [text for head in HEAD for text in (compared if head == "{over}" else [head])]


def ranks(tasks: Mapping[str, Mapping[str, Row]]) -> dict[str, float]:
    """Mean rank over tasks, 1 the fastest, without the reference lines."""
    places: dict[str, list[int]] = {}
    for rows in tasks.values():
        totals = {name: runs.total(row, "seconds") for name, row in rows.items() if name not in REFERENCES}
        for place, name in enumerate(sorted(totals, key=totals.__getitem__), start=1):
            places.setdefault(name, []).append(place)
    return {name: float(np.mean(found)) for name, found in places.items()}


def tasks_table(tasks: Mapping[str, Mapping[str, Row]], over: str) -> str:
    """Rules down, tasks across: gains over one of them, whose own line is its speed-up."""
    names = [over, *(name for name in next(iter(tasks.values())) if name not in (over, TRUE_ACCEPTANCE))]
    lines = []
    for name in names:
        texts = [f"{runs.speedup(rows[over]).estimate:.2f}" for rows in tasks.values()] if name == over else []
        for rows in tasks.values() if name != over else ():
            value = runs.gain(rows[name], rows[over])
            text = tables.plus_minus(value)
            texts.append(f"**{text}**" if tables.excludes_one(value) else text)
        lines.append([name, *texts])
    head = [f"{task.replace('_', ' ')} ({len(rows[over]['emitted'])})" for task, rows in tasks.items()]
    return markdown(["rule", *head], lines)


def dots(run: Run, shown: Sequence[Shown]) -> Figure:
    """Speed-ups with their intervals, a panel a trace."""
    points = {
        title: [(name, *runs.speedup(row)) for name, row in entry.whole.items()]
        for entry, (_, title) in zip(shown, tables.sections(run), strict=True)
    }
    return tables.dots_figure(points, "speed-up over plain decoding, setting chosen on other prompts", RULE_COLOURS)


def drafting(run: Run, shown: Sequence[Shown]) -> Figure:
    """What is bought at what cost: tokens against drafter passes, by target pass; a rule's settings are a line."""
    figure, grid = panels([title for _, title in tables.sections(run)], 4.0, sharey=True)
    rules: dict[str, list[str]] = {}
    for name in shown[0].whole:
        rules.setdefault(name.partition(" ")[0] if name not in REFERENCES else name, []).append(name)
    named = [rule for rule, names in rules.items() if len(rules) < 10 or len(names) > 1 or rule in RULE_COLOURS]
    colours = rule_colours(named)
    for axes, entry in zip(grid[0], shown, strict=True):
        for rule, names in rules.items():
            rows = [entry.whole[name] for name in names if name in entry.whole]
            points = sorted((runs.per_round(row, "passes"), runs.per_round(row, "emitted")) for row in rows)
            style = {"color": colours[rule], "label": rule} if rule in named else {"color": "#dddddd", "zorder": 1}
            if rule in REFERENCES:
                style = {"color": INK, "label": rule, "ms": 10, "marker": "*" if rule == ORACLE else "x"}
            axes.plot(*zip(*points, strict=True), **{"marker": "o", "lw": 1, "ms": 6, **style})
        axes.set(xlabel="drafter passes a target pass", xlim=(0, None))
    grid[0][0].set_ylabel("tokens a target pass")
    legend_below(figure, grid[0][-1], 4)
    if len(named) + len(REFERENCES) < len(rules):
        figure.suptitle("grey: all other rules", fontsize=9)
    return figure


def heat(run: Run, shown: Sequence[Shown], over: str) -> Figure:
    """A heat map a trace with several tasks: tasks down, rules across, the gain over one of them printed."""
    cells = {title: e.tasks for e, (_, title) in zip(shown, tables.sections(run), strict=True) if e.tasks}
    names = [name for name in next(iter(next(iter(cells.values())).values())) if name not in (over, *REFERENCES)]
    gains = {
        title: [[runs.gain(rows[name], rows[over]) for name in names] for rows in tasks.values()]
        for title, tasks in cells.items()
    }
    span = np.clip(
        max(abs(gain.estimate - 1) for lines in gains.values() for line in lines for gain in line), 0.02, 0.5
    )
    height = 1.3 + sum(0.8 + 0.3 * len(tasks) for tasks in cells.values())
    figure = Figure(figsize=(max(6.0, 2.2 + 0.42 * len(names)), height), dpi=150, layout="constrained")
    grid = figure.subplots(len(cells), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, tasks) in zip(grid, cells.items(), strict=True):
        values = np.array([[gain.estimate for gain in line] for line in gains[title]])
        image = axes.imshow(values, cmap="RdBu", vmin=1 - span, vmax=1 + span, aspect="auto")
        for (down, across), value in np.ndenumerate(values):
            weight = "bold" if tables.excludes_one(gains[title][down][across]) else "normal"
            colour = "white" if abs(value - 1) > 0.6 * span else INK
            style = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(across, down, f"{value:.2f}", color=colour, weight=weight, **style)
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        axes.set_yticks(range(len(tasks)), [task.replace("_", " ") for task in tasks], fontsize=8)
        axes.set_title(title, fontsize=11)
        axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=list(grid), shrink=0.9)
    figure.suptitle(f"Speed-up over {headings([over])[0]} (bold: the 95 % interval excludes 1)", fontsize=11)
    return figure


main = command(Policies, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
