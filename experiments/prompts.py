"""Prompt files: JSON lines as Spec-Bench has them, or any that hold `turns`, `prompt` or `text`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

ID_KEYS = ("id", "question_id", "prompt_id")
TEXT_KEYS = ("turns", "prompt", "text")


class Prompt(NamedTuple):
    id: str  # unique in its file
    category: str
    turns: tuple[str, ...]  # what the user says, one message a turn; none is empty


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, in its order, the first `limit` of them. Empty lines are skipped.

    A line without an id gets its line number; one without a category gets "none".

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is not such an object, an id occurs twice, or nothing is there; the message says file:line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file {str(path)!r}")
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        prompt = _parse(line, where, default_id=str(number))
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id!r} occurs a second time")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    if limit is not None and limit < 1:
        raise ValueError(f"the number of prompts must be 1 or more, got {limit}")
    return list(prompts.values())[:limit]


def _lines(path: Path) -> list[str]:
    try:
        # Not splitlines: it also splits at U+2028 and the like, which JSON allows inside a string.
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _parse(line: str, where: str, default_id: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object, got {type(entry).__name__}")
    name = next((entry[key] for key in ID_KEYS if key in entry), default_id)
    return Prompt(id=str(name), category=str(entry.get("category", "none")), turns=_turns(entry, where))


def _turns(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    key = next((key for key in TEXT_KEYS if key in entry), None)
    if key is None:
        raise ValueError(f"{where}: none of the keys {', '.join(TEXT_KEYS)} in it, only {', '.join(map(repr, entry))}")
    value = entry[key]
    turns = value if key == "turns" and isinstance(value, list) else [value]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: {key!r} must be text that is not empty, got {value!r}")
    return tuple(turns)
