"""All stopping rules side by side on recorded traces, by task and temperature; your own rule and settings among them.

Question:  Which rule makes decoding fastest, where, and how much of what could be gained does it gain? With --ratio:
           on a machine of another c, a drafter step over a target pass?
Command:   python -m experiments.policies TRACES... [--rules survival my_rule.py "at_least(minimum=2, policy=svip)"]
           [--set threshold=0.1:0.9:9] [--over static adaedl] [--costs cost_model.json | --ratio 0.1 --slope 0.01]
           python -m experiments.policies headroom LOGS... (what rules gain on public logs)
           python -m experiments.policies runs/evidence --results results --rules my_rule.py   (among the archive's)
Time:      two minutes on 2 cores for 240 texts at three temperatures, seconds for one rule; --smoke needs no trace
Expected:  docs/results.md has the tables. SmolLM2 with smollm2-drafter, 36 prompts of six kinds, greedy: adaedl 1.46,
           the best static length 1.60, survival 1.73, oracle 2.11
Output:    runs/policies-<time>/; results.jsonl has a line a trace, task and rule

Replays of traces (`python -m experiments.record`), exact up to what specdec_jax/replay/replay.py says; time is the cost
model's. A setting is chosen on the half of the prompts that it is not judged on. With --set every combination is a line
of its own, and with several values of two hyperparameters settings.png is a heat map. The oracle never drafts a token
that will be rejected. Foresight drafts the best length for distributions that are known before the draft, with unknown
coins: a reference for rules that read these distributions, no bound. Of SpecDecode-Bench's logs, which hold accepted
lengths alone, rules that read distributions are left out.

--results: the same texts with the same costs, settings from the grids of experiments/lib/rules.py; cells that
python -m experiments.record configs/evidence.py has not made are left out.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import plots, tables
from experiments.lib import trace_runs as runs
from experiments.lib.commands import command, with_studies
from experiments.lib.rules import COMPARED, RULES, SHORT_NAMES, STATIC, Rule, rule
from experiments.lib.tables import NONE, Row, gain, interval, markdown, per_round, speedup, total
from experiments.lib.trace_runs import ALL, FORESIGHT, ORACLE, REFERENCES, Run, Source, variant
from specdec_jax.contrib.engine_logs import costs_named
from specdec_jax.contrib.engine_logs.readers import DRAFTERS, kind_of, read_log
from specdec_jax.contrib.engine_logs.rounds import trace_of_runs
from specdec_jax.costs.cost_model import flat
from specdec_jax.stopping import goodput

MOST_REPEATED = 0.1  # texts with a larger share of repeated tokens are left out of a table of their own


@dataclass(frozen=True)
class Policies(runs.TraceOptions):
    """Compare stopping rules on traces."""

    rules: tuple[str, ...] = ()
    """Names of experiments/lib/rules.py, calls of files of specdec_jax/stopping, or paths to .py files; none: all."""
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """NAME=VALUE, NAME=VALUE,VALUE or NAME=LOW:HIGH:COUNT, for the rules that have such a hyperparameter."""
    over: tuple[str, ...] = (STATIC,)  # Rules that the others are compared with, prompt by prompt.
    tuning: Literal["task", "all"] = "task"  # Settings are chosen for each task, or one for all.
    results: Path | None = None  # The archive, in whose tables --rules are ranked; its traces' folder is the argument.

    def check(self) -> None:
        """Raises ValueError where options are invalid."""
        super().check()
        if self.results is not None and (len(self.traces) != 1 or not self.rules):
            raise ValueError("--results needs --rules and the folder of the archive's traces")
        for f in dataclasses.fields(self) if self.results is not None else ():
            if f.name not in ("traces", "rules", "results") and getattr(self, f.name) != f.default:
                raise ValueError(f"--results ranks as the archive did: it has no use for {f.name}")


def study(options: Policies, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    if options.results is not None:
        options.check()
        from experiments.lib.archive import read_archive, with_rules  # these need pandas
        from experiments.tables import speedups

        ranked = with_rules(read_archive(options.results), Path(options.traces[0]), options.rules, console)
        console.print(tables.Whole(speedups(ranked)))
        return
    over = variants_of(options.over or (STATIC,), ())
    every = [entry.name for entry in RULES]
    variants_of(options.rules or every, options.settings)  # bad names are refused before anything is read
    run = runs.open_traces("policies", options, console)
    if not options.rules and any(source.trace.candidate is None for source in run.sources):
        console.print("Traces that were recorded before siblings were: rules with siblings are left out.")
        every = [entry.name for entry in RULES if entry.policy.drafts_chains]
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


def variants_of(words: Sequence[str], settings: Sequence[str]) -> dict[str, runs.Variant]:
    """Rules by name with their grids to choose from; with --set, a variant for every label and setting. Raises
    ValueError for an unknown rule, a --set that cannot be read, or one that no rule takes."""
    pairs = [parse_values(entry) for entry in settings]
    parsed, taken, variants = dict(pairs), set(), {}
    if len(parsed) < len(pairs):
        raise ValueError(f"--set names a hyperparameter twice: {', '.join(name for name, _ in pairs)}")
    for name in dict.fromkeys(words):
        entry = rule(name)
        if entry.name in variants:
            raise ValueError(f"{name!r} is called {entry.name!r}, as another rule is: give it another name")
        grid = {key: values for key, values in parsed.items() if key in entry.policy.hyperparameters}
        taken |= grid.keys()
        for key, values in grid.items():
            entry.policy.init(len(values), **{key: np.array(values)})  # raises for values out of range
        for values in itertools.product(*grid.values()) if grid else ():
            chosen = dict(zip(grid, values, strict=True))
            label = " ".join([entry.name, *(f"{key}={value:g}" for key, value in chosen.items())])
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


def parse_values(text: str) -> tuple[str, list[Any]]:
    """'threshold=0.1:0.9:9' as a name and its values; whole numbers stay whole."""
    name, _, right = (part.strip() for part in text.partition("="))
    try:
        if ":" in right:
            low, high, count = right.split(":")
            values = np.linspace(float(low), float(high), int(count)).round(10).tolist()
        else:
            values = [int(part) if part.strip().isdecimal() else float(part) for part in right.split(",")]
    except ValueError:
        values = []
    if not name or not right or not values:
        raise ValueError(f"--set reads NAME=VALUE, NAME=VALUE,VALUE or NAME=LOW:HIGH:COUNT, got {text!r}")
    return name.replace("-", "_"), values


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


HEADROOM = """How much could rules gain on public logs and on our traces?

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
LENGTH_RULES = ("hf-heuristic", "accepted-length-ema", "goodput", "bandit")
LOOKUP, BLOCK = BY_WIDTH = ("n-gram lookup", "block")  # drafters whose cost is that of verification
UNTUNED = "goodput, default"


@dataclass(frozen=True)
class Headroom(runs.TraceFiles):
    """Head-room by log."""

    ratios: tuple[float, ...] = (0.05, 0.1, 0.2)  # c of model drafters, on a flat machine.
    slopes: tuple[float, ...] = (0.02, 0.05)  # Cost of a verified token in passes, for lookup drafters.
    max_draft_length: int = 15  # Longest draft.


def headroom_study(options: Headroom, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    options.check()
    sources = []  # every log on every machine; SpecDecode-Bench's once per drafter
    for path in map(Path, options.traces):
        drafters = list(DRAFTERS) if path.exists() and kind_of(path) == "SpecDecode-Bench" else [None]
        for drafter in drafters:
            trace = read_log(path, drafter=drafter).likely
            name, temperature = Path(runs.drafter_of(trace)).name, round(float(trace.temperature.max()), 6)
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
    points: dict[str, list[plots.Point]] = {}  # the best rule's, a panel a public drafter and one for traces
    rings: dict[str, list[float]] = {}  # the oracle's
    for source in sources:
        public, costs, decoding = source.trace.lengths_only, source.costs, tables.at_temperature(source.temperature)
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
    runs.write(run, "Head-room", [table], headroom=plots.dots_figure(points, label, rings))


headroom = command(Headroom, headroom_study, HEADROOM, "python -m experiments.policies headroom")
main = with_studies(command(Policies, study, __doc__), headroom=headroom)

if __name__ == "__main__":
    raise SystemExit(main())
