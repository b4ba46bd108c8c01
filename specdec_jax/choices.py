"""Strategies by name or by file: what `--policy adaedl entropy_factor=0.3` and `--policy my_rule.py` mean.

There is no registry. A name is a file of `stopping/`, `verification/` or `drafters/`, a path is a user's own file, and
in both the factory has the file's name. What the factory takes is structure, what its `init` takes is numbers.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = {
    "policy": "specdec_jax.stopping",
    "verifier": "specdec_jax.verification",
    "drafter": "specdec_jax.drafters",
}


class Choice(NamedTuple):
    """A strategy ready for `build_decoder` and the numbers for its `init`."""

    name: str
    strategy: Any
    numbers: dict[str, Any]


def names(kind: str) -> list[str]:
    """The built-in policies, verifiers or drafters: the files of their folder."""
    package = importlib.import_module(PACKAGES[kind])
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' with what is there, for an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return (f"; did you mean {close[0]!r}?" if close else "") + f" (there are: {', '.join(known) or 'none'})"


def find_factory(kind: str, name: str) -> Callable[..., Any]:
    """The factory of a built-in name or of a Python file.

    Raises:
        ValueError: there is no such name or file, or the file has no factory of its own name.
    """
    if name.endswith(".py"):
        module, factory = _load_file(kind, Path(name)), Path(name).stem
    elif name in names(kind):
        module, factory = importlib.import_module(f"{PACKAGES[kind]}.{name}"), name
    else:
        raise ValueError(f"unknown {kind} {name!r}{nearest(name, names(kind))}")
    if not callable(getattr(module, factory, None)):
        raise ValueError(f"{kind} file {name} must define a function {factory}()")
    return getattr(module, factory)


def choose(kind: str, name: str, options: Sequence[str] = ()) -> Choice:
    """A strategy and its numbers from a name and `key=value` options.

    Raises:
        ValueError: an unknown name, an option that is neither the factory's nor its `init`'s, a value out of range.
    """
    factory = find_factory(kind, name)
    given = dict(_parse(option) for option in options)
    structure = {key: value for key, value in given.items() if key in _parameters(factory)}
    try:
        strategy = factory(**structure)
    except TypeError as error:
        raise ValueError(f"{kind} {name}: {error}") from None
    numbers = {key: value for key, value in given.items() if key not in structure}
    check_numbers(kind, name, strategy, numbers, also=_parameters(factory))
    return Choice(name, strategy, numbers)


def check_numbers(kind: str, name: str, strategy: Any, numbers: dict[str, Any], also: Iterable[str] = ()) -> None:
    """Refuses numbers that `strategy.init` does not take, with the nearest name, or that it finds out of range.

    Raises:
        ValueError: as said.
    """
    known = _parameters(strategy.init) - {"batch"}
    for key in numbers:
        if key not in known:
            raise ValueError(f"{kind} {name} has no option {key!r}{nearest(key, known | set(also))}")
    strategy.init(1, **numbers)


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _parse(option: str) -> tuple[str, Any]:
    key, equals, text = option.partition("=")
    if not equals or not key:
        raise ValueError(f"an option reads key=value, got {option!r}")
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        value = text
    return key.strip().replace("-", "_"), value


def _load_file(kind: str, path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{kind} file {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{kind} file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
