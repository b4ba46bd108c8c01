"""Strategies by name or by file: what `--policy adaedl --policy-options threshold=0.6` or `--policy my_rule.py` means.

There is no registry. A name is a file of `stopping/`, `verification/` or `drafters/`, a path is a user's own file, and
in both the factory has the file's name. What the factory takes are static options, what its `init` takes are
hyperparameters. A policy that wraps another takes it by name too: `--policy at_least --policy-options minimum=2
policy=adaedl`.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec_jax.answers import check_answers
from specdec_jax.monitors.phases import phases
from specdec_jax.types import Drafter, Monitor, StoppingPolicy, Verifier

PACKAGES = {
    "policy": "specdec_jax.stopping",
    "verifier": "specdec_jax.verification",
    "drafter": "specdec_jax.drafters",
    "monitor": "specdec_jax.monitors",
}
ROWS, VOCABULARY, DRAFTS = 2, 1024, 3  # the shapes that a policy is first tried with; nothing is computed of them
TYPES: dict[str, type] = {
    "policy": StoppingPolicy,
    "verifier": Verifier,
    "drafter": Drafter,
    "monitor": Monitor,
}


class Choice(NamedTuple):
    """A strategy ready for `build_decoder` and the hyperparameters for its `init`."""

    name: str
    strategy: Any
    hyperparameters: dict[str, Any]


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
        ValueError: there is no such name or file, the file fails, or it has no factory of its own name.
    """
    if name.endswith(".py"):
        module, factory = _load_file(kind, Path(name).expanduser()), Path(name).stem
    elif name in names(kind):
        module, factory = importlib.import_module(f"{PACKAGES[kind]}.{name}"), name
    else:
        raise ValueError(f"unknown {kind} {name!r}{nearest(name, names(kind))}")
    if not callable(getattr(module, factory, None)):
        raise ValueError(f"{kind} file {name} must define a function {factory}()")
    return getattr(module, factory)


def search_beside(path: Path) -> None:
    """Imports are looked for in the file's own folder too, from now on (its functions may import later) and last, so
    that no file beside it takes the place of an installed module.
    """
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def choose(kind: str, name: str, options: Sequence[str] = ()) -> Choice:
    """A strategy and its hyperparameters from a name and `key=value` options.

    Raises:
        ValueError: an unknown name, an option that is neither the factory's nor its `init`'s, a value of the wrong type
            or out of range, a factory that returns something else, or a policy whose functions fail or do not answer
            each row.
    """
    given = parse_options(options)
    strategy, static_options = _build(kind, name, given)
    hyperparameters = {key: value for key, value in given.items() if key not in static_options}
    check_hyperparameters(kind, name, strategy, hyperparameters, also=static_options)
    if kind == "policy":
        _check_policy(name, strategy, hyperparameters)
    return Choice(name, strategy, hyperparameters)


def build_drafter(name: str, options: Mapping[str, Any], offered: Mapping[str, Any]) -> Drafter:
    """A drafter without a model, by name or file: `options` must be its factory's, `offered` are what it has of them.

    Raises:
        ValueError: as `choose`.
    """
    parameters = _parameters(find_factory("drafter", name))
    for key in options:
        if key not in parameters:
            raise ValueError(f"drafter {name} has no option {key!r}{nearest(key, parameters)}")
    given = {key: value for key, value in offered.items() if key in parameters} | dict(options)
    return _build("drafter", name, given)[0]


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as a mapping; a value is a Python literal or else a text.

    Raises:
        ValueError: a word without `=`.
    """
    return dict(_parse(option) for option in options)


def check_hyperparameters(
    kind: str, name: str, strategy: Any, hyperparameters: Mapping[str, Any], also: Iterable[str] = ()
) -> None:
    """Refuses hyperparameters that `strategy.init` does not take, with the nearest name, or that it finds out of range.

    Raises:
        ValueError: as said.
    """
    takes_none = isinstance(strategy, Drafter)  # its `init` takes parameters and sizes, and no hyperparameters
    known = set() if takes_none else _parameters(strategy.init).keys() - {"batch"}
    for key in hyperparameters:
        if key not in known:
            raise ValueError(f"{kind} {name} has no option {key!r}{nearest(key, known | set(also))}")
    if takes_none:
        return
    try:
        strategy.init(1, **hyperparameters)
    except TypeError as error:
        raise ValueError(f"{kind} {name}: {error}") from None


def _check_policy(name: str, policy: StoppingPolicy, hyperparameters: Mapping[str, Any]) -> None:
    """Whatever a policy's functions raise, on made-up shapes already, is one message."""
    monitor = phases().init(ROWS) if policy.needs_phases else ()
    try:
        state = policy.init(ROWS, **hyperparameters)
        check_answers(policy, state, monitor, batch=ROWS, vocab_size=VOCABULARY, max_draft_length=DRAFTS)
    except ValueError as error:
        raise ValueError(f"policy {name}: {error}") from None
    except Exception as error:
        where = _line(Path(name).expanduser(), error) if name.endswith(".py") else name
        raise ValueError(f"policy {where}: {type(error).__name__}: {error}") from error


def _build(kind: str, name: str, given: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """The strategy with the static options found in `given`, and the names of all that it (and what it wraps) takes."""
    factory = find_factory(kind, name)
    parameters = _parameters(factory)
    static_options, known = {}, set(parameters)
    for key in given.keys() & parameters.keys():
        value, parameter = given[key], parameters[key]
        if isinstance(value, str) and TYPES[kind].__name__ in str(parameter.annotation):
            rest = {other: given[other] for other in given.keys() - parameters.keys()}
            value, inner = _build(kind, value, rest)
            known |= inner
        else:
            _check_type(f"{kind} {name}: {key}", value, parameter.default)
        static_options[key] = value
    try:
        strategy = factory(**static_options)
    except TypeError as error:
        raise ValueError(f"{kind} {name}: {error}") from None
    if not isinstance(strategy, TYPES[kind]):
        raise ValueError(f"{kind} {name} must return a {TYPES[kind].__name__}, got {type(strategy).__name__}")
    return strategy, known


def _check_type(what: str, value: Any, default: Any) -> None:
    """A text where a switch is wanted would count as true: 'no' too."""
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, got {value!r}")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, (int, float)) and not isinstance(default, bool) and not number:
        raise ValueError(f"{what} must be a number, got {value!r}")
    if isinstance(default, int) and isinstance(value, float):
        raise ValueError(f"{what} must be a whole number, got {value!r}")


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _parse(option: str) -> tuple[str, Any]:
    key, equals, text = option.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"an option reads key=value, got {option!r}")
    text = text.strip()
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        value = text
    return key.strip().replace("-", "_"), value


def _load_file(kind: str, path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{kind} file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"{kind}_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{kind} file {path} is not a Python file")
    search_beside(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while their class is made
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises is one message with the file's line
        raise ValueError(f"{kind} file {_line(path, error)}: {type(error).__name__}: {error}") from error
    return module


def _line(path: Path, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    return f"{path}:{line}" if line else str(path)
