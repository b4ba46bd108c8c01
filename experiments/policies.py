"""All stopping rules side by side on recorded traces, by task and temperature; your own rule and settings among them.

Question:  Which rule makes decoding fastest, where, and how much of what could be gained does it gain? With --ratios:
           and on a machine of another c, a drafter step over a target pass? With --groups: with which drafter?
Command:   python -m experiments.policies TRACES... [--rules survival my_rule.py "at_least(minimum=2, policy=svip)"]
           [--set threshold=0.1:0.9:9] [--over static adaedl] [--costs cost_model.json | --ratio 0.1 --slope 0.01]
           python -m experiments.policies TRACES... --ratios 0.05 0.1
           python -m experiments.policies --groups nano:runs/nano:runs/nano-costs/cost_model.json base:runs/base:0.1
           python -m experiments.policies headroom LOGS... (what rules gain on public logs)
Time:      two minutes on 2 cores for 240 texts at three temperatures, seconds for one rule; --smoke needs no trace
Expected:  docs/results.md has the tables. SmolLM2 with smollm2-drafter, 36 prompts of six kinds, greedy: adaedl 1.46,
           the best static length 1.60, survival 1.73, oracle 2.11
Output:    runs/policies-<time>/; results.jsonl has a line a trace, task and rule

Replays of traces (`python -m experiments.record`), exact up to what specdec_jax/replay/replay.py says; time is the cost
model's. A setting is chosen on the half of the prompts that it is not judged on, by task (--tuning all: one for all
tasks, as for a user who does not know what comes). --set takes NAME=VALUE, NAME=VALUE,VALUE,... or NAME=LOW:HIGH:COUNT:
every combination is then a line of its own, of every rule that has such a hyperparameter, and with several values of
two of them settings.png is a heat map. Head-room is what lies between the best static length, chosen likewise, and
foresight; the oracle never drafts a token that will be rejected. Foresight drafts the best length for distributions
that are known before the draft, with unknown coins: a reference for rules that read these distributions, no bound. Of
SpecDecode-Bench's logs, which hold accepted lengths alone, rules that read distributions are left out.

--ratios: two kinds of machine, `flat`, which verifies 16 drafts in the time of none, as accelerators nearly do for one
text, and `measured`, with the target's time by width of --costs. --groups: NAME:TRACES:COSTS each, traces of one target
with several drafters on the same prompts, and a cost_model.json or a number c, with which the target's passes are those
of --costs.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import headroom, plots, tables
from experiments.lib import trace_runs as runs
from experiments.lib.commands import command, with_studies
from experiments.lib.rules import COMPARED, RULES, SHORT_NAMES, STATIC, Rule, rule
from experiments.lib.tables import NONE, Row, gain, interval, markdown, per_round, speedup, total
from experiments.lib.trace_runs import ALL, FORESIGHT, ORACLE, REFERENCES, Run, Source, TraceOptions, Variant, variant
from specdec_jax.contrib.engine_logs.rounds import trace_of_runs
from specdec_jax.costs.cost_model import flat, load_cost_model, passes_disagree
from specdec_jax.metrics.acceptance import expected_tokens
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.ranges import Between
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import Trace, select
from specdec_jax.stopping import survival
from specdec_jax.strategy import nearest
from specdec_jax.text.strategies import choose, name_in, names

MOST_REPEATED = 0.1  # texts with a larger share of repeated tokens are left out of a table of their own


@dataclass(frozen=True)
class Policies(TraceOptions):
    """Compare stopping rules on traces."""

    rules: tuple[str, ...] = ()
    """Names of experiments/lib/rules.py, calls of files of specdec_jax/stopping, or paths to .py files; none: all."""
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """NAME=VALUE, NAME=VALUE,VALUE or NAME=LOW:HIGH:COUNT, for the rules that have such a hyperparameter."""
    over: tuple[str, ...] = (STATIC,)  # Rules that the others are compared with, prompt by prompt.
    tuning: Literal["task", "all"] = "task"  # Settings are chosen for each task, or one for all.
    ratios: Annotated[tuple[float, ...], Between(0, 10, open="low, high")] = ()
    """Values of c, a drafter step over a pass of plain decoding; one table row each."""
    groups: tuple[str, ...] = ()  # NAME:TRACES:COSTS each, instead of traces; COSTS is a cost_model.json or a number c.

    def check(self, named: bool = False) -> None:
        """Raises ValueError where options are invalid."""
        super().check(named or bool(self.groups))
        if self.groups and (self.traces or self.ratios):
            raise ValueError(f"--groups names traces and costs: leave out {self.traces or self.ratios}")
        if self.ratios and self.ratio is not None:
            raise ValueError(f"--ratios says c, and --costs how long wider passes take: leave out --ratio {self.ratio}")


def study(options: Policies, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    if options.groups or options.ratios:
        by_machine(options, console)
        return
    over = variants_of(options.over or (STATIC,), ())
    every = [entry.name for entry in RULES]
    variants_of(options.rules or every, options.settings)  # bad names are refused before anything is read
    run = runs.open_traces("policies", options, console)
    if not options.rules and any(source.trace.candidate is None for source in run.sources):
        console.print("Traces that were recorded before siblings were: rules with siblings are left out.")
        every = [entry.name for entry in RULES if entry.policy.tree_hooks is None]
    references = dict(REFERENCES)
    if any(source.trace.lengths_only for source in run.sources):
        references.pop(FORESIGHT)
        every = [name for name in every if replays_lengths(rule(name))]
    variants = over | variants_of((STATIC,), ()) | variants_of(options.rules or every, options.settings)
    rows = runs.sweep(run, variants | references)
    blocks, points = [runs.about(run)], {}
    for source, title in runs.sections(run):
        whole, tasks = shown_of(run, source, rows)
        points[title] = [(name, *speedup(row)) for name, row in whole.items()]
        repeated = np.average(source.repeated, weights=source.trace.length)
        about = f"{source.trace.num_texts} texts, {repeated:.0%} of their tokens repeat earlier ones:"
        blocks += [f"## {title}", about, rules_table(whole, tasks, list(over))]
        clean = source.repeated <= MOST_REPEATED
        if clean.any() and not clean.all():
            about = f"The {clean.sum()} texts with at most {MOST_REPEATED:.0%} repeated tokens:"
            without = {task: rest for task, mine in tasks.items() if (rest := _without_repeats(mine))}
            blocks += [about, rules_table(ordered(_without_repeats(whole)), without, list(over))]
        if tasks:
            blocks += [f"By task, over {', then over '.join(SHORT_NAMES.get(name, name) for name in over)}:"]
            blocks += [tasks_table(tasks, name) for name in over]
    label = "speed-up over plain decoding, setting chosen on other prompts"
    pictures = {"policies": plots.dots_figure(points, label)} | heat_map(run, rows)
    runs.write(run, "Stopping rules", blocks, NOTES, **pictures)


def heat_map(run: Run, rows: Sequence[Row]) -> dict[str, Figure]:
    """settings.png, if --set gives several values to two hyperparameters: their speed-ups, a panel a rule and trace."""
    knobs = [(key, values) for key, values in map(parse_values, run.options.settings) if len(values) > 1]
    maps: dict[str, np.ndarray] = {}
    for source, title in runs.sections(run) if len(knobs) == 2 else ():
        (across, columns), (up, lines) = knobs
        for row in runs.by_name(rows, source).values():
            for chosen in row["settings"] if {across, up} <= row["settings"][0].keys() else ():
                name = f"{row['what'].partition(f' {across}=')[0]}\n{title}"
                cells = maps.setdefault(name, np.full((len(lines), len(columns)), np.nan))
                cells[lines.index(chosen[up]), columns.index(chosen[across])] = row["curve"][0]
    return {"settings": plots.map_figure(maps, *knobs, "speed-up over plain decoding")} if maps else {}


def variants_of(words: Sequence[str], settings: Sequence[str]) -> dict[str, Variant]:
    """Rules by name with their grids to choose from; with --set, a variant for every label and setting. Raises
    ValueError for an unknown rule, a --set that cannot be read, or one that no rule takes."""
    pairs = [parse_values(entry) for entry in settings]
    parsed, taken, variants = dict(pairs), set(), {}
    if len(parsed) < len(pairs):
        raise ValueError(f"--set names a hyperparameter twice: {', '.join(name for name, _ in pairs)}")
    for name in dict.fromkeys(words):
        entry = rule_in(name)
        if entry.name in variants:
            raise ValueError(f"{name!r} is called {entry.name!r}, as another rule is: give it another name")
        grid = {key: values for key, values in parsed.items() if key in entry.policy.hyperparameters}
        taken |= grid.keys()
        for key, values in grid.items():
            entry.policy.init(len(values), **{key: np.array(values)})  # raises for values out of range
        for values in itertools.product(*grid.values()) if grid else ():
            chosen = dict(zip(grid, values, strict=True))
            label = " ".join([entry.name, *(f"{key}={tables.number(value)}" for key, value in chosen.items())])
            variants[label] = variant(entry, [dict(entry.policy.given) | chosen])
        if not grid:
            variants[entry.name] = variant(entry)
    for key in parsed.keys() - taken:
        raise ValueError(f"--set {key}: none of {', '.join(words)} has a hyperparameter of that name")
    return variants


def replays_lengths(entry: Rule) -> bool:
    """Whether a rule needs only accepted lengths."""
    try:
        runs.replay_rule(trace_of_runs([[1, 0]], {}), entry, flat(0.1, 1), 1)
    except ValueError:
        return False
    return True


def rule_in(words: str) -> Rule:
    """A rule of the list by its name, or one called in words: at_least(minimum=2), my_rule.py."""
    listed = {entry.name for entry in RULES}
    if words in listed:
        return rule(words)
    name = name_in(words)
    if not name.endswith(".py") and name not in names("policy"):
        files = {file for file in names("policy") if file.replace("_", "-") not in listed}
        raise ValueError(f"no rule {name!r}{nearest(name, listed | files)}")
    policy = choose("policy", words)
    return Rule(repr(policy) if policy.name in names("policy") else repr(policy).replace(name, Path(name).stem), policy)


def parse_values(text: str) -> tuple[str, list[Any]]:
    """'threshold=0.1:0.9:9' as a name and its values; whole numbers stay whole."""
    name, _, right = (part.strip() for part in text.partition("="))
    try:
        if ":" in right:
            low, high, count = right.split(":")
            values = np.linspace(float(low), float(high), int(count)).round(10).tolist()
        else:
            values = [_value(part) for part in right.split(",")]
    except ValueError:
        values = []
    if not name or not right or not values:
        raise ValueError(f"--set reads NAME=VALUE, NAME=VALUE,VALUE or NAME=LOW:HIGH:COUNT, got {text!r}")
    return name.replace("-", "_"), values


def _value(text: str) -> Any:
    """A whole number, a number, or text that a factory may take."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text.strip()


def shown_of(run: Run, source: Source, rows: Sequence[Row]) -> tuple[dict[str, Row], dict[str, dict[str, Row]]]:
    """The rows of a trace by rule, and by task where there are several: each task at its setting with --tuning task,
    all at one with --tuning all. The fastest rule over all texts is first, reference lines last."""
    together = runs.by_name(rows, source)
    texts = {task: indices for task, indices in source.tasks.items() if task != ALL}
    if run.options.tuning == "all" or not texts:
        tasks = {task: {name: part(row, at) for name, row in together.items()} for task, at in texts.items()}
        return ordered(together), tasks
    tasks = {task: runs.by_name(rows, source, task) for task in texts}
    order = np.argsort(np.concatenate(list(texts.values())))  # texts as the trace has them
    whole = {}
    for name in together:
        columns = {key: [value for task in texts for value in tasks[task][name][key]] for key in runs.COLUMNS}
        whole[name] = part(columns, order)
    return ordered(whole), tasks


def part(row: Row, texts: np.ndarray) -> Row:
    """Some of a row's texts, by index or mask."""
    return {name: np.asarray(row[name])[texts].tolist() for name in runs.COLUMNS}


def ordered(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The fastest rule first, reference lines last."""
    return dict(sorted(rows.items(), key=lambda item: (item[0] in REFERENCES, total(item[1], "seconds"))))


def _without_repeats(rows: Mapping[str, Row]) -> dict[str, Row]:
    keep = np.array(next(iter(rows.values()))["repeated"]) <= MOST_REPEATED
    return {name: part(row, keep) for name, row in rows.items()} if keep.any() else {}


NOTES = (
    "Speed-ups over plain decoding, total over total: at the default setting (a line of --set: at that one), and at "
    "the setting chosen on other prompts. Over a rule: how many times faster, with the 95 % bootstrap interval over "
    "texts, paired. Head-room: 0 % is the best static length, 100 % foresight (the oracle where there is none), "
    "negative: slower than the best static length. Rank: mean over tasks. Acc.: accepted over drafted tokens. Tokens "
    "and drafted: by target pass. Discarded: the share of drafter passes whose distribution gave no token; wasted: of "
    "those that gave no accepted token. By task: the first line is a speed-up over plain decoding, the others are "
    "gains over that rule, bold where the interval excludes 1."
)


def rules_table(rows: Mapping[str, Row], tasks: Mapping[str, Mapping[str, Row]], over: Sequence[str]) -> str:
    """One line per rule; ranks are by task."""
    ranks: dict[str, list[int]] = {}  # 1 the fastest, without the reference lines
    for here in (tasks or {ALL: rows}).values():
        totals = {name: total(row, "seconds") for name, row in here.items() if name not in REFERENCES}
        for place, name in enumerate(sorted(totals, key=totals.__getitem__), start=1):
            ranks.setdefault(name, []).append(place)
    fast = {name: speedup(row).estimate for name, row in rows.items()}
    least, limit = fast[STATIC], fast.get(FORESIGHT, fast[ORACLE])
    lines = []
    for name, row in rows.items():
        default = total(row, "plain_seconds") / total(row, "first_seconds")
        gains = [interval(gain(row, rows[other]), ".3f", tables.PARENTHESES) for other in over]
        gains = [NONE if name == other else text for other, text in zip(over, gains, strict=True)]
        gained = f"{(fast[name] - least) / (limit - least):.0%}" if limit > least else NONE
        drafts = [f"{tables.acceptance(row):.2f}", *(f"{per_round(row, key):.2f}" for key in ("emitted", "drafted"))]
        rank = f"{np.mean(ranks[name]):.1f}" if name in ranks else NONE
        passes = total(row, "passes")
        unused = [f"{1 - total(row, key) / passes if passes else 0.0:.0%}" for key in ("drafted", "accepted")]
        lines.append([name, f"{default:.2f}", f"{fast[name]:.3f}", *gains, gained, rank, *drafts, *unused])
    heads = ["rule", "default", "chosen", *(f"over {name} (95 %)" for name in over), "head-room", "rank"]
    return markdown([*heads, "acc.", "tokens", "drafted", "discarded", "wasted"], lines)


def tasks_table(tasks: Mapping[str, Mapping[str, Row]], over: str) -> str:
    """Rules down, tasks across: gains over one of them, whose own line is its speed-up over plain decoding."""
    lines = [[over, *(f"{speedup(rows[over]).estimate:.2f}" for rows in tasks.values())]]
    for name in next(iter(tasks.values())):
        if name not in (over, FORESIGHT):
            gains = [gain(rows[name], rows[over]) for rows in tasks.values()]
            lines.append([name, *(tables.bold(tables.plus_minus(each), each) for each in gains)])
    heads = [f"{task.replace('_', ' ')} ({len(rows[over]['emitted'])})" for task, rows in tasks.items()]
    return markdown(["rule", *heads], lines)


LONG = "static-7"  # tokens per pass at one fixed length compare drafters independently of cost
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
    sources = grouped(options) if options.groups else []
    for source in of_one_drafter(runs.read_sources(options)) if options.ratios else ():
        for kind, ratio in itertools.product(KINDS, options.ratios):
            step = source.costs._replace(drafter_step=ratio * source.costs.plain_pass, rules=())
            machine = flat(ratio, options.max_draft_length) if kind == "flat" else step
            group, tasks = f"{kind}, c = {ratio:g}", {ALL: source.tasks[ALL]}
            sources.append(source._replace(group=group, costs=machine, tasks=tasks))
    run = runs.open_traces("policies", options, console, sources=sources)
    played = variants_of((STATIC, *(options.rules or COMPARED)), options.settings)
    references = dict(REFERENCES) if options.groups else {ORACLE: REFERENCES[ORACLE]}
    if options.groups and "survival" in played:
        priors = {LEFT_OUT: partial(left_out, sources), SAME_PAIR: partial(same_pair, options.seed)}
        played |= {name: Variant(replayed) for name, replayed in priors.items()}
    rows = runs.sweep(run, {LONG: variant(rule(LONG))} | played | references)
    sections: dict[str, list[Source]] = {}
    for source in sorted(sources, key=lambda source: (source.temperature, source.costs.ratio)):
        kind = KINDS.get(source.group.partition(", c = ")[0])
        title = tables.at_temperature(source.temperature) + (f", {kind}" if kind else "")
        sections.setdefault(title[0].upper() + title[1:], []).append(source)
    blocks, lines = [runs.about_traces(run)], {}
    timed = [((source.trace.about.get("target"), source.temperature), source.costs) for source in sources]
    if options.groups and (doubt := passes_disagree(timed)):
        blocks.append(f"**Doubtful costs: {doubt}.**")
    for title, mine in sections.items():
        here = [runs.by_name(rows, source) for source in mine]
        blocks += [f"## {title}", machines_table(mine, here, list(played))]
        ratios = [source.costs.ratio for source in mine]
        lines[title] = {name: (ratios, [speedup(of[name])[0] for of in here]) for name in (*played, ORACLE)}
    if options.groups:
        cells = [(source, runs.by_name(rows, source)) for source in sources]
        blocks += ["## All pairs", NOTE_PAIRS, pairs_table(cells, list(played))]
    axes = "c, a drafter step over a target pass", "speed-up over plain decoding"
    styles = {ORACLE: {"color": plots.INK, "ls": "--", "marker": "."}}
    columns = len({source.temperature for source in sources})
    figure = plots.lines_figure(lines, axes, styles, columns=columns, ticks=TICKS, log=True)
    title = "Speed-ups by machine" if options.ratios else "Drafters"
    runs.write(run, title, blocks, NOTE_MACHINES, speedups=figure)


def of_one_drafter(sources: list[Source]) -> list[Source]:
    """The sources. Raises ValueError for those of several drafters."""
    if len(drafters := dict.fromkeys(source.group for source in sources)) > 1:
        raise ValueError(f"this takes traces of one drafter, got those of {', '.join(drafters)}")
    return sources


def grouped(options: Policies) -> list[Source]:
    """The traces of every NAME:TRACES:COSTS."""
    options.check()
    groups: dict[str, list[Source]] = {}
    shared = options.machine()
    for text in options.groups:
        name, _, rest = text.partition(":")
        traces, _, costs = rest.rpartition(":")
        if not (name and traces and costs) or name in groups or name in KINDS:
            raise ValueError(f"a group is NAME:TRACES:COSTS, and names differ, got {text!r}")
        try:
            ratio = float(costs)
        except ValueError:
            model = load_cost_model(costs)
        else:
            if not 0 < ratio < 10:
                raise ValueError(f"c must lie above 0 and below 10, got {costs} in {text!r}")
            model = shared._replace(drafter_step=ratio * shared.plain_pass, sampled_pass=(), rules=())
        model.pass_times(options.max_draft_length)
        by_drafter = runs.load_traces([traces], options.max_draft_length, tokens=options.tokens)
        sources = [runs.source_of(of, t, trace, model) for of, each in by_drafter.items() for t, trace in each.items()]
        groups[name] = [source._replace(group=name) for source in of_one_drafter(sources)]
    return [source for sources in groups.values() for source in sources]


def overlap(trace: Trace) -> Interval:
    """The mean overlap of the distributions over the emitted positions; for greedy texts, of the tokens they name."""
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[:, None]
    values = np.where(trace.temperature[:, None] <= 0, trace.accepted, np.where(within, trace.overlap, 0.0))
    return ratio_of_totals(np.where(within, values, 0.0).sum(axis=1), trace.length)


def machines_table(sources: Sequence[Source], rows: Sequence[Mapping[str, Row]], names: Sequence[str]) -> str:
    """Machines or drafters down, rules across; the oracle takes no part in the contest."""
    lines = []
    for source, here in zip(sources, rows, strict=True):
        taken, fast = overlap(source.trace), {name: speedup(row).estimate for name, row in here.items()}
        texts = {name: f"{fast[name]:.2f} ({tables.acceptance(here[name]):.0%})" for name in names}
        best = max(names, key=lambda name: fast[name])
        emitted = f"{per_round(here[LONG], 'emitted'):.2f} ({expected_tokens(taken.estimate, 7):.2f})"
        figures = [f"{source.costs.ratio:.3f}", tables.plus_minus(taken, 3), emitted]
        limits = [f"{fast[name]:.2f}" for name in (FORESIGHT, ORACLE) if name in fast]
        lines.append([source.group, *figures, *(texts | {best: f"**{texts[best]}**"}).values(), *limits])
    heads = [*names, *(name for name in (FORESIGHT, ORACLE) if name in rows[0])]
    return markdown(["group", "c", "a", "tokens a pass", *(SHORT_NAMES.get(name, name) for name in heads)], lines)


LEFT_OUT = "survival, left out"  # its prior fitted on the other pairs
SAME_PAIR = "survival, prior of the pair"  # fitted on the other half of the prompts
HEAD_PAIRS = ("rule", "here: over static", "worst", "rank", "head-room", "elsewhere: over static", "worst", "rank")
NOTE_PAIRS = (
    "Over all pairs and temperatures, by geometric mean over the best static length, whose length is chosen on other "
    "prompts of the same pair. Worst: the largest loss against a cell's fastest rule. Head-room: the share of the way "
    "from that static length to foresight, both summed over cells. *Here*: settings chosen on other prompts of the "
    "pair. *Elsewhere*: every rule has the setting that was fastest on the other pairs at that temperature, which is "
    "all that is known of a new pair; losses and ranks are among rules set so. `survival` has no setting; left out, "
    "its prior is fitted on the other pairs alone; *prior of the pair*: on its other prompts at that temperature."
)
Cells = Sequence[tuple[Source, Mapping[str, Row]]]


def left_out(sources: Sequence[Source], source: Source, longest: int) -> Replay:
    """`survival` with a prior of the other pairs' traces, greedy or sampled as the judged one."""
    others = [other for other in sources if other.group != source.group and not other.trace.lengths_only]
    traces = [other.trace for other in others if (other.temperature > 0) == (source.temperature > 0)]
    prior = {("sampled" if source.temperature > 0 else "greedy"): list(fit_prior(*traces))} if traces else {}
    return runs.replay_rule(source.trace, Rule(LEFT_OUT, survival(**prior)), source.costs, longest)


def same_pair(seed: int, source: Source, longest: int) -> Replay:
    """`survival` with a prior of the same trace: each half of the prompts has that of the other half."""
    kind, first = "sampled" if source.temperature > 0 else "greedy", runs.half_of(source.trace.num_texts, seed)
    priors = [list(fit_prior(select(source.trace, np.flatnonzero(half)))) for half in (~first, first)]
    settings = [{kind: prior} for prior in priors]
    both = runs.replay_rule(source.trace, Rule(SAME_PAIR, survival()), source.costs, longest, settings)
    at = np.where(first, 0, 1), np.arange(len(first))
    return Replay(*(None if counts is None else counts[at][None] for counts in both))


def elsewhere(cells: Cells, source: Source, name: str) -> float | None:
    """A rule's speed-up at the setting that was fastest on the other pairs; None where there are none."""
    here = [(other, rows) for other, rows in cells if other.temperature == source.temperature and name in rows]
    others = [np.log(rows[name]["curve"]) for other, rows in here if other.group != source.group]
    curve = next(rows for other, rows in here if other is source)[name]["curve"]
    return float(curve[int(np.argmax(np.sum(others, axis=0)))]) if others else None


def pairs_table(cells: Cells, names: Sequence[str]) -> str:
    """One row per rule; rules that some trace cannot replay are left out."""
    names = [name for name in names if all(name in rows for _, rows in cells)]
    here = {name: [speedup(rows[name]).estimate for _, rows in cells] for name in names}
    moved = {name: [elsewhere(cells, source, name) for source, _ in cells] for name in names}
    moved = {name: values for name, values in moved.items() if None not in values}
    static = np.array(here[STATIC])
    limit = np.array([speedup(rows.get(FORESIGHT, rows[ORACLE])).estimate for _, rows in cells])
    lines = []
    for name in sorted(names, key=lambda name: -np.mean(np.log(here[name]))):
        share = f"{(np.array(here[name]) - static).sum() / (limit - static).sum():.0%}"
        there = summary(moved, name, static) if name in moved else [NONE] * 3
        lines.append([name, *summary(here, name, static), share, *there])
    return markdown(HEAD_PAIRS, lines)


def summary(speeds: Mapping[str, Sequence[float | None]], name: str, static: np.ndarray) -> list[str]:
    """(over static, the worst loss against a cell's fastest, mean rank) of a rule among others."""
    table = np.array([list(values) for values in speeds.values()], float)
    fast = np.array(speeds[name], float)
    ranks = (table > fast).sum(axis=0) + 1
    worst = (fast / table.max(axis=0)).min() - 1
    return [f"{np.exp(np.mean(np.log(fast / static))):.3f}", f"{100 * worst:+.1f} %", f"{ranks.mean():.1f}"]


main = with_studies(command(Policies, study, __doc__), headroom=headroom.main)

if __name__ == "__main__":
    sys.exit(main())
