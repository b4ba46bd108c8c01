"""A file of prompts: JSON lines in Spec-Bench's format, or any with `turns`, `prompt` or `text`."""

from pathlib import Path
from typing import Any, NamedTuple

from specdec_jax.ranges import Between, shortened
from specdec_jax.text.json_lines import json_lines

ID_KEYS = ("id", "question_id", "prompt_id")
TEXT_KEYS = ("turns", "prompt", "text")


class Prompt(NamedTuple):
    id: str  # unique in its file
    category: str
    turns: tuple[str, ...]  # the user's messages, one per turn, all non-empty
    split: str | None = None  # "calibrate": hyperparameters may be chosen on it; "judge": results are reported on it


def read_prompts(path: str | Path, limit: int | None = None, split: str | None = None) -> list[Prompt]:
    """The prompts of a JSONL file in order: those of the given `split`, and the first `limit` of them.

    Empty lines are skipped. A line without an id gets its line number; one without a category gets "none". Raises
    FileNotFoundError, or ValueError with file:line: an invalid line, a duplicate id, no prompts, none of that split.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file {str(path)!r}")
    prompts: dict[str, Prompt] = {}
    for number, entry in json_lines(path):
        prompt = prompt_of(entry, f"{path}:{number}: ", default_id=str(number))
        if prompts.setdefault(prompt.id, prompt) is not prompt:
            raise ValueError(f"{path}:{number}: the id {prompt.id!r} occurs a second time")
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    check_limit(limit)
    return of_split(list(prompts.values()), split, str(path))[:limit]


def check_limit(limit: int | None) -> None:
    """Raises ValueError for a number of prompts below 1."""
    if limit is not None:
        Between(1).check("the number of prompts", limit)


def of_split(prompts: list[Prompt], split: str | None, where: str) -> list[Prompt]:
    """The prompts of a split, or all for None. Raises ValueError if there are none."""
    chosen = [prompt for prompt in prompts if split is None or prompt.split == split]
    if not chosen:
        there = ", ".join(sorted({repr(prompt.split) for prompt in prompts if prompt.split is not None}))
        raise ValueError(f"{where}: no prompt of the split {split!r} (there are: {there or 'none'})")
    return chosen


def prompt_of(entry: Any, where: str = "", default_id: str = "") -> Prompt:
    """The prompt in a JSON value. Raises ValueError whose message begins with `where`."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}expected an object, got {type(entry).__name__}")
    for key in (*ID_KEYS, "category"):
        if isinstance(entry.get(key), (dict, list)):
            raise ValueError(f"{where}{key!r} must be text or a number, got {shortened(entry[key])}")
    name = next((entry[key] for key in ID_KEYS if key in entry), default_id)
    split = entry.get("split")
    if split is not None and not (isinstance(split, str) and split):
        raise ValueError(f"{where}'split' must be a name, got {shortened(split)}")
    key = next((key for key in TEXT_KEYS if key in entry), None)
    if key is None:
        raise ValueError(f"{where}none of the keys {', '.join(TEXT_KEYS)} in it, only {', '.join(map(repr, entry))}")
    value = entry[key]
    if key == "turns" and not isinstance(value, list):
        raise ValueError(f"{where}'turns' must be a list of texts, such as [\"hi\"], got {shortened(value)}")
    turns: list[Any] = value if key == "turns" else [value]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}{key!r} must be text that is not empty, got {shortened(value)}")
    return Prompt(str(name), str(entry.get("category", "none")), tuple(turns), split)
