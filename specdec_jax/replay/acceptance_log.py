"""Logs of accepted lengths as traces: other engines' runs, for rules that decide by lengths alone.

SpecDecode-Bench (arXiv 2601.11580) published, for every answer of Llama-3.1-8B-Instruct, how many tokens a round that
begins at each position would emit with an EAGLE drafter and with n-gram lookup. That is all that static lengths,
heuristics, bandits and the oracle need. The distributions are not in such a log: a rule that reads them is refused.
"""

import json
from pathlib import Path

import numpy as np

from specdec_jax.decoding.state import laid
from specdec_jax.replay.trace import FEATURES, TRUNCATIONS, Trace

LOGS = "combined_*.jsonl"
DRAFTERS = {"acc_eagle": "eagle", "acc_ngram": "n-gram lookup"}


def trace_of_runs(runs: list[list[int]], about: dict[str, object], answers: list[list[int]] | None = None) -> Trace:
    """A trace without distributions, from the number of drafts accepted in a round that begins at each position.

    Args:
        runs: one list a text, an entry for every token of the answer.
        answers: their token ids, where they are known.

    Raises:
        ValueError: no texts, or an empty one.
    """
    if not runs or not all(runs):
        raise ValueError("accepted lengths need at least one text, and every text at least one position")
    length = np.array([len(text) for text in runs], np.int32)
    texts, positions = len(runs), int(length.max()) + 1
    run = np.zeros((texts, positions), np.int32)
    for row, text in zip(run, runs, strict=True):
        row[: len(text)] = np.minimum(text, np.arange(len(text), 0, -1))  # none is accepted beyond a text's end
    tokens = laid(
        [answer[: len(text)] for answer, text in zip(answers or [[]] * texts, runs, strict=True)], positions - 1
    )
    unknown = np.broadcast_to(np.float32(np.nan), (texts, positions))
    nothing = np.broadcast_to(np.float32(np.nan), (texts, positions, len(FEATURES)))
    return Trace(
        path=nothing,
        accepted=run > 0,
        tail_of=np.zeros((texts, positions), np.int32),
        tails=np.broadcast_to(np.float32(np.nan), (1, max(int(run.max()), 1), len(FEATURES))),
        length=length,
        limit=length,
        prompt_length=np.ones(texts, np.int32),
        seed=np.arange(texts, dtype=np.uint32),
        temperature=np.zeros(texts, np.float32),
        tokens=np.asarray(tokens),
        overlap=unknown,
        cross_entropy=unknown,
        target_entropy=unknown,
        raw_target_entropy=unknown,
        about=dict(about),
        run=run,
        truncation=np.tile(np.array(list(TRUNCATIONS.values()), np.float32), (texts, 1)),
        prompt_hash=np.zeros(texts, np.uint32),
    )


def load_specdecode_bench(path: str | Path, drafter: str = "acc_eagle") -> Trace:
    """A `combined_<task>.jsonl` of the SpecDecode-Bench simulator, or a folder of them as one trace; greedy.

    Args:
        drafter: `acc_eagle` or `acc_ngram`, the log's names.

    Raises:
        FileNotFoundError: no such file, or none in the folder.
        ValueError: a line that is no such record; the message names it.
    """
    runs, ids, tasks, answers = [], [], [], []
    files = sorted(Path(path).glob(LOGS)) if Path(path).is_dir() else [Path(path)]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no acceptance log {str(path)!r}")
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                emitted = np.asarray(record[drafter]["acc_len"], np.int64)
                ids.append(str(record["id"]))
                answers.append([int(token) for token in record.get("generated_token_ids", ())])
            except (ValueError, TypeError, KeyError) as error:
                message = f"{file}, line {number}: no record of SpecDecode-Bench ({type(error).__name__}: {error})"
                raise ValueError(message) from None
            if emitted.ndim != 1 or not emitted.size or emitted.min() < 1:
                raise ValueError(f"{file}, line {number}: acc_len must be a list of lengths of 1 or more")
            runs.append((emitted - 1).tolist())
            tasks.append(file.stem.removeprefix("combined_"))
    about = {"target": "Llama-3.1-8B-Instruct", "drafter": DRAFTERS[drafter], "ids": ids, "tasks": tasks}
    return trace_of_runs(runs, about, answers)
