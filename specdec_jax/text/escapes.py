"""Text of models, prompts and files for a terminal: characters that would control it are written visibly."""

import re
import sys

from rich.console import Console

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
ERROR_WIDTH = 800  # characters of an error message; input that it quotes may be longer


def shown(text: str) -> str:
    """The text with control characters and those that change its direction as JSON's escapes (ESC is `\\u001b`), so
    that a line of JSON stays JSON. Newlines and tabs stay."""
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printed(text: str) -> str:
    """The text for standard output: as `shown` on a terminal, unchanged in a file or a pipe."""
    return shown(text) if sys.stdout.isatty() or Console().is_terminal else text


def one_line(text: str, width: int = 80) -> str:
    """The text as `shown`, without line breaks, cut to `width` characters."""
    line = shown(" ".join(text.split()))
    return line if len(line) <= width else line[: width - 1] + "…"


def error_line(error: object) -> str:
    """The form of every error: `error: MESSAGE` in one line."""
    return f"error: {one_line(str(error), ERROR_WIDTH)}"
