"""A study over traces: it declares what it compares, and its tables and pictures are made of rows.

A row is one group (a drafter, or a machine), temperature, task and thing compared ("what"). It keeps every text's
counts and seconds, so that intervals and paired comparisons are made of rows alone and a finished folder is only
reported again. Rules are replayed over all texts of a trace; a task is a part of that replay, with a setting chosen on
its own other half.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from tyro.conf import Positional

from experiments.lib.cells import at_temperature
from experiments.lib.options import Output, Smoke
from experiments.lib.rules import Rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import made_up_traces
from experiments.lib.terminal import publish
from experiments.lib.traced import (
    MOST_REPEATED,
    chosen_on_other_half,
    costs_or_default,
    faster,
    flat_costs,
    load_by_drafter,
    repeated_shares,
    replay_rule,
    texts_by_task,
)
from specdec_jax.costs.choices import weighs_costs
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.intervals import Interval
from specdec_jax.replay.replay import Replay, oracle
from specdec_jax.replay.trace import Trace
from specdec_jax.replay.true_acceptance import survival_true_acceptance

ALL = "all"
KEYS = ("group", "temperature", "task", "what")
COUNTS = ("rounds", "drafted", "accepted", "passes")
COLUMNS = ("emitted", *COUNTS, "seconds", "first_seconds", "plain_seconds", "repeated")  # one number a text each
Row = dict[str, Any]
Traces = Mapping[str, Mapping[float, Trace]]  # by drafter and temperature


@dataclass(frozen=True)
class TraceFiles(Output, Smoke):
    """Options of a command that reads traces."""

    traces: Positional[tuple[str, ...]] = ()
    """Traces, or folders of them, that experiments.record wrote; those of several drafters are told apart."""
    seed: int = 0
    """Of the halves of the prompts."""

    @property
    def longest(self) -> int:
        """The longest draft that a trace must be able to follow."""
        return 1

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        if not (self.traces or self.smoke):
            raise ValueError("name traces that python -m experiments.record wrote, or give --smoke")

    def machine(self) -> CostModel:
        """Whose time is counted, if it is."""
        return costs_or_default(None)


@dataclass(frozen=True)
class TraceOptions(TraceFiles):
    """Options of a command that replays rules and counts their time."""

    costs: str | None = None
    """cost_model.json of experiments.step_cost; none: two x86 cores."""
    ratio: float | None = None
    """Instead of --costs: c, a drafter step over a target pass."""
    slope: float = 0.0
    """With --ratio: what one more verified token costs, in target passes."""
    max_draft_length: int = 16
    """Most drafts a round."""

    @property
    def longest(self) -> int:
        """The longest draft."""
        return self.max_draft_length

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        super().check()
        self.check_numbers()

    def check_numbers(self) -> None:
        """The same of those that do not say where traces come from."""
        if self.max_draft_length < 1:
            raise ValueError(f"max_draft_length must be 1 or more, got {self.max_draft_length}")
        if self.ratio is None and self.slope or self.slope < 0:
            raise ValueError(f"slope must be 0 or more and goes with --ratio, got {self.slope} and {self.ratio}")

    def machine(self) -> CostModel:
        """The costs asked for. Raises ValueError where they end before the longest draft."""
        if self.ratio is not None and self.costs is not None:
            raise ValueError("give --costs or --ratio, not both")
        longest = self.max_draft_length
        costs = costs_or_default(self.costs) if self.ratio is None else flat_costs(self.ratio, self.slope, longest)
        costs.pass_times(longest)
        return costs


class Source(NamedTuple):
    """A trace on a machine, among the others of a run."""

    group: str
    temperature: float
    trace: Trace
    costs: CostModel
    tasks: dict[str, np.ndarray]  # indices of texts; ALL first
    repeated: np.ndarray  # [N], of every text the share of its tokens that repeat earlier ones


class Run(NamedTuple):
    """A run folder with what its rows are made of."""

    options: Any  # TraceFiles or what extends it
    folder: RunFolder
    sources: list[Source]
    console: Console


class Variant(NamedTuple):
    """What is compared. Of several settings the one is judged that is fastest on the other half of the prompts."""

    replay: Callable[[Source, int], Replay]  # of a source and the longest draft: a setting a row, over all texts
    settings: Sequence[Mapping[str, Any]] = ({},)


ORACLE, TRUE_ACCEPTANCE = "oracle", "survival, true acceptance"
REFERENCES = {
    TRUE_ACCEPTANCE: Variant(lambda source, longest: survival_true_acceptance(source.trace, source.costs, longest)),
    ORACLE: Variant(lambda source, longest: oracle(source.trace, longest)),
}


def variant(
    rule: Rule, settings: Sequence[Mapping[str, Any]] | None = None, max_draft_length: int | None = None
) -> Variant:
    """A rule at these settings (its grid's unless given), drafting as far as the run does unless told otherwise."""
    tried, known = rule.settings() if settings is None else settings, {}

    def replayed(source: Source, longest: int) -> Replay:
        key = (id(source.trace), source.group) if weighs_costs(rule.policy) else id(source.trace)
        if key not in known:  # other machines are arithmetic for a rule that is not told the costs
            known[key] = replay_rule(source.trace, rule, source.costs, max_draft_length or longest, tried)
        return known[key]

    return Variant(replayed, tried)


def open_traces(
    name: str,
    options: TraceFiles,
    console: Console,
    *,
    made_up: Traces | None = None,
    sources: Sequence[Source] | None = None,
) -> Run:
    """Reads the traces and opens the folder; other traces or costs than its rows were made of are refused.

    Args:
        made_up: what --smoke runs on; one drafter unless given.
        sources: instead of the traces of the options.

    Raises:
        FileNotFoundError, ValueError: bad input, before anything is written.
    """
    found = list(read_sources(options, made_up) if sources is None else sources)
    config = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    config |= {"machines": {source.group: source.costs._asdict() for source in found}}
    return Run(options, RunFolder.create(name, config, options.out), found, console)


def write(run: Run, title: str, blocks: Sequence[str], note: str = "", **pictures: Figure) -> None:
    """Writes table.md (the title, the first block, the note, then the other blocks) and NAME.png, and prints it."""
    first, *rest = blocks
    parts = [f"# {title}", first, *([note] if note else []), *rest, ""]
    publish(run.folder, "\n\n".join(parts), run.console, **pictures)


def read_sources(options: TraceFiles, made_up: Traces | None = None) -> list[Source]:
    """The traces by drafter and temperature. Raises as `load_by_drafter`, and for bad options."""
    options.check()
    costs = options.machine()
    if options.smoke:
        groups = made_up or {"made up": made_up_traces()}
    else:
        groups = load_by_drafter(options.traces, options.longest)
    return [source_of(drafter, t, trace, costs) for drafter, traces in groups.items() for t, trace in traces.items()]


def source_of(group: str, temperature: float, trace: Trace, costs: CostModel) -> Source:
    """A trace with its tasks, all texts first and then by task where there are several."""
    found = texts_by_task(trace)
    tasks = {ALL: np.arange(trace.num_texts)} | (found if len(found) > 1 else {})
    return Source(group, temperature, trace, costs, tasks, np.round(repeated_shares(trace), 4))


def sweep(run: Run, variants: Mapping[str, Variant]) -> list[Row]:
    """The rows of all variants; what the folder has is not replayed again."""
    return fill(run, tuple(variants), lambda source, what: rows_of(run, source, variants[what]))


def fill(run: Run, whats: Sequence[str], measure: Callable[[Source, str], Mapping[str, Row]]) -> list[Row]:
    """The rows of every source, what and task; `measure` gives a row a task, and is asked only where one is missing."""
    known = {key_of(row): row for row in run.folder.rows()}
    order = []
    for source in run.sources:
        for what in whats:
            keys = {task: (source.group, source.temperature, task, what) for task in source.tasks}
            order += keys.values()
            if all(key in known for key in keys.values()):
                continue
            with run.console.status(f"{what}, {at_temperature(source.temperature)}"):
                found = measure(source, what)
            for task, key in keys.items():
                if key not in known:
                    known[key] = dict(zip(KEYS, key, strict=True)) | dict(found[task])
                    run.folder.append(known[key])
    return [known[key] for key in order]


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells a row from the others."""
    return tuple(row[key] for key in KEYS)


def rows_of(run: Run, source: Source, compared: Variant) -> dict[str, Row]:
    """A variant's row of every task."""
    found, settings = compared.replay(source, run.options.longest), compared.settings
    return {
        task: _row(source, texts, _of_texts(found, texts), settings, run.options.seed)
        for task, texts in source.tasks.items()
    }


def _of_texts(found: Replay, texts: np.ndarray) -> Replay:
    """The part of a replay that belongs to some texts."""
    parts: dict[str, Any] = {"record": None}
    parts |= {name: value[:, texts] for name, value in found._asdict().items() if value is not None}
    return Replay(**parts)


def _row(
    source: Source, texts: np.ndarray, found: Replay, settings: Sequence[Mapping[str, Any]], seed: int
) -> dict[str, Any]:
    emitted = source.trace.length[texts].astype(int)
    judged = chosen_on_other_half(found, source.costs, settings, seed)
    return {
        "emitted": emitted.tolist(),
        **{name: np.asarray(getattr(judged, name)).astype(int).tolist() for name in COUNTS},
        "seconds": judged.seconds.tolist(),
        "first_seconds": found.seconds(source.costs)[0].tolist(),  # at the first setting, the published one
        "plain_seconds": (emitted * source.costs.plain_pass).tolist(),
        "repeated": source.repeated[texts].tolist(),
        "settings": list(judged.settings[: len(settings)]),
        "curve": found.total_speedup(source.costs).tolist(),  # of every setting
    }


def of_source(rows: Iterable[Row], source: Source, task: str | None = None) -> list[Row]:
    """The rows of a source, of one task if that is given."""
    return [row for row in rows if (row["group"], row["temperature"]) == source[:2] and task in (None, row["task"])]


def find(rows: Iterable[Row], **wanted: Any) -> Row:
    """The only row with these fields."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def pooled(rows: Iterable[Row]) -> Row:
    """Rows of several tasks as one of all their texts, each task at its own setting."""
    rows = list(rows)
    return {name: [value for row in rows for value in row[name]] for name in COLUMNS}


def each_its_own(source: Source, rows: Sequence[Row], what: str) -> Row:
    """All texts of a source, every task at the setting chosen within it; `rows` are the source's."""
    tasks = [task for task in source.tasks if task != ALL] or [ALL]
    texts = np.concatenate([source.tasks[task] for task in tasks])
    return part(pooled(find(rows, what=what, task=task) for task in tasks), np.argsort(texts))  # as the trace has them


def part(row: Row, chosen: np.ndarray) -> Row:
    """Some of a row's texts, by index or mask."""
    return {name: np.asarray(row[name])[chosen].tolist() for name in COLUMNS}


def without_repeats(row: Row) -> Row | None:
    """The texts with little repeated in them; None if there are none."""
    clean = np.array(row["repeated"]) <= MOST_REPEATED
    return part(row, clean) if clean.any() else None


def speedup(row: Row) -> Interval:
    """Over plain decoding, total over total."""
    return faster(np.array(row["seconds"]), np.array(row["plain_seconds"]))


def gain(row: Row, other: Row) -> Interval:
    """How many times faster than another row of the same texts, with a paired interval."""
    return faster(np.array(row["seconds"]), np.array(other["seconds"]))


def total(row: Row, name: str) -> float:
    """A count over all texts."""
    return float(np.sum(row[name]))


def per_round(row: Row, name: str) -> float:
    """A count by target pass."""
    return total(row, name) / total(row, "rounds")


def acceptance(row: Row) -> float:
    """Accepted over drafted tokens."""
    return total(row, "accepted") / max(total(row, "drafted"), 1)


def wasted(row: Row) -> float:
    """The share of the drafter passes that gave no accepted token."""
    return 1 - total(row, "accepted") / total(row, "passes") if total(row, "passes") else 0.0


def discarded(row: Row) -> float:
    """The share of the drafter passes whose distribution gave no token."""
    return 1 - total(row, "drafted") / total(row, "passes") if total(row, "passes") else 0.0
