"""JSON without NaN, and reading of JSON lines with errors that name file and line."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON of `plain(value)`. Raises TypeError for what is not JSON."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def plain(value: Any) -> Any:
    """Converts to Python numbers, lists and dicts; non-finite numbers become None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if hasattr(value, "__array__"):
        return plain(np.asarray(value).tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_value(line: bytes) -> Any:
    """The value of a line of JSON. Raises ValueError with the reason for anything else."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def numbered(source: bytes) -> list[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    return [(number, line) for number, line in enumerate(source.split(b"\n"), 1) if line.strip()]


def json_lines(path: str | Path, *, ended: bool = False) -> Iterator[tuple[int, Any]]:
    """(number, value) of every non-empty line; with `ended` only of lines that end in a newline.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as `json_value`; the message says file:line.
    """
    content = Path(path).read_bytes()
    for number, line in numbered(content[: content.rfind(b"\n") + 1] if ended else content):
        try:
            yield number, json_value(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
