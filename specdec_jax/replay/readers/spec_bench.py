"""Answer files of Spec-Bench (arXiv 2401.07851): `accept_lengths`, the emitted tokens of every round.

They do not contain draft lengths: these are assumed constant, as given or the largest accepted length.
"""

from pathlib import Path

from specdec_jax.replay.acceptance_log import StepLog, Steps, log_of_steps
from specdec_jax.text.json_lines import json_lines


def load_spec_bench(path: str | Path, draft_length: int | None = None) -> StepLog:
    """The answers of a file, one request per choice; categories are tasks.

    Args:
        draft_length: number of tokens that every round drafted.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is not an answer, or a round longer than the draft length allows.
    """
    answers = []
    for number, entry in json_lines(path):
        try:
            for index, choice in enumerate(entry["choices"]):
                emitted = [int(tokens) for tokens in choice["accept_lengths"]]
                name = f"{entry['question_id']}" + (f"-{index}" if index else "")
                answers.append((name, str(entry.get("category", "all")), emitted))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: no answer of Spec-Bench ({type(error).__name__}: {error})") from None
    longest = max((max(emitted, default=1) for *_, emitted in answers), default=1) - 1
    length = longest if draft_length is None else draft_length
    if length < longest or any(min(emitted, default=1) < 1 for *_, emitted in answers):
        raise ValueError(f"{path}: rounds of 1 to {length + 1} tokens are possible, got one of {longest + 1} or of 0")
    requests = [
        Steps([length] * len(emitted), [tokens - 1 for tokens in emitted], None, name, task)
        for name, task, emitted in answers
    ]
    notes = [] if draft_length is not None else [f"drafts are taken to have {length} tokens, the longest accepted"]
    return log_of_steps(requests, {"drafter": "drafter", "source": str(path), "notes": notes})
