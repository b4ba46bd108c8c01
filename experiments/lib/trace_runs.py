"""A study over traces: it declares what it compares, and its tables and pictures are made of rows.

A row is one group (a drafter, or a machine), temperature, task and thing compared ("what"). It keeps every text's
counts and seconds, so that intervals and paired comparisons are made of rows alone and a finished folder is only
reported again. Rules are replayed over all texts of a trace; a task is a part of that replay, with a setting chosen on
the other half of its texts.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from tyro.conf import Positional

from experiments.lib.commands import Output, Smoke
from experiments.lib.rules import Rule
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import made_up_traces
from experiments.lib.tables import Row, at_temperature, publish
from specdec_jax.contrib.engine_logs.readers import LOGS, read_exact
from specdec_jax.costs.choices import weighs_costs, widths_for
from specdec_jax.costs.cost_model import CostModel, cost_model, load_cost_model
from specdec_jax.metrics.foresight import with_foresight
from specdec_jax.metrics.repetition import repeated_share
from specdec_jax.ranges import Between, check_fields
from specdec_jax.replay.phase_path import percentile_thresholds, phase_path
from specdec_jax.replay.replay import Replay, oracle, replay
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.types import StoppingPolicy

COSTS = Path(__file__).resolve().parents[2] / "configs" / "costs" / "cpu.json"
ALL = "all"
KEYS = ("group", "temperature", "task", "what")
COUNTS = ("rounds", "drafted", "accepted", "passes")
COLUMNS = ("emitted", *COUNTS, "seconds", "first_seconds", "plain_seconds", "repeated")  # one number a text each
Traces = Mapping[str, Mapping[float, Trace]]  # by drafter and temperature
Settings = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TraceFiles(Output, Smoke):
    """Options of a command that reads traces."""

    traces: Positional[tuple[str, ...]] = ()
    """Traces, or folders of them, that experiments.record wrote, or SpecDecode-Bench's logs; several drafters
    are compared side by side."""
    seed: int = 0  # Seed of the halves of the prompts.
    tokens: Annotated[int | None, Between(1)] = None
    """Only the first tokens of every text, as a request for that many would decode."""
    max_draft_length: Annotated[int, Between(1)] = 16  # Longest draft.

    def check(self) -> None:
        """Raises ValueError where options are invalid."""
        if not (self.traces or self.smoke):
            raise ValueError("name traces that python -m experiments.record wrote, or give --smoke")
        check_fields(self)


@dataclass(frozen=True)
class TraceOptions(TraceFiles):
    """Options of a command that replays rules and counts their time."""

    costs: str | None = None  # cost_model.json of experiments.step_cost; none: two x86 cores.
    ratio: float | None = None  # Instead of --costs: c, a drafter step over a target pass.
    slope: float = 0.0  # With --ratio: what one more verified token costs, in target passes.

    def check(self) -> None:
        """Raises ValueError where options are invalid."""
        super().check()
        if self.ratio is None and self.slope or self.slope < 0:
            raise ValueError(f"slope must be 0 or more and goes with --ratio, got {self.slope} and {self.ratio}")

    def machine(self) -> CostModel:
        """The costs of the options. Raises ValueError where they end before the longest draft."""
        if self.ratio is not None and self.costs is not None:
            raise ValueError("give --costs or --ratio, not both")
        if self.ratio is None:
            costs = costs_or_default(self.costs)
        else:
            widths = range(1, self.max_draft_length + 2)
            costs = cost_model(self.ratio, {width: 1.0 + self.slope * (width - 1) for width in widths})
        costs.pass_times(self.max_draft_length)
        return costs


def costs_or_default(path: str | Path | None) -> CostModel:
    """The cost model at `path`, or of that name in configs/costs (tpu-v5e: its compiler's estimate); of None the
    measurements on two x86 cores (docs/performance.md)."""
    if path is None:
        costs = load_cost_model(COSTS)
        return costs._replace(device=f"the default costs ({costs.device})")
    named = COSTS.parent / f"{path}.json"
    return load_cost_model(named if named.is_file() else path)


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

    options: Any  # TraceOptions, or TraceFiles if `sources` were given
    folder: RunFolder
    sources: list[Source]
    console: Console


class Variant(NamedTuple):
    """A compared policy. Of several settings, each half of the prompts uses the one fastest on the other half."""

    replay: Callable[[Source, int], Any]  # (source, longest draft) -> a Replay: one row per setting, all texts
    settings: Settings = ({},)
    policy: StoppingPolicy | None = None  # whose own computation is counted, where the costs have it


ORACLE, FORESIGHT = "oracle", "foresight"
REFERENCES = {
    FORESIGHT: Variant(lambda source, longest: with_foresight(source.trace, source.costs, longest)),
    ORACLE: Variant(lambda source, longest: oracle(source.trace, longest)),
}


def variant(rule: Rule, settings: Settings | None = None, max_draft_length: int | None = None) -> Variant:
    """A rule at these settings (its grid's unless given), drafting up to the run's limit unless another is given."""
    tried, replays = rule.settings() if settings is None else settings, {}

    def replayed(source: Source, longest: int) -> Replay:
        key = (id(source.trace), source.group) if weighs_costs(rule.policy) else id(source.trace)
        if key not in replays:  # a rule that does not weigh costs drafts alike on all machines
            replays[key] = replay_rule(source.trace, rule, source.costs, max_draft_length or longest, tried)
        return replays[key]

    return Variant(replayed, tried, rule.policy)


def replay_rule(
    trace: Trace,
    rule: Rule,
    costs: CostModel,
    longest: int,
    settings: Settings | None = None,
    phases: Any = None,
    record: bool = False,
) -> Replay:
    """A rule's settings (its default one unless given) over a trace, with the machine's costs. One that reads phases
    gets them at the hyperparameters `phases`, or at percentiles of the texts' running entropy."""
    chosen, policy = [rule.settings()[0]] if settings is None else list(settings), rule.policy
    path = phase_path(trace, **(phases or percentile_thresholds(trace))) if policy.needs_phases else None
    widest = None if policy.drafts_chains else costs.widths[-1]
    hyperparameters = rule.hyperparameters(chosen, costs, longest)
    return replay(trace, policy, hyperparameters, max_draft_length=longest, phases=path, widest=widest, record=record)


def open_traces(name: str, options: TraceFiles, console: Console, sources: Sequence[Source] | None = None) -> Run:
    """Reads the traces, unless sources are given, and opens the folder. Raises FileNotFoundError, ValueError for
    invalid input, before anything is written: other traces or costs than the folder's rows were made of among it."""
    sources = list(read_sources(options) if sources is None else sources)
    config = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    config |= {"machines": {source.group: source.costs._asdict() for source in sources}}
    return Run(options, RunFolder.create(name, config, options.out), sources, console)


def write(run: Run, title: str, blocks: Sequence[str], note: str = "", **pictures: Figure) -> None:
    """Writes table.md (the title, the first block, the note, then the other blocks) and NAME.png, and prints it."""
    first, *rest = blocks
    parts = [f"# {title}", first, *([note] if note else []), *rest, ""]
    publish(run.folder, "\n\n".join(parts), run.console, **pictures)


def drafter_of(trace: Trace) -> str:
    """The drafter that a trace names."""
    return str(trace.about.get("drafter", "drafter"))


def read_sources(
    options: TraceOptions, made_up: Traces | None = None, group: Callable[[Trace], str] = drafter_of
) -> list[Source]:
    """The traces by group and temperature; `made_up` is what --smoke runs on. Raises as `load_traces` does."""
    options.check()
    costs = options.machine()
    if options.smoke:
        groups = made_up or {"made up": made_up_traces()}
    else:
        groups = load_traces(options.traces, options.max_draft_length, group, options.tokens)
    return [source_of(name, t, trace, costs) for name, traces in groups.items() for t, trace in traces.items()]


def load_traces(
    paths: Sequence[str | Path], least: int = 1, group: Callable[[Trace], str] = drafter_of, tokens: int | None = None
) -> dict[str, dict[float, Trace]]:
    """Traces by group and by temperature, ascending; a folder stands for all trace-*.npz in it, and of every text the
    first `tokens` count. Raises FileNotFoundError for a file or folder that is not there or holds none, and ValueError
    for two traces of one temperature, one of several temperatures, or tails shorter than `least`."""
    groups: dict[str, dict[float, Trace]] = {}
    for path in map(Path, paths):
        is_log = path.suffix == ".jsonl" or any(path.glob(LOGS))
        files = sorted(path.glob("trace-*.npz")) if path.is_dir() and not is_log else [path]
        if not files:
            raise FileNotFoundError(f"no trace-*.npz in {str(path)!r}; python -m experiments.record writes them")
        for file in files:
            trace = read_exact(file) if is_log else load_trace(file)
            traces = groups.setdefault(group(trace), {})
            temperatures = np.unique(np.round(trace.temperature.astype(np.float64), 6)).tolist()  # not 0.69999999
            if len(temperatures) > 1 or temperatures[0] in traces:
                there = f"got {temperatures} besides {sorted(traces)}"
                raise ValueError(f"{file}: one trace of {group(trace)} a temperature, {there}")
            if (longest := trace.max_draft_length) < least:
                raise ValueError(
                    f"{file} holds drafts of up to {longest} tokens, {least} are asked for: give --max-draft-length "
                    f"{longest}, or record longer ones (python -m experiments.record --max-draft-length {least})"
                )
            ends = {name: np.minimum(getattr(trace, name), tokens or 2**30) for name in ("length", "limit")}
            traces[temperatures[0]] = trace._replace(**ends)
    return {name: dict(sorted(traces.items())) for name, traces in groups.items()}


def source_of(group: str, temperature: float, trace: Trace, costs: CostModel) -> Source:
    """A trace with its tasks: all texts first, then by task, in order of appearance, where there are several."""
    names = np.array(trace.about.get("tasks") or [ALL] * trace.num_texts)
    by_task = {task: np.flatnonzero(names == task) for task in dict.fromkeys(names.tolist())}
    tasks = {ALL: np.arange(trace.num_texts)} | (by_task if len(by_task) > 1 else {})
    repeated = [repeated_share(trace.tokens[text, : trace.length[text]]) for text in range(trace.num_texts)]
    return Source(group, temperature, trace, costs.at(temperature=temperature), tasks, np.round(repeated, 4))


def sweep(run: Run, variants: Mapping[str, Variant], measure: Callable[..., Row] | None = None) -> list[Row]:
    """The rows of every source, variant and task, those that are missing by `measure`, of the arguments of `row_of`."""
    rows = {tuple(row[key] for key in KEYS): row for row in run.folder.rows()}
    order = []
    for source in run.sources:
        for name, compared in variants.items():
            keys = {task: (source.group, source.temperature, task, name) for task in source.tasks}
            order += keys.values()
            if all(key in rows for key in keys.values()):
                continue
            with run.console.status(f"{name}, {at_temperature(source.temperature)}"):
                result = compared.replay(source, run.options.max_draft_length)
                options = result, compared.settings, run.options.seed
                timed = source._replace(costs=source.costs.at(policy=compared.policy))
                made = {task: (measure or row_of)(timed, texts, *options) for task, texts in source.tasks.items()}
            for task, key in keys.items():
                if key not in rows:
                    rows[key] = dict(zip(KEYS, key, strict=True)) | made[task]
                    run.folder.append(rows[key])
    return [rows[key] for key in order]


def row_of(source: Source, texts: np.ndarray, result: Replay, settings: Settings, seed: int) -> Row:
    """A row of some texts: each half uses the setting with the least total time on the other half."""
    counts = {name: getattr(result, name)[:, texts] for name in COUNTS}
    columns: dict[str, np.ndarray] = {"seconds": result.seconds(source.costs)[:, texts], **counts}
    first = half_of(len(texts), seed)
    chosen, at = [], np.zeros(len(texts), int)
    for half in (first, ~first):
        best = int(np.argmin(columns["seconds"][:, half].sum(axis=1))) if half.any() else 0
        chosen.append(settings[best])
        at[~half] = best
    picked = {name: values[at, np.arange(len(texts))] for name, values in columns.items()}
    emitted, totals = source.trace.length[texts].astype(int), columns["seconds"].sum(axis=1)
    plain = emitted * source.costs.plain_pass
    row: Row = {"emitted": emitted.tolist(), **{name: picked[name].astype(int).tolist() for name in COUNTS}}
    row["seconds"] = picked["seconds"].tolist()
    row["first_seconds"] = columns["seconds"][0].tolist()  # at the first setting, the default
    row |= {"plain_seconds": plain.tolist(), "repeated": source.repeated[texts].tolist()}
    return row | {"settings": chosen[: len(settings)], "curve": (plain.sum() / totals).tolist()}  # of every setting


def half_of(texts: int, seed: int) -> np.ndarray:
    """[N] bool, which of the texts are one half."""
    return np.random.default_rng(seed).permutation(texts) < texts // 2


def by_name(rows: Iterable[Row], source: Source, task: str = ALL) -> dict[str, Row]:
    """The rows of a source and task by what they are of."""
    return {row["what"]: row for row in rows if (row["group"], row["temperature"], row["task"]) == (*source[:2], task)}


def about(run: Run) -> str:
    """Sentences on traces, machines, and the live runs whose rounds a greedy replay equals (replay/replay.py)."""
    named: dict[str, str] = {}
    for source in run.sources:
        costs, omitted = source.costs, source.costs.left_out(source.temperature)
        name = f"{costs.device or 'flat costs'}, c = {costs.ratio:.3f}"
        name += f", {at_temperature(source.temperature)}" if costs.sampled_plain else ""
        named[name] = max(named.get(name, ""), omitted, key=len)
    times = [f"{name} ({omitted})" for name, omitted in sorted(named.items())]
    sources = list({id(source.trace): source for source in reversed(run.sources)}.values())[::-1]
    traces = [source.trace for source in sources]
    texts = " or ".join(map(str, sorted({trace.num_texts for trace in traces})))
    targets = ", ".join(dict.fromkeys(str(trace.about.get("target", "a target")) for trace in traces))
    names = ", ".join(dict.fromkeys(str(source.trace.about.get("drafter", source.group)) for source in sources))
    made_up = " **The numbers mean nothing.**" if run.options.smoke else ""
    pair = "Synthetic traces" if made_up else f"Traces of {targets} with {names}"
    text = f"{pair}: {texts} texts a trace, {sum(trace.num_positions for trace in traces)} tokens in all.{made_up}"
    text += f" Replayed; time: {'; '.join(times)}."
    greedy, longest = [source for source in run.sources if source.temperature == 0], run.options.max_draft_length
    if not greedy:
        return text
    batches = sorted({source.trace.about["batch"] for source in greedy if "batch" in source.trace.about})
    rows = f" ({' or '.join(map(str, batches))} rows)" if batches else ""
    widths = {source.costs.widths[: np.searchsorted(source.costs.widths, longest + 1) + 1] for source in greedy}
    merged = {widths_for(source.costs, longest) for source in greedy}
    listed = lambda sets: " or ".join(" ".join(map(str, each)) for each in sorted(sets))  # noqa: E731
    other = f", where decoding itself would choose {listed(merged)}" if merged != widths else ""
    exact = f"of rules that weigh costs, with these costs and --verification-widths {listed(widths)}{other}"
    live = f"Greedy rounds equal those of live decoding in the batches of the recording{rows}"
    return f"{text} {live}, with --max-draft-length {longest}; {exact}."


def sections(run: Run) -> list[tuple[Source, str]]:
    """Every source with its heading."""
    several = len({source.group for source in run.sources}) > 1
    names = [(f"{source.group}, " if several else "") + at_temperature(source.temperature) for source in run.sources]
    return [(source, name[0].upper() + name[1:]) for source, name in zip(run.sources, names, strict=True)]
