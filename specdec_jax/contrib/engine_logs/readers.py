"""Readers of logs and traces, selected by contents: which positions they determine, and which policies they replay.

| log | positions | static lengths | policies by lengths | policies that read distributions |
| --- | --- | --- | --- | --- |
| a trace (docs/traces.md) | all, with distributions | exact | exact | exact |
| SpecDecode-Bench | all | exact | exact | refused |
| steps: vLLM, AIPerf, Parquet, Spec-Bench, DFlash | all but bonus tokens | bounds | both answers | refused |
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.contrib.engine_logs.rounds import ACCEPTED, REJECTED, StepLog, Steps, log_of_steps, trace_of_runs
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.text.json_lines import json_lines

LOGS = "combined_*.jsonl"  # of SpecDecode-Bench
DRAFTERS = {"acc_eagle": "eagle", "acc_ngram": "n-gram lookup"}
STEPS, HISTOGRAM = "per_step_accepted", "acceptance_histogram"
READS = "of a drafter that reads its target (EAGLE, MTP), other lengths than the log's are approximate"


class Log(NamedTuple):
    """A log as traces: with open positions all rejected, drawn at random, and all accepted; equal if none is open."""

    low: Trace
    likely: Trace
    high: Trace
    num_open: int
    kind: str
    notes: tuple[str, ...] = ()
    longest_draft: int | None = None  # of the log's rounds; None: they had no length, every position is determined

    @property
    def exact(self) -> bool:
        """Whether no position is open."""
        return self.num_open == 0


def read_log(path: str | Path, *, drafter: str | None = None, draft_length: int | None = None) -> Log:
    """Reads a trace (.npz), a Parquet table, or a JSONL log, whose format is detected by its first line.

    Args:
        drafter: SpecDecode-Bench's drafter, `acc_eagle` or `acc_ngram`.
        draft_length: the draft length of every round of a Spec-Bench answer file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: none of these formats, a damaged file (the message names file and line), or an option of another
            format.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no log or trace {str(path)!r}")
    kind = kind_of(path)
    if drafter is not None and kind != "SpecDecode-Bench" or draft_length is not None and kind != "Spec-Bench":
        name = f"drafter {drafter!r}" if drafter is not None else f"draft length {draft_length}"
        raise ValueError(f"{path} is a log of {kind}, for which no {name} can be given")
    if kind == "trace":
        return log_of_trace(load_trace(path))
    if kind == "SpecDecode-Bench":
        return log_of_trace(load_specdecode_bench(path, drafter or next(iter(DRAFTERS))), kind)
    if kind == "Spec-Bench":
        steps = load_spec_bench(path, draft_length)
    else:
        steps = load_parquet(path) if kind == "Parquet" else load_aiperf(path)
    answers = steps.filled(REJECTED), steps.filled(), steps.filled(ACCEPTED)
    return Log(*answers, steps.num_open, kind, (*steps.notes, READS), steps.longest_draft)


def read_exact(path: str | Path, *, drafter: str | None = None) -> Trace:
    """The trace of a log without open positions. Raises as `read_log`, and ValueError for other logs."""
    log = read_log(path, drafter=drafter)
    if not log.exact:
        raise ValueError(f"{path} leaves {log.num_open} positions open: python -m specdec_jax advise gives bounds")
    return log.likely


def kind_of(path: Path) -> str:
    """The format of a file or folder. Raises ValueError for a file without a line."""
    if path.is_dir():
        return "SpecDecode-Bench" if any(path.glob(LOGS)) else "Parquet"
    if path.suffix in (kinds := {".npz": "trace", ".parquet": "Parquet", ".json": "Spec-Bench"}):
        return kinds[path.suffix]
    first = next((entry for _, entry in json_lines(path)), None)
    if first is None:
        raise ValueError(f"{path} is empty")
    if isinstance(first, dict) and first.keys() & DRAFTERS.keys():
        return "SpecDecode-Bench"
    if isinstance(first, dict) and "question_id" in first and "choices" in first:
        return "Spec-Bench"
    return "steps"


def log_of_trace(trace: Trace, kind: str = "trace") -> Log:
    """A trace as a log without open positions."""
    return Log(trace, trace, trace, 0, kind)


def load_aiperf(path: str | Path) -> StepLog:
    """The requests of a JSONL file. The first token of an answer comes from prefill and belongs to no round.

    A record is any JSON object with `per_step_accepted` and `per_step_drafted`, at any depth, as vLLM
    (`--per-request-spec-decode-metrics detailed`) and AIPerf write them: a response's `metrics.speculative_decoding`, a
    choice's `speculative_decoding_stats`, a line of profile_export.jsonl. Records with a histogram only (`summary`)
    have no order of rounds; they are read if all drafts had the same length, `num_draft_tokens` being `num_spec_tokens`
    times the rounds. Raises as `read_log`.
    """
    return _log_of_records(((f"{path}:{number}", entry) for number, entry in json_lines(path)), str(path))


def _log_of_records(entries: Iterable[tuple[str, Any]], source: str) -> StepLog:
    """As `load_aiperf`, from JSON values with the location of each."""
    requests, notes = [], set()
    for where, entry in entries:
        for record in records_in(entry):
            try:
                requests.append(_steps_of(record, where))
            except (KeyError, TypeError, ValueError) as error:
                reason = f"it lacks {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"{where}: no record of steps: {reason}") from None
            notes |= set() if record.get(STEPS) is not None else {"rounds come as a histogram, in no order"}
    if not requests:
        raise ValueError(
            f"{source}: no request in it has {STEPS}; vLLM writes it with --per-request-spec-decode-metrics detailed"
        )
    return log_of_steps(requests, {"drafter": "drafter", "source": source}, sorted(notes))


def records_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects in a JSON value that have steps or a histogram of them."""
    if isinstance(value, Mapping) and any(value.get(name) is not None for name in (STEPS, HISTOGRAM)):
        yield value
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from records_in(part)


def _steps_of(record: Mapping[str, Any], where: str) -> Steps:
    """The rounds of a record. Raises KeyError, TypeError, ValueError."""
    if record.get(STEPS) is not None:
        accepted = [int(count) for count in record[STEPS]]
        drafted = [int(count) for count in record["per_step_drafted"]]
    else:
        histogram = record[HISTOGRAM]
        pairs = histogram.items() if isinstance(histogram, Mapping) else enumerate(histogram)
        accepted = [int(count) for count, rounds in pairs for _ in range(int(rounds))]
        longest = int(record["num_spec_tokens"])
        if int(record["num_draft_tokens"]) != longest * len(accepted):
            raise ValueError("draft lengths vary, and a histogram does not say which round had which")
        drafted = [longest] * len(accepted)
    for name, total in (("num_accepted_draft_tokens", sum(accepted)), ("num_draft_tokens", sum(drafted))):
        if record.get(name, total) != total:
            raise ValueError(f"{name} is {record[name]}, and the rounds add up to {total}")
    completion = record.get("completion_tokens")
    emitted = None if completion is None else max(int(completion) - 1, 0)
    steps = Steps(drafted, accepted, emitted, str(record.get("id", where)))
    steps.rounds()  # raises where the line is known
    return steps


def load_parquet(path: str | Path) -> StepLog:
    """The requests of a table of `speculators` (one row per request), or of all tables in a folder; needs pyarrow.

    Columns may have JSON text or nested values. Raises as `read_log`, and ValueError without pyarrow.
    """
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'specdec-jax[parquet]'") from None
    files = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no Parquet file {str(path)!r}")
    entries = []
    for file in files:
        try:
            rows = parquet.read_table(file).to_pylist()
        except ArrowInvalid as error:
            raise ValueError(f"{file}: no Parquet table ({error})") from None
        entries += [(f"{file}:{number}", _opened(row)) for number, row in enumerate(rows, 1)]
    return _log_of_records(entries, str(path))


def _opened(value: Any) -> Any:
    """The value with JSON objects in text parsed."""
    if isinstance(value, dict):
        return {name: _opened(part) for name, part in value.items()}
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def load_spec_bench(path: str | Path, draft_length: int | None = None) -> StepLog:
    """The answers of a Spec-Bench file (arXiv 2401.07851), one request per choice; categories are tasks. Or those of a
    DFlash benchmark (arXiv 2602.06036; tpu-spec-decode), one .json with `per_sample`.

    `accept_lengths` are the emitted tokens of every round. Draft lengths are not stated: they are taken to be constant,
    as given or the largest accepted length. Raises as `read_log`, and ValueError for rounds of more tokens.
    """
    answers = []
    for number, entry in answers_of_dflash(Path(path)) if Path(path).suffix == ".json" else json_lines(path):
        try:
            for index, choice in enumerate(entry["choices"]):
                emitted = [int(tokens) for tokens in choice["accept_lengths"]]
                name = f"{entry['question_id']}" + (f"-{index}" if index else "")
                answers.append((number, name, str(entry.get("category", "all")), emitted))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: no answer of Spec-Bench ({type(error).__name__}: {error})") from None
    longest = max((max(emitted, default=1) for *_, emitted in answers), default=1) - 1
    length = longest if draft_length is None else draft_length
    for number, *_, emitted in answers:
        if bad := [tokens for tokens in emitted if not 1 <= tokens <= length + 1]:
            raise ValueError(f"{path}:{number}: rounds of 1 to {length + 1} tokens are possible, got one of {bad[0]}")
    requests = [
        Steps([length] * len(emitted), [tokens - 1 for tokens in emitted], None, name, task)
        for _, name, task, emitted in answers
    ]
    notes = [] if draft_length is not None else [f"drafts are taken to have {length} tokens, the longest accepted"]
    drafter = "block" if Path(path).suffix == ".json" else "drafter"
    return log_of_steps(requests, {"drafter": drafter, "source": str(path)}, notes)


def answers_of_dflash(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The answers of a DFlash report as those of Spec-Bench, numbered from 1. Raises ValueError for anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        task = report["config"]["dataset"]
        for number, sample in enumerate(report["per_sample"], 1):
            choices = [{"accept_lengths": sample["acceptance_lengths"]}]
            yield number, {"question_id": f"{task}-{number}", "category": task, "choices": choices}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no report of DFlash ({type(error).__name__}: {error})") from None


def load_specdecode_bench(path: str | Path, drafter: str = "acc_eagle") -> Trace:
    """A `combined_<task>.jsonl` of SpecDecode-Bench's simulator (arXiv 2601.11580), or a folder of them as one trace.

    Greedy answers of Llama-3.1-8B-Instruct with an EAGLE drafter and with n-gram lookup: for every position how many
    tokens a round from there would emit. None is open: static lengths, heuristics, bandits and the oracle are exact.
    Raises as `read_log`, and FileNotFoundError for a folder without logs.
    """
    if drafter not in DRAFTERS:
        raise ValueError(f"SpecDecode-Bench logs {' and '.join(DRAFTERS)}, got {drafter!r}")
    runs, ids, tasks, answers = [], [], [], []
    files = sorted(Path(path).glob(LOGS)) if Path(path).is_dir() else [Path(path)]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no acceptance log {str(path)!r}")
    for file in files:
        for number, record in json_lines(file):
            try:
                emitted = np.asarray(record[drafter]["acc_len"], np.int64)
                ids.append(str(record["id"]))
                answers.append([int(token) for token in record.get("generated_token_ids", ())])
            except (ValueError, TypeError, KeyError) as error:
                message = f"{file}:{number}: no record of SpecDecode-Bench ({type(error).__name__}: {error})"
                raise ValueError(message) from None
            if emitted.ndim != 1 or not emitted.size or emitted.min() < 1:
                raise ValueError(f"{file}:{number}: acc_len must be a list of lengths of 1 or more")
            runs.append((emitted - 1).tolist())
            tasks.append(file.stem.removeprefix("combined_"))
    about = {"target": "Llama-3.1-8B-Instruct", "drafter": DRAFTERS[drafter], "ids": ids, "tasks": tasks}
    return trace_of_runs(runs, about, answers)
