"""How a message names what would have been right."""

import difflib
from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    """'a, b, c' in alphabetical order."""
    return ", ".join(sorted(names))


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean ...?' or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
