"""Tab completion: commands, names of strategies and models, and the options of a strategy."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from specdec_jax.app.chat.commands import COMMANDS, TOKENS
from specdec_jax.loading.builtin import BUILTIN, DRAFTERS
from specdec_jax.text.pair import MODEL_DRAFTERS
from specdec_jax.text.strategies import choose, find_factory, names

CALL = re.compile(r"(?P<name>[^(]+)\((?P<given>.*)$")  # a call that is being typed


class Completion(NamedTuple):
    text: str
    start: int  # its beginning relative to the cursor
    about: str = ""


def complete(before: str) -> list[Completion]:
    """Completions of a line with the text `before` the cursor; empty if it is not a command."""
    if not before.startswith("/") or "\n" in before:
        return []
    command, space, rest = before.partition(" ")
    if not space:
        return [Completion(name, -len(before), COMMANDS[name].help) for name in COMMANDS if name.startswith(before)]
    begun = re.split(r"[\s(,]", rest)[-1]
    offers = VALUES.get(command, lambda rest: iter(()))
    return [Completion(text, -len(begun)) for text in offers(rest) if text.startswith(begun)]


def _strategy(kind: str, offered: Callable[[], list[str]]) -> Callable[[str], Iterator[str]]:
    """Completions of a name, or after an opening bracket those of its remaining options."""

    def offers(rest: str) -> Iterator[str]:
        call = CALL.fullmatch(rest)
        if call is not None:
            used = re.findall(r"(\w+)\s*=", call["given"])
            yield from (f"{name}=" for name in _options(kind, call["name"].strip()) if name not in used)
        elif " " not in rest:
            yield from offered()

    return offers


def _options(kind: str, name: str) -> list[str]:
    """The static options and hyperparameters of a strategy; empty for an unknown name."""
    try:
        options = inspect.signature(find_factory(kind, name)).parameters.keys()
    except ValueError:
        return []
    try:
        return sorted({*options, *choose(kind, name).hyperparameters})
    except ValueError:  # an option without a default
        return sorted(options)


def _first(*offered: str) -> Callable[[str], Iterator[str]]:
    return lambda rest: iter(() if " " in rest else offered)


def _drafters() -> list[str]:
    modelless = [name for name in names("drafter") if name not in MODEL_DRAFTERS]
    return [*BUILTIN, *(f"{name}@8192" for name in DRAFTERS), "none", *modelless]


VALUES: dict[str, Callable[[str], Iterator[str]]] = {
    "/policy": _strategy("policy", lambda: names("policy")),
    "/verifier": _strategy("verifier", lambda: names("verifier")),
    "/drafter": _strategy("drafter", _drafters),
    "/target": _first(*BUILTIN),
    "/gamma": _first("auto"),
    "/tokens": _first(*TOKENS),
    "/phases": _first("on", "off"),
    "/system": _first("none"),
    "/help": _first(*COMMANDS),
}
