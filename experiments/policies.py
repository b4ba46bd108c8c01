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
"Oracle acceptance" is the survival rule told before every draw the true sum of min(p, q), which no drafter knows.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import NONE, QUARTILES, interval, markdown
from experiments.lib.commands import command
from experiments.lib.plots import RULE_COLOURS, legend_below, panels, rule_colours
from experiments.lib.rule_choice import variants_of
from experiments.lib.rules import RULES, STATIC, headings
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, LIMITS, ORACLE, ORACLE_ACCEPTANCE, Row, Run, Source, TraceOptions
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
    wanted = options.rules or tuple(entry.name for entry in RULES)
    variants = variants_of(options.over, ()) | variants_of((STATIC,), ()) | variants_of(wanted, options.settings)
    if options.time:
        console.print(timed(runs.read_sources(options)[0]))
        return
    run = runs.open_run("policies", options, console)
    rows = runs.compare(run, variants | LIMITS)
    figures = {"policies": dots(run, rows), "drafting": drafting(run, rows)}
    if len(run.sources[0].tasks) > 1:
        figures["tasks"] = heat(run, rows)
    publish(run.folder, report(run, rows), run.console, **figures)


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


def whole(run: Run, source: Source, rows: Sequence[Row]) -> dict[str, Row]:
    """A source's rows over all texts by rule, fastest first and limits last; greedily the two limits are one."""
    here = runs.of_source(rows, source)
    names = dict.fromkeys(row["what"] for row in here)
    found = {
        name: runs.each_its_own(source, here, name)
        if run.options.tuning == "task"
        else runs.find(here, what=name, task=ALL)
        for name in names
        if not (name == ORACLE_ACCEPTANCE and source.temperature == 0)
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] in LIMITS, runs.total(item[1], "seconds"))))


def by_task(run: Run, source: Source, rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """The same by task, {} where there is one only."""
    here = runs.of_source(rows, source)
    found = {}
    for task, texts in source.tasks.items():
        if task == ALL:
            continue
        if run.options.tuning == "task":
            found[task] = {row["what"]: row for row in here if row["task"] == task}
        else:
            found[task] = {row["what"]: runs.part(row, texts) for row in here if row["task"] == ALL}
    return found


def report(run: Run, rows: Sequence[Row]) -> str:
    """The tables of every trace: over all texts, over those that do not repeat themselves, and by task."""
    blocks = [tables.about(run), NOTES]
    for source, title in tables.sections(run):
        found, tasks = whole(run, source, rows), by_task(run, source, rows)
        repeated = np.average(source.repeated, weights=source.trace.length)
        about = f"{source.trace.num_texts} texts, {repeated:.0%} of their tokens repeat earlier ones"
        blocks += [f"## {title}", f"{about}:", rules_table(found, tasks, run.options.over)]
        clean = source.repeated <= MOST_REPEATED
        if clean.any() and not clean.all():
            kept = {name: runs.without_repeats(row) or row for name, row in found.items()}
            blocks += [f"The {clean.sum()} texts with hardly a repeat:", rules_table(kept, tasks, run.options.over)]
        if tasks:
            blocks += ["By task, over " + ", over ".join(headings(run.options.over)) + ":"]
            blocks += [tasks_table(tasks, over) for over in run.options.over]
    return "\n\n".join(["# Stopping rules", *blocks, ""])


NOTES = (
    "Speed-ups over plain decoding, total over total: at the published setting, and at the one chosen on other "
    "prompts. Over a rule: how many times faster, with the 95 % bootstrap interval over texts, paired. Head-room: 0 % "
    "is the best static length, 100 % the oracle. Rank: mean over tasks. Acc.: accepted over drafted tokens. Tokens "
    "and drafted: by target pass. Discarded: the share of drafter passes whose distribution gave no token; wasted: of "
    "those that gave no accepted token. By task: the first line is a speed-up over plain decoding, the others are "
    "gains over that rule, bold where the interval leaves 1 out."
)


def rules_table(found: Mapping[str, Row], tasks: Mapping[str, Mapping[str, Row]], over: Sequence[str]) -> str:
    """A line a rule."""
    places, fast = ranks(tasks or {ALL: found}), {name: runs.speedup(row).estimate for name, row in found.items()}
    least, most = fast[STATIC], fast[ORACLE]
    lines = []
    for name, row in found.items():
        published = runs.total(row, "plain_seconds") / runs.total(row, "first_seconds")
        gains = [NONE if name == other else interval(runs.gain(row, found[other]), ".3f", QUARTILES) for other in over]
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
    """Mean rank over tasks, 1 the fastest; limits take no part."""
    places: dict[str, list[int]] = {}
    for rows in tasks.values():
        totals = {name: runs.total(row, "seconds") for name, row in rows.items() if name not in LIMITS}
        for place, name in enumerate(sorted(totals, key=totals.__getitem__), start=1):
            places.setdefault(name, []).append(place)
    return {name: float(np.mean(found)) for name, found in places.items()}


def tasks_table(tasks: Mapping[str, Mapping[str, Row]], over: str) -> str:
    """Rules down, tasks across: gains over one of them, whose own line is its speed-up."""
    names = [over, *(name for name in next(iter(tasks.values())) if name not in (over, ORACLE_ACCEPTANCE))]
    lines = []
    for name in names:
        texts = [f"{runs.speedup(rows[over]).estimate:.2f}" for rows in tasks.values()] if name == over else []
        for rows in tasks.values() if name != over else ():
            value = runs.gain(rows[name], rows[over])
            text = f"{value.estimate:.2f} ±{(value.high - value.low) / 2:.2f}"
            texts.append(f"**{text}**" if tables.leaves_one_out(value) else text)
        lines.append([name, *texts])
    head = [f"{task.replace('_', ' ')} ({len(rows[over]['emitted'])})" for task, rows in tasks.items()]
    return markdown(["rule", *head], lines)


def dots(run: Run, rows: Sequence[Row]) -> Figure:
    """Speed-ups with their intervals, a panel a trace."""
    points = {
        title: [(name, *runs.speedup(row)) for name, row in whole(run, source, rows).items()]
        for source, title in tables.sections(run)
    }
    label = "speed-up over plain decoding, setting chosen on other prompts"
    return tables.dots_figure(points, label, RULE_COLOURS)


def drafting(run: Run, rows: Sequence[Row]) -> Figure:
    """What is bought at what cost: tokens against drafter passes, by target pass."""
    figure, grid = panels([title for _, title in tables.sections(run)], 4.0, sharey=True)
    for axes, source in zip(grid[0], run.sources, strict=True):
        found = {name: row for name, row in whole(run, source, rows).items() if name != ORACLE_ACCEPTANCE}
        named = [name for name in found if len(found) < 10 or name in (*RULE_COLOURS, ORACLE)]
        colours = rule_colours(named)
        for name, row in found.items():
            style = {"color": colours[name], "label": name} if name in named else {"color": "#dddddd", "zorder": 1}
            x, y = runs.per_round(row, "passes"), runs.per_round(row, "emitted")
            axes.plot(x, y, "*" if name == ORACLE else "o", ms=11 if name == ORACLE else 6, **style)
        axes.set(xlabel="drafter passes a target pass", xlim=(0, None))
    grid[0][0].set_ylabel("tokens a target pass")
    legend_below(figure, grid[0][0], 4)
    return figure


def heat(run: Run, rows: Sequence[Row]) -> Figure:
    """A heat map a trace: tasks down, rules across, the gain over the first of --over printed."""
    over = run.options.over[0]
    cells = {title: by_task(run, source, rows) for source, title in tables.sections(run)}
    names = [name for name in next(iter(next(iter(cells.values())).values())) if name not in (over, ORACLE_ACCEPTANCE)]
    height = 1.3 + (0.8 + 0.3 * len(run.sources[0].tasks)) * len(cells)
    figure = Figure(figsize=(max(6.0, 2.2 + 0.42 * len(names)), height), dpi=150, layout="constrained")
    grid = figure.subplots(len(cells), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, tasks) in zip(grid, cells.items(), strict=True):
        gains = [[runs.gain(rows[name], rows[over]) for name in names] for rows in tasks.values()]
        values = np.array([[gain.estimate for gain in line] for line in gains])
        span = np.clip(np.abs(values - 1).max(), 0.02, 0.5)
        image = axes.imshow(values, cmap="RdBu", vmin=1 - span, vmax=1 + span, aspect="auto")
        for (down, across), value in np.ndenumerate(values):
            weight = "bold" if tables.leaves_one_out(gains[down][across]) else "normal"
            colour = "white" if abs(value - 1) > 0.6 * span else "#222222"
            style = {"ha": "center", "va": "center", "fontsize": 7}
            axes.text(across, down, f"{value:.2f}", color=colour, weight=weight, **style)
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        axes.set_yticks(range(len(tasks)), [task.replace("_", " ") for task in tasks], fontsize=8)
        axes.set_title(title, fontsize=11)
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, shrink=0.9)
    figure.suptitle(f"Speed-up over {headings([over])[0]} (bold: the 95 % interval leaves 1 out)", fontsize=11)
    return figure


main = command(Policies, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
