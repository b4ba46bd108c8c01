"""Readers of logs and traces, selected by contents: which positions they determine, and which policies they replay.

| log | positions | static lengths | policies by lengths | policies that read distributions |
| --- | --- | --- | --- | --- |
| a trace (docs/traces.md) | all, with distributions | exact | exact | exact |
| SpecDecode-Bench | all | exact | exact | refused |
| steps: vLLM, AIPerf, Parquet, Spec-Bench | all but bonus tokens | bounds | both answers | refused |
"""

from pathlib import Path
from typing import NamedTuple

from specdec_jax.replay.acceptance_log import ACCEPTED, REJECTED, StepLog
from specdec_jax.replay.readers.aiperf import load_aiperf
from specdec_jax.replay.readers.parquet import load_parquet
from specdec_jax.replay.readers.spec_bench import load_spec_bench
from specdec_jax.replay.readers.specdecode_bench import DRAFTERS, LOGS, load_specdecode_bench
from specdec_jax.replay.trace import Trace, load_trace
from specdec_jax.text.json_lines import json_lines

READS = "of a drafter that reads its target (EAGLE, MTP), other lengths than the log's are approximate"


class Log(NamedTuple):
    """A log as traces: with open positions all rejected, drawn at random, and all accepted; equal if none is open."""

    low: Trace
    likely: Trace
    high: Trace
    num_open: int
    kind: str
    notes: tuple[str, ...] = ()

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
        ValueError: none of these formats, a damaged file, or an option of another format.
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
        return log_of(load_spec_bench(path, draft_length), kind)
    return log_of(load_parquet(path) if kind == "Parquet" else load_aiperf(path), kind)


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
    if path.suffix in (".npz", ".parquet"):
        return "trace" if path.suffix == ".npz" else "Parquet"
    first = next((entry for _, entry in json_lines(path)), None)
    if first is None:
        raise ValueError(f"{path} is empty")
    if isinstance(first, dict) and first.keys() & DRAFTERS.keys():
        return "SpecDecode-Bench"
    if isinstance(first, dict) and "question_id" in first and "choices" in first:
        return "Spec-Bench"
    return "steps"


def log_of(steps: StepLog, kind: str = "steps") -> Log:
    """A log of steps, with its open positions filled in three ways."""
    listed = steps.about.get("notes")
    notes = (*(listed if isinstance(listed, list) else ()), READS)
    answers = steps.filled(REJECTED), steps.filled(), steps.filled(ACCEPTED)
    return Log(*answers, steps.num_open, kind, notes)


def log_of_trace(trace: Trace, kind: str = "trace") -> Log:
    """A trace as a log without open positions."""
    return Log(trace, trace, trace, 0, kind)
