"""Reading of JSON lines, with errors that name file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: str | Path, *, ended: bool = False) -> Iterator[tuple[int, Any]]:
    """(number, value) of every non-empty line; with `ended` only of lines that end in a newline.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, or a line that is not JSON; the message says file:line.
    """
    try:
        # Not splitlines, which also splits at U+2028 etc., allowed inside JSON strings.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines[:-1] if ended else lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
