"""Strategies are values: they record their factory, its static options and the given hyperparameters as data.

`adaedl(threshold=0.5, keep_checked_token=True)` is a complete description in Python, configs, the command line,
calibrations and manifests. Parameters of the factory are static options: another value is another program. Parameters
of its `init` are hyperparameters: they are traced, so strategies that differ only in them share a program (their `bare`
is equal). Strategies that wrap others nest as values. Equality and hash are by this data.

A factory only needs the decorator `@strategy`; there is no registry of names. Ranges that its parameters and those of
`init` declare (specdec_jax/ranges.py) are checked, and `init` gets one value per row.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from specdec_jax.ranges import ranges_of

S = TypeVar("S", bound="Strategy")
T = TypeVar("T")


class Call(NamedTuple):
    """How a strategy was made."""

    factory: Callable[..., Any]
    name: str  # a file of the package, or the path of a user's file
    options: Mapping[str, Any]  # all static options
    given: Mapping[str, Any]  # the hyperparameters that were set; others have their defaults


class Strategy:
    """The base of StoppingPolicy, Verifier, Drafter and Monitor, which are frozen dataclasses of functions.

    A strategy without an `@strategy` factory, such as `adaedl().replace(begin=...)`, is equal to itself only.
    """

    call: Call | None = None
    tree_hooks: Any = None  # of policies and verifiers of trees: a module of functions, `contrib.trees.hooks`
    init: Callable[..., Any]
    hyperparameters: Any  # a Mapping: parameters of `init` with initial values; None: from its signature

    def __post_init__(self) -> None:
        if self.hyperparameters is None:
            object.__setattr__(self, "hyperparameters", defaults_of(self.init))
        if self.hyperparameters and not hasattr(self.init, "in_rows"):
            object.__setattr__(self, "init", by_row(self.init))

    @property
    def name(self) -> str:
        """The factory's name, or the type's for a strategy without a factory."""
        return type(self).__name__ if self.call is None else self.call.name

    @property
    def options(self) -> Mapping[str, Any]:
        """All static options."""
        return {} if self.call is None else self.call.options

    @property
    def given(self) -> Mapping[str, Any]:
        """The hyperparameters that were set explicitly."""
        return {} if self.call is None else self.call.given

    @property
    def fixed(self) -> set[str]:
        """The hyperparameters set explicitly, here or in a wrapped strategy; calibrations do not change them."""
        names = set(self.given)
        for role, inner in self.options.items():
            if isinstance(inner, Strategy):
                names |= {key if key in self.hyperparameters else f"{role}_{key}" for key in inner.fixed}
        return names

    @property
    def bare(self: S) -> S:
        """The same strategy with default hyperparameters at every depth; the key of compiled programs."""
        if self.call is None:
            return self
        return self.call.factory(**{name: _bare(value) for name, value in self.options.items()})

    def but(self: S, **changes: Any) -> S:
        """The same call with other options or hyperparameters. Raises ValueError: as the factory, or it has none."""
        if self.call is None:
            raise ValueError(f"no factory made this {self.name}: there are no options to change")
        return self.call.factory(**{**self.options, **self.given, **changes})

    def replace(self: S, **functions: Any) -> S:
        """A strategy with some functions replaced, which has no factory."""
        if "init" in functions:
            functions = {"hyperparameters": None, **functions}
        return dataclasses.replace(self, **functions)  # type: ignore[type-var]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Strategy) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Any:
        return id(self) if self.call is None else (self.call.factory, _hashable(self.options), _hashable(self.given))

    def __repr__(self) -> str:
        """The call, which `strategies.choose` can parse; options with default values are omitted."""
        if self.call is None:
            return f"<{self.name}>"
        defaults = {name: each.default for name, each in inspect.signature(self.call.factory).parameters.items()}
        changed = {k: v for k, v in self.options.items() if _hashable(v) != _hashable(defaults.get(k))}
        words = [f"{name}={_written(value)}" for name, value in {**changed, **self.given}.items()]
        return f"{self.name}({', '.join(words)})" if words else self.name


def strategy(factory: Callable[..., S], name: str | None = None) -> Callable[..., S]:
    """Decorates a factory: it accepts its strategy's hyperparameters too, and records its arguments in the value, whose
    name is `name` or the factory's.

    Raises:
        ValueError: from the decorated factory: an unknown option, with the nearest name, an option outside its declared
            range, or a hyperparameter that `init` refuses.
        TypeError: from the decorated factory: a missing option, or a return value that is not a strategy.
    """
    signature, ranges = inspect.signature(factory), ranges_of(factory)
    called = name or factory.__name__

    @functools.wraps(factory)
    def build(*arguments: Any, **words: Any) -> S:
        options = {key: value for key, value in words.items() if key in signature.parameters}
        hyperparameters = {key: value for key, value in words.items() if key not in options}
        try:
            bound = signature.bind(*arguments, **options)
        except TypeError as error:
            raise TypeError(f"{called}: {error}") from None
        bound.apply_defaults()
        for key in ranges:
            if (value := bound.arguments[key]) is not signature.parameters[key].default:
                ranges[key].check(key, value)
        made = factory(*bound.args, **bound.kwargs)
        if not isinstance(made, Strategy):
            raise TypeError(f"{called} must return a strategy, got {type(made).__name__}")
        for key in hyperparameters:
            if key not in made.hyperparameters:
                names = [*bound.arguments, *made.hyperparameters]
                raise ValueError(f"{called} has no option {key!r}{nearest(key, names)}")
        taken = {**made.hyperparameters, **hyperparameters}

        @functools.wraps(made.init)
        def init(batch: int, **changed: Any) -> Any:  # with the strategy's hyperparameters as defaults
            for key in changed:
                if key not in taken:
                    raise ValueError(f"{called} has no hyperparameter {key!r}{nearest(key, taken)}")
            return made.init(batch, **{**hyperparameters, **changed})

        whole = dataclasses.replace(made, **({"init": init, "hyperparameters": taken} if taken else {}))  # type: ignore[type-var]
        object.__setattr__(whole, "call", Call(build, called, dict(bound.arguments), hyperparameters))
        if hyperparameters:
            whole.init(1)
        return whole

    return build


def by_row(init: Callable[..., T]) -> Callable[..., T]:
    """A function of (batch, ...), given every argument that declares a range as [B]; a default of None stays None."""
    ranges, defaults = ranges_of(init), defaults_of(init)

    @functools.wraps(init)
    def begin(batch: int, *values: Any, **named: Any) -> T:
        from specdec_jax.hyperparameters import in_rows  # imports JAX

        named |= dict(zip(defaults, values, strict=False))
        for name, within in ranges.items():
            value = named.get(name, defaults[name])
            if value is not inspect.Parameter.empty and (value is not None or defaults[name] is not None):
                named[name] = in_rows(batch, value, name, within)
        return init(batch, **named)

    vars(begin)["in_rows"] = True
    return begin


def with_parameters_of(inner: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates an `init(batch, ..., **others)` that gives `others` to `inner(batch, ...)`: they are its parameters."""

    def extended(init: Callable[..., Any]) -> Callable[..., Any]:
        first, more = ([*inspect.signature(function).parameters.values()] for function in (init, inner))
        vars(init)["__signature__"] = inspect.Signature([*first[:-1], *more[1:]])
        return init

    return extended


def defaults_of(init: Callable[..., Any]) -> dict[str, Any]:
    """The hyperparameters of an `init(batch, ...)`, with their defaults."""
    parameters = list(inspect.signature(init).parameters.values())[1:]
    named = [parameter for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    return {parameter.name: parameter.default for parameter in named}


def nearest(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?' with all names, for error messages."""
    names = sorted(names)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return (f"; did you mean {close[0]!r}?" if close else "") + f" (there are: {', '.join(names) or 'none'})"


def named_call(name: str, function: Callable[..., Any], *inner: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose **options go to `inner`; a TypeError for any other keyword names the call and lists them."""
    every = [each for call in (function, *inner) for each in inspect.signature(call).parameters.values()]
    words = {each.name for each in every if each.kind is each.KEYWORD_ONLY} | {*inspect.signature(function).parameters}

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        for key in options.keys() - words:
            raise TypeError(f"{name} has no option {key!r}{nearest(key, words - {'options', 'self'})}")
        return function(*arguments, **options)

    return call


def _bare(value: Any) -> Any:
    if isinstance(value, Strategy):
        return value.bare
    plain = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
    return type(value)(map(_bare, value)) if plain else value


def _hashable(value: Any) -> Any:
    """A hashable key for a value: by content if possible, else the value itself."""
    if isinstance(value, Mapping):
        return tuple(sorted((name, _hashable(entry)) for name, entry in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()
    try:
        hash(value)
    except TypeError:
        return type(value).__name__, id(value)
    return value


def _written(value: Any) -> str:
    if hasattr(value, "tolist"):
        return repr(value.tolist())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"[{', '.join(map(_written, value))}]"
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
