"""What Tab offers: commands, names of strategies and models, and the options of a strategy."""

import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

from specdec_jax.chat.commands import COMMANDS
from specdec_jax.choices import choose, find_factory, names
from specdec_jax.hyperparameters import hyperparameters_of
from specdec_jax.loading.builtin import BUILTIN, DRAFTERS
from specdec_jax.pairs import NEED_MODELS


class Completion(NamedTuple):
    text: str
    start: int  # where it begins, counted back from the cursor
    about: str = ""


def complete(before: str) -> list[Completion]:
    """Completions of a line, of which `before` stands before the cursor. None for what is no command."""
    if not before.startswith("/") or "\n" in before:
        return []
    words = before.split(" ")
    if len(words) == 1:
        return [Completion(name, -len(before), COMMANDS[name].help) for name in COMMANDS if name.startswith(before)]
    offers = VALUES.get(words[0], lambda words: iter(()))
    return [Completion(text, -len(words[-1])) for text in offers(words[1:]) if text.startswith(words[-1])]


def _strategy(kind: str) -> Callable[[list[str]], Iterator[str]]:
    def offers(words: list[str]) -> Iterator[str]:
        if len(words) == 1:
            yield from names(kind)
        else:
            given = {word.partition("=")[0] for word in words[1:-1]}
            yield from (f"{name}=" for name in _options(kind, words[0]) if name not in given)

    return offers


def _options(kind: str, name: str) -> list[str]:
    """The static options and the hyperparameters a strategy takes; none while its name is not finished."""
    try:
        static_options = set(inspect.signature(find_factory(kind, name)).parameters)
    except ValueError:
        return []
    try:
        return sorted(static_options | hyperparameters_of(choose(kind, name).strategy.init).keys())
    except ValueError:  # it wraps another one, which is still to be named
        return sorted(static_options)


def _first(*offered: str) -> Callable[[list[str]], Iterator[str]]:
    return lambda words: iter(offered if len(words) == 1 else ())


def _drafters(words: list[str]) -> Iterator[str]:
    if len(words) == 1:
        yield from [
            *BUILTIN,
            *(f"{name}@8192" for name in DRAFTERS),
            "none",
            *(name for name in names("drafter") if name not in NEED_MODELS),
        ]


VALUES: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "/policy": _strategy("policy"),
    "/verifier": _strategy("verifier"),
    "/drafter": _drafters,
    "/target": lambda words: iter(BUILTIN),
    "/gamma": _first("auto"),
    "/tokens": _first("on", "off"),
    "/phases": _first("on", "off"),
    "/system": _first("none"),
    "/help": _first(*COMMANDS),
}
