"""Warnings as a command says them: a line each, without a place in the source."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def warned_in_a_line() -> Iterator[None]:
    """Within the block every warning is one line on standard error: `warning: ` and its text."""

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        del place, more
        print("warning:", " ".join(str(message).split()), file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
