"""All stopping rules side by side on recorded traces, by task and temperature; your own rule and settings among them.

Question:  Which rule makes decoding fastest, where, and how much of what could be gained does it gain? With --ratios:
           and on a machine of another c, a drafter step over a target pass? With --groups: with which drafter?
Command:   python -m experiments.policies TRACES... [--rules survival my_rule.py "at_least(minimum=2, policy=svip)"]
           [--set threshold=0.1:0.9:9] [--over static adaedl] [--costs cost_model.json | --ratio 0.1 --slope 0.01]
           python -m experiments.policies TRACES... --ratios 0.05 0.1 [--measured RUN_FOLDER]
           python -m experiments.policies --groups nano:runs/nano:runs/nano-costs/cost_model.json base:runs/base:0.1
Time:      two minutes on 2 cores for 240 texts at three temperatures, seconds for one rule; --smoke needs no trace
Expected:  docs/results.md has the tables; 1,000 settings of adaedl over 10,000 positions in under 10 s (--time). The
           built-in pair, greedy, at c = 0.1 with measured widths: adaedl 1.38, the best static length 1.57, survival
           1.68, oracle 2.05
Output:    runs/policies-<time>/ with manifest.json, results.jsonl (a line a trace, task and rule), table.md and
           pictures; a stopped run goes on where it was with the same --out

Replays of traces (`python -m experiments.record`), exact up to what specdec_jax/replay/replay.py says; time is the cost
model's. A setting is chosen on the half of the prompts that it is not judged on, by task (--tuning all: one for all
tasks, as for a user who does not know what comes). --set takes NAME=VALUE, NAME=VALUE,VALUE,... or NAME=LOW:HIGH:COUNT:
every combination is then a line of its own, of every rule that has such a hyperparameter. Head-room is what lies
between the best static length, chosen likewise, and the oracle, which never drafts a token that will be rejected.
"Survival, true acceptance" is that rule with the true sum of min(p, q) for its estimate: no bound for other rules.

--ratios: two kinds of machine, `flat`, which verifies 16 drafts in the time of none, as accelerators nearly do for one
text, and `measured`, with the target's time by width of --costs. --measured compares run folders of experiments.compare
with what a replay of the same rules predicts. --groups: NAME:TRACES:COSTS each, traces of one target with several
drafters on the same prompts, and a cost_model.json or a number c, with which the target's passes are those of --costs.
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
from experiments.lib.cells import NONE, PARENTHESES, at_temperature, emphasised, interval, markdown
from experiments.lib.commands import command
from experiments.lib.measured import measured_points, points_picture, points_table
from experiments.lib.plots import INK, RULE_COLOURS, legend_below, panels, rule_colours
from experiments.lib.rule_choice import variants_of
from experiments.lib.rules import COMPARED, RULES, STATIC, headings, rule
from experiments.lib.trace_runs import (
    ALL,
    ORACLE,
    REFERENCES,
    TRUE_ACCEPTANCE,
    Row,
    Run,
    Source,
    TraceOptions,
    variant,
    write,
)
from experiments.lib.trace_tables import share
from experiments.lib.traced import MOST_REPEATED, load_traces
from specdec_jax.costs.cost_model import flat, load_cost_model
from specdec_jax.metrics.acceptance import expected_tokens
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import Trace
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
    ratios: tuple[float, ...] = ()
    """Values of c, a drafter step over a pass of plain decoding; a line of a table each."""
    measured: tuple[str, ...] = ()
    """With --ratios: run folders of experiments.compare to check the prediction against."""
    groups: tuple[str, ...] = ()
    """NAME:TRACES:COSTS each, instead of traces; COSTS is a cost_model.json or a number c."""
    time: bool = False
    """Only print how long 1,000 thresholds of adaedl take over the first trace."""

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        if not self.groups:
            super().check()
        self.check_numbers()
        if self.groups and (self.traces or self.ratios):
            raise ValueError(f"--groups names traces and costs: leave out {self.traces or self.ratios}")
        if self.ratios and self.ratio is not None:
            raise ValueError(f"--ratios says c, and --costs how long wider passes take: leave out --ratio {self.ratio}")
        if not all(0 < ratio < 10 for ratio in self.ratios):
            raise ValueError(f"ratios must be numbers above 0 and below 10, got {self.ratios}")
        if self.measured and not self.ratios:
            raise ValueError("--measured is compared with --ratios: give both")


def study(options: Policies, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    if options.groups or options.ratios:
        by_machine(options, console)
        return
    over = variants_of(options.over or (STATIC,), ())
    every = tuple(entry.name for entry in RULES)
    variants_of(options.rules or every, options.settings)  # bad names are told before anything is read
    if options.time:
        console.print(timed(runs.read_sources(options)[0]))
        return
    run = runs.open_traces("policies", options, console)
    played = variants_of(options.rules or _rules_of(run), options.settings)
    variants = over | variants_of((STATIC,), ()) | played
    rows = runs.sweep(run, variants | REFERENCES)
    shown = [_shown(run, source, runs.of_source(rows, source)) for source in run.sources]
    figures = {"policies": dots(run, shown), "drafting": drafting(run, shown)}
    if any(entry.tasks for entry in shown):
        figures["tasks"] = heat(run, shown, next(iter(over)))
    write(run, "Stopping rules", report(run, shown, list(over)), NOTES, **figures)


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


def report(run: Run, shown: Sequence[Shown], over: Sequence[str]) -> list[str]:
    """The tables of every trace: over all texts, over those that do not repeat themselves, and by task."""
    blocks = [tables.about(run)]
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
            blocks += [tables.tasks_table(entry.tasks, name, (TRUE_ACCEPTANCE,)) for name in over]
    return blocks


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
        for called, names in rules.items():
            rows = [entry.whole[name] for name in names if name in entry.whole]
            points = sorted((runs.per_round(row, "passes"), runs.per_round(row, "emitted")) for row in rows)
            style = (
                {"color": colours[called], "label": called} if called in named else {"color": "#dddddd", "zorder": 1}
            )
            if called in REFERENCES:
                style = {"color": INK, "label": called, "ms": 10, "marker": "*" if called == ORACLE else "x"}
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


LONG = "static-7"  # tokens a pass of one fixed length compare drafters whatever they cost
KINDS = {"flat": "verification free in its width", "measured": "widths as measured"}
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
NOTE_MACHINES = (
    "Speed-up over plain decoding, in brackets the share of the drafted tokens that were accepted; the best rule in "
    "bold. Settings were chosen for each line on the other half of the prompts. Acceptance a: mean overlap of the "
    "distributions (greedy: agreement) along the texts, ± half of the 95 % interval. Tokens a pass: with 7 drafts a "
    "round, in brackets what a would give if positions were independent."
)


def by_machine(options: Policies, console: Console) -> None:
    """Speed-ups by rule of machines of several c, or of several drafters: a table a temperature and kind of machine."""
    sources, points = (grouped(options) if options.groups else on_machines(options)), []
    for path in options.measured:
        traces = {source.temperature: source.trace for source in sources}
        points += measured_points(path, traces, options.machine())
    run = runs.open_traces("policies", options, console, sources=sources)
    played = variants_of(tuple(dict.fromkeys((STATIC, *(options.rules or COMPARED)))), options.settings)
    rows = runs.sweep(run, {LONG: variant(rule(LONG))} | played | {ORACLE: REFERENCES[ORACLE]})
    blocks, lines, names = [tables.about_traces(run)], {}, [*played, ORACLE]
    for (temperature, kind), mine in machines_of(sources).items():
        title = f"{at_temperature(temperature)}{kind and f', {KINDS[kind]}'}"
        blocks += [f"## {title[0].upper()}{title[1:]}", machines_table(mine, rows, list(played))]
        here = {
            (row["group"], row["what"]): row for row in rows if (row["temperature"], row["task"]) == (temperature, ALL)
        }
        lines[title] = {
            name: ([s.costs.ratio for s in mine], [runs.speedup(here[s.group, name])[0] for s in mine])
            for name in names
        }
    colours = rule_colours(list(played)) | {ORACLE: INK}
    styles = {name: {"color": colours[name], "marker": ".", "ls": "--" if name == ORACLE else "-"} for name in names}
    axes = "c, a drafter step over a target pass", "speed-up over plain decoding"
    count = len({source.temperature for source in sources})
    figures = {"speedups": tables.lines_figure(lines, axes, styles, columns=count, ticks=TICKS, log=True)}
    if points:
        blocks += ["## Measured and predicted", points_table(points, options.machine())]
        figures["measured"] = points_picture(points)
    write(run, "Speed-ups by machine" if options.ratios else "Drafters", blocks, NOTE_MACHINES, **figures)


def machines_of(sources: Sequence[Source]) -> dict[tuple[float, str], list[Source]]:
    """By temperature and kind of machine ("" where drafters are compared), ascending c."""
    found: dict[tuple[float, str], list[Source]] = {}
    for source in sorted(sources, key=lambda source: (source.temperature, source.costs.ratio)):
        kind = source.group.partition(", c = ")[0]
        found.setdefault((source.temperature, kind if kind in KINDS else ""), []).append(source)
    return found


def on_machines(options: Policies) -> list[Source]:
    """The traces of one drafter on a machine of every kind and c."""
    traces, costs = runs.read_sources(options), options.machine()
    drafters = dict.fromkeys(source.group for source in traces)
    if len(drafters) > 1:
        raise ValueError(f"this takes traces of one drafter, got those of {', '.join(drafters)}")
    found = []
    for source in traces:
        for kind in KINDS:
            for ratio in options.ratios:
                step = costs._replace(drafter_step=ratio * costs.plain_pass)
                machine = flat(ratio, options.longest) if kind == "flat" else step
                group, tasks = f"{kind}, c = {ratio:g}", {ALL: source.tasks[ALL]}
                found.append(source._replace(group=group, costs=machine, tasks=tasks))
    return found


def grouped(options: Policies) -> list[Source]:
    """The traces of every NAME:TRACES:COSTS."""
    options.check()
    found: dict[str, list[Source]] = {}
    shared = options.machine()
    for text in options.groups:
        name, _, rest = text.partition(":")
        traces, _, costs = rest.rpartition(":")
        if not (name and traces and costs) or name in found or name in KINDS:
            raise ValueError(f"a group is NAME:TRACES:COSTS, and names differ, got {text!r}")
        try:
            ratio = float(costs)
        except ValueError:
            model = load_cost_model(costs)
        else:
            if not 0 < ratio < 10:
                raise ValueError(f"c must lie above 0 and below 10, got {costs} in {text!r}")
            model = shared._replace(drafter_step=ratio * shared.plain_pass)
        model.pass_times(options.longest)
        read = load_traces([traces], options.longest)
        found[name] = [runs.source_of(name, temperature, trace, model) for temperature, trace in read.items()]
    return [source for sources in found.values() for source in sources]


def overlap(trace: Trace) -> Interval:
    """The mean overlap of the distributions over the emitted positions; for greedy texts, of the tokens they name."""
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[:, None]
    values = np.where(trace.temperature[:, None] <= 0, trace.accepted, np.where(within, trace.overlap, 0.0))
    return ratio_of_totals(np.where(within, values, 0.0).sum(axis=1), trace.length)


def machines_table(sources: Sequence[Source], rows: Sequence[Row], names: Sequence[str]) -> str:
    """Machines or drafters down, rules across; the oracle takes no part in the contest."""
    lines = []
    for source in sources:
        here = {row["what"]: row for row in runs.of_source(rows, source, ALL)}
        taken, fast = overlap(source.trace), {what: runs.speedup(row).estimate for what, row in here.items()}
        texts = [f"{fast[name]:.2f} ({runs.acceptance(here[name]):.0%})" for name in names]
        emitted = f"{runs.per_round(here[LONG], 'emitted'):.2f} ({expected_tokens(taken.estimate, 7):.2f})"
        figures = [f"{source.costs.ratio:.3f}", tables.plus_minus(taken, 3), emitted]
        best = emphasised(texts, [fast[name] for name in names])
        lines.append([source.group, *figures, *best, f"{fast[ORACLE]:.2f}"])
    return markdown(["group", "c", "a", "tokens a pass", *headings([*names, ORACLE])], lines)


main = command(Policies, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
