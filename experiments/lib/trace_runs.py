"""What commands over traces have in common: their options, rows that are computed once, and figures of a row.

A row is one drafter, temperature, task and thing compared ("what"). It keeps every text's counts and seconds, so that
tables, intervals and paired comparisons are made of rows alone and a finished folder is only reported again. Rules are
replayed over all texts of a trace; a task is a part of that replay, with a setting chosen on its own other half.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from tyro.conf import Positional

from experiments.lib import studies
from experiments.lib.rules import Rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import made_up_traces
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
from specdec_jax.metrics.intervals import Interval, mean_interval, ratio_of_totals
from specdec_jax.replay.cost_model import CostModel
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import Trace

ALL = "all"
KEYS = ("drafter", "temperature", "task", "what")
COUNTS = ("rounds", "drafted", "accepted", "passes")  # of a row, a list of one number a text each
Row = dict[str, Any]
Traces = Mapping[str, Mapping[float, Trace]]  # by drafter and temperature


@dataclass(frozen=True)
class TraceFiles:
    """Options of a command that reads traces."""

    traces: Positional[tuple[str, ...]] = ()
    """Traces, or folders of them, that experiments.record wrote; those of several drafters are told apart."""
    smoke: bool = False
    """Made-up traces: whether it works, nothing more."""
    out: str | None = None
    """Run folder; none: runs/<name>-<time>."""

    @property
    def longest(self) -> int:
        """The longest draft that a trace must be able to follow."""
        return 1

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        if not (self.traces or self.smoke):
            raise ValueError("name traces, or give --smoke")

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
    seed: int = 0
    """Of the halves of the prompts."""

    @property
    def longest(self) -> int:
        """The longest draft."""
        return self.max_draft_length

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        super().check()
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
    """A trace among the others of a run."""

    drafter: str
    temperature: float
    trace: Trace
    tasks: dict[str, np.ndarray]  # indices of texts; ALL first
    repeated: np.ndarray  # [N], of every text the share of its tokens that repeat earlier ones


class Run(NamedTuple):
    """A run folder with what its rows are made of."""

    options: Any  # TraceFiles or what extends it
    folder: RunFolder
    sources: list[Source]
    costs: CostModel
    console: Console


def open_run(name: str, options: TraceFiles, console: Console, made_up: Traces | None = None) -> Run:
    """Reads the traces and opens the folder; other traces or costs than its rows were made of are refused.

    Args:
        made_up: what --smoke runs on; one drafter unless given.

    Raises:
        FileNotFoundError, ValueError: bad input, before anything is written.
    """
    sources = read_sources(options, made_up)
    costs = options.machine()
    config = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    config |= {"machine": costs._asdict()}
    return Run(options, RunFolder.create(name, config, options.out), sources, costs, console)


def read_sources(options: TraceFiles, made_up: Traces | None = None) -> list[Source]:
    """The traces by drafter and temperature. Raises as `load_by_drafter`, and for bad options."""
    options.check()
    if options.smoke:
        groups = made_up or {"made up": made_up_traces()}
    else:
        groups = load_by_drafter(options.traces, options.longest)
    return [
        Source(drafter, temperature, trace, tasks_of(trace), np.round(repeated_shares(trace), 4))
        for drafter, traces in groups.items()
        for temperature, trace in traces.items()
    ]


def tasks_of(trace: Trace) -> dict[str, np.ndarray]:
    """The texts of a trace, all of them first and then by task where there are several."""
    found = texts_by_task(trace)
    return {ALL: np.arange(trace.num_texts)} | (found if len(found) > 1 else {})


def fill(run: Run, whats: Sequence[str], measure: Callable[[Source, str], Mapping[str, Row]]) -> list[Row]:
    """The rows of every source, what and task; `measure` gives a row a task, and is asked only where one is missing."""
    known = {key_of(row): row for row in run.folder.rows()}
    order = []
    for source in run.sources:
        for what in whats:
            keys = {task: (source.drafter, source.temperature, task, what) for task in source.tasks}
            order += keys.values()
            if all(key in known for key in keys.values()):
                continue
            with run.console.status(f"{what}, {studies.at_temperature(source.temperature)}"):
                found = measure(source, what)
            for task, key in keys.items():
                if key not in known:
                    known[key] = dict(zip(KEYS, key, strict=True)) | dict(found[task])
                    run.folder.append(known[key])
    return [known[key] for key in order]


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells a row from the others."""
    return tuple(row[key] for key in KEYS)


def of_texts(found: Replay, texts: np.ndarray) -> Replay:
    """The part of a replay that belongs to some texts."""
    parts: dict[str, Any] = {"record": None}
    parts |= {name: value[:, texts] for name, value in found._asdict().items() if value is not None}
    return Replay(**parts)


def fixed(run: Run, source: Source, found: Replay, index: int = 0, **more: Any) -> dict[str, Row]:
    """Rows by task of one setting of a replay; `more` is added to each."""
    counts = {name: getattr(found, name)[index] for name in COUNTS} | {"seconds": found.seconds(run.costs)[index]}
    return {task: _row(run, source, texts, _of(counts, texts), more) for task, texts in source.tasks.items()}


def chosen(run: Run, source: Source, found: Replay, settings: Sequence[dict[str, Any]], **more: Any) -> dict[str, Row]:
    """Rows by task, every text at the setting that was fastest on the other half of its task."""
    rows = {}
    for task, texts in source.tasks.items():
        judged = chosen_on_other_half(of_texts(found, texts), run.costs, settings, run.options.seed)
        counts = {name: getattr(judged, name) for name in (*COUNTS, "seconds")}
        rows[task] = _row(run, source, texts, counts, more | {"settings": list(judged.settings)})
    return rows


def replayed(run: Run, source: Source, rule: Rule, settings: Sequence[Mapping[str, Any]] | None = None) -> Replay:
    """A rule's settings (its published one unless given) over all texts of a source."""
    return replay_rule(source.trace, rule, run.costs, run.options.max_draft_length, settings)


def _of(counts: Mapping[str, np.ndarray], texts: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[texts] for name, values in counts.items()}


def _row(run: Run, source: Source, texts: np.ndarray, counts: Mapping[str, np.ndarray], more: Mapping[str, Any]) -> Row:
    emitted = source.trace.length[texts].astype(int)
    columns = {name: np.asarray(counts[name]).astype(int).tolist() for name in COUNTS}
    seconds = {"seconds": counts["seconds"].tolist(), "plain_seconds": (emitted * run.costs.plain_pass).tolist()}
    repeated = source.repeated[texts].tolist()
    return {"emitted": emitted.tolist(), **columns, **seconds, "repeated": repeated, **more}


def speedup(row: Row) -> Interval:
    """Over plain decoding, total over total."""
    return faster(np.array(row["seconds"]), np.array(row["plain_seconds"]))


def mean_speedup(row: Row) -> Interval:
    """Over plain decoding, mean of the texts."""
    return mean_interval(np.array(row["plain_seconds"]) / np.array(row["seconds"]))


def clean_speedup(row: Row) -> Interval | None:
    """`speedup` over the texts with little repeated in them; None if there are none."""
    clean = np.array(row["repeated"]) <= MOST_REPEATED
    return faster(np.array(row["seconds"])[clean], np.array(row["plain_seconds"])[clean]) if clean.any() else None


def gain(row: Row, other: Row) -> Interval:
    """How many times faster than another row of the same texts, with a paired interval."""
    return faster(np.array(row["seconds"]), np.array(other["seconds"]))


def wasted(row: Row) -> Interval:
    """Drafter passes that gave no accepted token, by token emitted."""
    return ratio_of_totals(np.subtract(row["passes"], row["accepted"]), row["emitted"])


def total(row: Row, name: str) -> float:
    """A count over all texts."""
    return float(np.sum(row[name]))


def acceptance(row: Row) -> float:
    """Accepted over drafted tokens."""
    return total(row, "accepted") / max(total(row, "drafted"), 1)


def pooled(rows: Iterable[Row]) -> Row:
    """Rows of several tasks as one of all their texts, each task at its own setting."""
    rows = list(rows)
    names = ("emitted", *COUNTS, "seconds", "plain_seconds", "repeated")
    return {name: [value for row in rows for value in row[name]] for name in names}


def find(rows: Iterable[Row], **wanted: Any) -> Row:
    """The only row with these fields."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def finish(run: Run, text: str, figures: Mapping[str, Figure]) -> None:
    """Writes the pictures and the table, and prints the table."""
    for name, figure in figures.items():
        with run.folder.replacing(name) as path:
            figure.savefig(path)
    studies.publish(run.folder, text, run.console)
