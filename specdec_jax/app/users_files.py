"""Errors in a user's strategies, while a command runs them: one line with the file and the line."""

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from specdec_jax.text.strategies import name_in


@contextlib.contextmanager
def errors_in(words: Mapping[str, str | None]) -> Iterator[None]:
    """Turns what a user's file raises into a ValueError.

    Args:
        words: by kind (policy, verifier, drafter, monitor), as on the command line. An error that comes by way of no
            line of such a file, of a wrong shape, is laid to all of them; without a file it is raised as it is.
    """
    try:
        yield
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:
        files = {kind: name_in(word) for kind, word in words.items() if word and name_in(word).endswith(".py")}
        where = _line_in(files, error)
        if where is None and (isinstance(error, ValueError) or not files):
            raise
        where = where or " or ".join(f"{kind} {file}" for kind, file in files.items())
        if where in str(error):
            raise
        message = str(error).split("\nThe error occurred while tracing")[0]  # jax goes on for a page
        raise ValueError(f"{where}: {type(error).__name__}: {message}") from error


def _line_in(files: Mapping[str, str], error: Exception) -> str | None:
    """`policy FILE:LINE`, the innermost line of the files that the error came by; None: it came by none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for kind, file in files.items():
            if Path(frame.filename).resolve() == Path(file).expanduser().resolve():
                return f"{kind} {file}:{frame.lineno}"
    return None
