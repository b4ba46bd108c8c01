"""Parsing of strategies such as `--policy "adaedl(threshold=0.6)"` or `--policy "my_rule.py(floor=0.2)"`.

A strategy is a name or a call in Python syntax; there is no registry. A name is a file of `stopping/`, `verification/`
or `drafters/`, a path is a user's file, and the factory has the file's name. A strategy that wraps another one takes it
as a call: `at_least(minimum=2, policy=adaedl(threshold=0.5))`.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec_jax.decoding.user_code import Refused, describe_error, location
from specdec_jax.strategy import nearest, strategy
from specdec_jax.types import Drafter, Monitor, StoppingPolicy, Verifier

PACKAGES = {
    "policy": ("specdec_jax.stopping", "specdec_jax.contrib.stopping", "specdec_jax.contrib.trees.stopping"),
    "verifier": ("specdec_jax.verification", "specdec_jax.contrib.trees.verification"),
    "drafter": ("specdec_jax.drafters", "specdec_jax.contrib.drafters"),
    "monitor": ("specdec_jax.monitors",),
}
"""The packages in which names are searched; those of contrib are imported on lookup."""
TYPES: dict[str, type] = {"policy": StoppingPolicy, "verifier": Verifier, "drafter": Drafter, "monitor": Monitor}
WORDS = re.compile(r"\s*(?P<name>[^()]*\.py|\w+)\s*(?P<arguments>\(.*\))?\s*", re.DOTALL)
WANTED = {bool: ((bool,), "true or false"), int: ((int,), "a whole number"), float: ((int, float), "a number")}
CONSTANTS = {"true": True, "false": False, "none": None}


def names(kind: str) -> list[str]:
    """The built-in policies, verifiers or drafters: the files of their folders."""
    return sorted(_modules(kind))


@functools.cache
def _modules(kind: str) -> dict[str, str]:
    """The module of every built-in name."""
    packages = [importlib.import_module(package) for package in PACKAGES[kind]]
    files = ((package.__name__, info) for package in packages for info in pkgutil.iter_modules(package.__path__))
    return {file.name: f"{package}.{file.name}" for package, file in files if file.name[0] != "_" and not file.ispkg}


def find_factory(kind: str, name: str) -> Callable[..., Any]:
    """The factory of a built-in name or of a Python file; its strategies have that name.

    Raises ValueError: no such name or file, the file fails, or it has no function with the file's name.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser()
        return _factory_of_file(kind, name, path.stat().st_mtime_ns if path.is_file() else 0)
    if name not in _modules(kind):
        here = f"; ./{name}.py would load that file" if Path(f"{name}.py").is_file() else ""
        raise ValueError(f"unknown {kind} {name!r}{here or nearest(name, names(kind))}")
    return getattr(importlib.import_module(_modules(kind)[name]), name)


def import_from_folder_of(path: Path) -> None:
    """Appends the file's folder to `sys.path`, permanently because functions may import later, and at the end so that
    its files do not shadow installed modules.
    """
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def choose(kind: str, words: str, **offered: Any) -> Any:
    """The strategy for a text such as `adaedl`, `static(draft_length=3)` or `my_rule.py`.

    `offered` are default options, for the factory and those of strategies inside it, where they have such options.
    Raises ValueError: invalid syntax, an unknown name, option or hyperparameter, a value of the wrong type or out of
    range, or a factory that fails or returns another type. Errors of a user's file have its name and line.
    """
    return build(kind, *parse_call(kind, words, offered), offered)


def name_in(words: str) -> str:
    """The name or path at the beginning of a text, which need not be a call of a strategy."""
    return words.partition("(")[0].strip()


def parse_call(kind: str, words: str, offered: Mapping[str, Any] = {}) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a call; positional arguments are the factory's parameters in order.

    `offered` is for calls among the arguments, as in `choose`. Raises ValueError: invalid syntax.
    """
    call = WORDS.fullmatch(words)
    try:
        if call is None:
            raise ValueError(nearest(name_in(words).replace("-", "_"), names(kind)).lstrip("; "))
        tree = ast.parse(f"_{call['arguments'] or '()'}", mode="eval").body
        if not isinstance(tree, ast.Call) or any(word.arg is None for word in tree.keywords):
            raise ValueError
        named = {str(word.arg): _value(kind, word.value, offered) for word in tree.keywords}
        placed = [_value(kind, value, offered) for value in tree.args]
    except (SyntaxError, ValueError) as error:
        why = f": {error}" if str(error) and not isinstance(error, SyntaxError) else ""
        raise ValueError(f"a {kind} reads NAME or NAME(key=value, ...), got {words!r}{why}") from None
    name = call["name"].strip()
    if placed:
        options = list(inspect.signature(find_factory(kind, name)).parameters)
        if len(placed) > len(options):
            raise ValueError(f"{kind} {name} takes {len(options)} options at most, got {len(placed)} in {words!r}")
        named = {**dict(zip(options, placed, strict=False)), **named}
    return name, named


def build(kind: str, name: str, arguments: Mapping[str, Any], offered: Mapping[str, Any] = {}) -> Any:
    """Calls the factory `name` with `arguments`, and with those of `offered` that it accepts.

    A text argument where the factory expects a strategy is parsed as one. Raises ValueError: as `choose`.
    """
    factory = find_factory(kind, name)
    parameters = inspect.signature(factory).parameters
    arguments = {key: value for key, value in offered.items() if key in parameters} | dict(arguments)
    for key in arguments.keys() & parameters.keys():
        if isinstance(arguments[key], str) and TYPES[kind].__name__ in str(parameters[key].annotation):
            arguments[key] = choose(kind, arguments[key], **offered)
        types, words = WANTED.get(type(parameters[key].default), ((type(arguments[key]),), ""))
        if type(arguments[key]) not in types:  # a text such as 'no' would count as true
            raise ValueError(f"{kind} {name}: {key} must be {words}, got {arguments[key]!r}")
    try:
        made = factory(**arguments)
    except Exception as error:  # any error of a user's factory becomes one message
        text = describe_error(error)
        if re.match(r".+?\.py:\d+: ", text) or text.startswith(name):
            text = f"{kind} {text}"
        elif not isinstance(error, ValueError) or isinstance(error, Refused):
            text = f"{kind} {name}: {text.removeprefix('TypeError: ')}"
        raise ValueError(text) from error
    if not isinstance(made, TYPES[kind]):
        raise ValueError(f"{kind} {name} must return a {TYPES[kind].__name__}, got {type(made).__name__}")
    return made


def _value(kind: str, tree: ast.expr, offered: Mapping[str, Any]) -> Any:
    """Parses an argument: a literal, a bare word (a strategy's name, true, false, or a text), a call, or a list."""
    if isinstance(tree, ast.Name):
        return CONSTANTS.get(tree.id.lower(), tree.id)
    if isinstance(tree, ast.Call):
        return choose(kind, ast.unparse(tree), **offered)
    if isinstance(tree, (ast.List, ast.Tuple)):
        values, rules = [_value(kind, entry, offered) for entry in tree.elts], names(kind)
        return [choose(kind, word, **offered) if isinstance(word, str) and word in rules else word for word in values]
    return ast.literal_eval(tree)


@functools.lru_cache(maxsize=64)
def _factory_of_file(kind: str, name: str, edited: int) -> Callable[..., Any]:
    """A user's factory, cached so that its strategies are equal for equal calls until the file changes."""
    del edited
    path, factory = Path(name).expanduser(), Path(name).stem
    if not path.is_file():
        raise ValueError(f"{kind} file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"{kind}_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    import_from_folder_of(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module when their class is created
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any error of a user's file becomes one message with its line
        where = "" if location(error) else f"{path}: "
        raise ValueError(f"{kind} file {where}{describe_error(error)}") from error
    if not callable(getattr(module, factory, None)):
        raise ValueError(f"{kind} file {name} must define a function {factory}()")
    made = getattr(module, factory)
    return strategy(getattr(made, "__wrapped__", made), name)  # its values have the name of the file
