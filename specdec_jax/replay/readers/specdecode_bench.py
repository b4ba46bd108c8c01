"""SpecDecode-Bench (arXiv 2601.11580): for every position of an answer, how many tokens a round from there would emit.

Published for Llama-3.1-8B-Instruct with an EAGLE drafter and with n-gram lookup (`combined_<task>.jsonl` of its
simulator). No position is open: static lengths, heuristics, bandits and the oracle are replayed exactly.
"""

from pathlib import Path

import numpy as np

from specdec_jax.replay.acceptance_log import trace_of_runs
from specdec_jax.replay.trace import Trace
from specdec_jax.text.json_lines import json_lines

LOGS = "combined_*.jsonl"
DRAFTERS = {"acc_eagle": "eagle", "acc_ngram": "n-gram lookup"}


def load_specdecode_bench(path: str | Path, drafter: str = "acc_eagle") -> Trace:
    """A `combined_<task>.jsonl` of the SpecDecode-Bench simulator, or a folder of them as one trace; greedy.

    Args:
        drafter: `acc_eagle` or `acc_ngram`, as named in the log.

    Raises:
        FileNotFoundError: no such file, or none in the folder.
        ValueError: a line that is not such a record; the message names it.
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
