"""Prompts: from files, Spec-Bench's among them, every n-th of them, or sets of the hub by name.

A file has JSON lines as Spec-Bench writes them, or any that hold `turns`, `prompt` or `text`.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lib import datasets_by_name
from experiments.lib.json_lines import json_lines

ID_KEYS = ("id", "question_id", "prompt_id")
TEXT_KEYS = ("turns", "prompt", "text")
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")  # categories
HALVES = ("calibrate", "judge")


class Prompt(NamedTuple):
    id: str  # unique in its file
    category: str
    turns: tuple[str, ...]  # what the user says, one message a turn; none is empty
    split: str | None = None  # "calibrate": hyperparameters may be chosen on it; "judge": results are reported on it


def load_prompts(source: str | Path, limit: int | None = None, split: str | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, of `hub:NAME`, or of `hub:NAME@FOLDER`, a local copy; of `SOURCE:n` every n-th.

    The names, and how their rows become prompts, are in `lib/datasets_by_name.py`. `split` comes first, then every
    n-th, then `limit`, so no limit moves a prompt from one half to the other. A source without splits is halved for
    "calibrate" and "judge" by `with_halves`.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: what `read_prompts` and `datasets_by_name.entries` refuse, an n below 1, a split that is not there.
    """
    _check_limit(limit)
    name, every = every_nth(str(source))
    if name.startswith(datasets_by_name.PREFIX):
        entries = datasets_by_name.entries(name)
        prompts = [_prompt(entry, f"{name}, row {row}", default_id=str(row)) for row, entry in enumerate(entries)]
    else:
        prompts = read_prompts(name)
    if split in HALVES and all(prompt.split is None for prompt in prompts):
        prompts = with_halves(prompts)
    return _of_split(prompts, split, name)[::every][:limit]


def every_nth(path: str) -> tuple[str, int]:
    """FILE:n as (FILE, n); a FILE alone means all of it. Raises ValueError for an n below 1."""
    name, colon, number = path.rpartition(":")
    if not colon or not number.isdigit():
        return path, 1
    if int(number) < 1:
        raise ValueError(f"every n-th prompt needs an n of 1 or more, got {path!r}")
    return name, int(number)


def with_halves(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The same prompts, those of each category put into "calibrate" and "judge" by turns, in the given order."""
    seen: Counter[str] = Counter()
    halved = []
    for prompt in prompts:
        halved.append(prompt._replace(split=HALVES[seen[prompt.category] % 2]))
        seen[prompt.category] += 1
    return halved


def read_prompts(path: str | Path, limit: int | None = None, split: str | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, in its order: those whose `split` is the given one, and the first `limit` of them.

    Empty lines are skipped. A line without an id gets its line number; one without a category gets "none".

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is not such an object, an id occurs twice, nothing is there, or nothing of that split; the
            message says file:line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file {str(path)!r}")
    prompts: dict[str, Prompt] = {}
    for number, entry in json_lines(path):
        where = f"{path}:{number}"
        prompt = _prompt(entry, where, default_id=str(number))
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id!r} occurs a second time")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    _check_limit(limit)
    return _of_split(list(prompts.values()), split, str(path))[:limit]


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"the number of prompts must be 1 or more, got {limit}")


def _of_split(prompts: list[Prompt], split: str | None, where: str) -> list[Prompt]:
    chosen = [prompt for prompt in prompts if split is None or prompt.split == split]
    if not chosen:
        there = ", ".join(sorted({repr(prompt.split) for prompt in prompts if prompt.split is not None}))
        raise ValueError(f"{where}: no prompt of the split {split!r} (there are: {there or 'none'})")
    return chosen


def _prompt(entry: Any, where: str, default_id: str) -> Prompt:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object, got {type(entry).__name__}")
    name = next((entry[key] for key in ID_KEYS if key in entry), default_id)
    split = entry.get("split")
    if split is not None and not (isinstance(split, str) and split):
        raise ValueError(f"{where}: 'split' must be a name, got {split!r}")
    return Prompt(str(name), str(entry.get("category", "none")), _turns(entry, where), split)


def _turns(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    key = next((key for key in TEXT_KEYS if key in entry), None)
    if key is None:
        raise ValueError(f"{where}: none of the keys {', '.join(TEXT_KEYS)} in it, only {', '.join(map(repr, entry))}")
    value = entry[key]
    if key == "turns" and not isinstance(value, list):
        raise ValueError(f"{where}: 'turns' must be a list of texts, such as [\"hi\"], got {value!r}")
    turns = value if key == "turns" and isinstance(value, list) else [value]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: {key!r} must be text that is not empty, got {value!r}")
    return tuple(turns)
