"""One-line descriptions of errors in a user's file: `FILE:LINE: message`.

A user's file belongs neither to this package nor to an installed library.
"""

import dataclasses
import functools
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from specdec_jax.strategy import Strategy

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = [PACKAGE, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))]
TRUTH = "`if`, `while`, `and`, `or` and `not` cannot read an array in a compiled program: use jnp.where, &, | and ~"
NUMBER = "no Python number can be made of an array in a compiled program: use jnp"
NUMPY = "NumPy cannot read an array in a compiled program: use jax.numpy"
HINTS: dict[type, str] = {
    jax.errors.TracerBoolConversionError: TRUTH,
    jax.errors.TracerArrayConversionError: NUMPY,
    jax.errors.TracerIntegerConversionError: NUMBER,
    jax.errors.ConcretizationTypeError: NUMBER,
}


class Refused(ValueError):
    """A one-line error with the location in the user's file."""


def describe_error(error: BaseException) -> str:
    """One line: the error's `location` if there is one, its type unless ValueError, and its message.

    For errors of reading a traced value the message is replaced by a hint at the jax equivalent.
    """
    hint = next((text for kind, text in HINTS.items() if isinstance(error, kind)), None)
    if isinstance(error, ValueError) and "truth value of an array" in str(error):
        hint = TRUTH
    message = hint or (str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    return " ".join(": ".join(filter(None, (location(error), message))).split())


def location(error: BaseException, file: Path | None = None) -> str:
    """FILE:LINE of the innermost frame of an error in a user's file, or in `file`; empty if there is none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    wanted = [(name, line) for name, line in frames if file is None or Path(name).resolve() == file.resolve()]
    return next((f"{_shown(name)}:{line}" for name, line in reversed(wanted) if _is_users(name)), "")


def definition(function: Any) -> str:
    """FILE:LINE where a user's function is defined; empty for a function of the package or of a library."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}" if code and _is_users(code.co_filename) else ""


def first_definition(strategy: Strategy) -> str:
    """FILE:LINE of the first of a strategy's functions that a user's file defines; empty if none does."""
    places = (definition(function) for function in vars(strategy).values() if callable(function))
    return next(filter(None, places), "")


def is_users(part: Any) -> bool:
    """Whether a user's file defines any function of a strategy or a model, or of one inside it."""
    if isinstance(part, Strategy):
        return is_users([*vars(part).values(), *part.options.values()])
    if isinstance(part, Mapping):
        return is_users(list(part.values()))
    if isinstance(part, (list, tuple)):
        return any(map(is_users, part))
    if dataclasses.is_dataclass(part):
        return is_users(list(vars(part).values()))
    return callable(part) and bool(definition(part))


@contextmanager
def described(place: str = "", name: str = "") -> Iterator[None]:
    """Turns errors that pass through a user's file into one-line `Refused` errors, and with `place` all others, too.

    Args:
        place: FILE:LINE of the user's function that is called, reported for errors without a frame in a user's file,
            such as wrong arguments; empty: those errors pass unchanged.
        name: prefix of the message of such an error.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if location(error):
            raise Refused(describe_error(error)) from error
        if not place:
            raise
        raise Refused(f"{place}: {name}: {describe_error(error)}") from error


@functools.lru_cache(maxsize=1024)
def _is_users(name: str) -> bool:
    path = Path(name)
    resolved = path.resolve()
    installed = {"site-packages", "dist-packages"} & set(resolved.parts)  # user and system installations
    return path.is_file() and not installed and not any(resolved.is_relative_to(folder) for folder in LIBRARIES)


def _shown(name: str) -> str:
    """A path for messages: relative to the working directory if it lies inside."""
    path, here = Path(name).resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
