"""Slash commands: their actions on a session, help, and completion."""

import difflib
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specdec_jax.app import comparing
from specdec_jax.app.chat import reports
from specdec_jax.app.chat.session import Session
from specdec_jax.text.escapes import shown
from specdec_jax.text.strategies import parse_call


@dataclass
class Chat:
    """A session and the display options set by commands."""

    session: Session
    tokens: str | None = None  # one of TOKENS; None: "all" for the first answer, then "on"
    ended: bool = False


TOKENS = ("all", "on", "off")  # coloured with rejected drafts, coloured without, not coloured
LOADING = "Loading"  # status of commands that load models


class Command(NamedTuple):
    """`run` takes the rest of the line and returns the output; after a ValueError or OSError nothing has changed."""

    usage: str
    help: str
    run: Callable[[Chat, str], RenderableType | None]
    slow: str = ""  # status message of slow commands


def find(line: str) -> tuple[Command, str]:
    """The command of a line and the rest of the line. Raises ValueError if there is no such command."""
    name, _, rest = line.strip().partition(" ")
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ValueError(f"unknown command {name}; " + (f"did you mean {close[0]!r}?" if close else "see /help"))
    return COMMANDS[name], rest.strip()


def _set(field: str, kind: Callable[[str], Any], usage: str, about: str, slow: str = "") -> Command:
    """A command for a number or text in the settings; without an argument it shows the value."""

    def change(chat: Chat, text: str) -> RenderableType:
        if text:
            chat.session.change(**{field: _number(field, text, kind)})
        if field == "max_draft_length":  # perhaps as chosen for this machine
            return Text(f"max-draft-length {chat.session.longest}")
        return _shown(chat, field)

    return Command(usage, about, change, slow)


def _number(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name.replace('_', '-')} must be {wanted}, got {text!r}") from None


def _shown(chat: Chat, *fields: str) -> Text:
    values = ((field.replace("_", "-"), getattr(chat.session.settings, field)) for field in fields)
    return Text(shown(", ".join(f"{name} {'none' if value is None else value}" for name, value in values)))


def _rule(kind: str) -> Callable[[Chat, str], RenderableType]:
    """/policy and /verifier: a strategy, or only options of the current one: key=value, key=value."""

    def change(chat: Chat, text: str) -> RenderableType:
        if re.match(r"[\w-]+\s*=", text):
            _, changes = parse_call(kind, f"{kind}({text})")
            name, arguments = parse_call(kind, getattr(chat.session.settings, kind))
            text = f"{name}({', '.join(f'{key}={value!r}' for key, value in {**arguments, **changes}.items())})"
        if text:
            chat.session.change(**{kind: text})
        return _shown(chat, kind)

    return change


def _target(chat: Chat, text: str) -> RenderableType:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot read {text!r}: {str(error).lower()}") from None
    if len(words) > 2:
        raise ValueError(f"/target takes a target and perhaps its drafter, got {len(words)} words")
    sources: dict[str, Any] = dict(zip(("target", "drafter"), words, strict=False))
    chat.session.change(**sources)
    return _shown(chat, "target", "drafter")


def _compare(chat: Chat, text: str) -> RenderableType:
    session = chat.session
    length = _number("the static length", text, int) if text else min(3, session.longest)
    rows = comparing.measure(session.methods(length))
    return comparing.table(rows, session.settings.temperature, session.pair.decoder.parts.verifier.lossless)


def _tokens(chat: Chat, text: str) -> RenderableType:
    if text and text not in TOKENS:
        raise ValueError(f"/tokens is all, on or off, got {text!r}")
    chat.tokens = text or chat.tokens
    return Text(f"tokens {chat.tokens or TOKENS[0]}")


def _phases(chat: Chat, text: str) -> RenderableType:
    if text not in ("", "on", "off"):
        raise ValueError(f"/phases is on, off or nothing, got {text!r}")
    if not text:
        return reports.phases(chat.session)
    chat.session.change(phases=text == "on")
    return Text("Phases are watched from the next answer on." if text == "on" else "phases off")


def _help(chat: Chat, text: str) -> RenderableType:
    del chat
    grid = Table.grid(padding=(0, 2))
    for command in [find("/" + text.removeprefix("/"))[0]] if text else COMMANDS.values():
        grid.add_row(Text(command.usage, "bold"), Text(command.help))
    if not text:
        grid.add_row("", Text("Alt-Enter is a new line, Tab completes, Ctrl-C stops an answer, Ctrl-D quits.", "dim"))
    return grid


def _alone(name: str, about: str, action: Callable[[Chat], RenderableType | None]) -> Command:
    """A command without arguments."""

    def run(chat: Chat, text: str) -> RenderableType | None:
        if text:
            raise ValueError(f"{name} takes nothing after it, got {text!r}")
        return action(chat)

    return Command(name, about, run)


_LIST = [
    Command("/policy NAME(key=value)", "when to stop drafting; key=value alone changes it", _rule("policy")),
    _set("max_draft_length", int, "/max-draft-length N", "most tokens drafted per round, whatever the policy"),
    _set("drafter", str, "/drafter NAME(key=value)", "another drafter, or several: a,b; none: plain decoding", LOADING),
    Command("/target NAME [DRAFTER]", "another target, with its drafter", _target, LOADING),
    Command("/verifier NAME(key=value)", "how drafts are verified", _rule("verifier")),
    _set("temperature", float, "/temperature X", "0 is greedy"),
    _set("top_k", int, "/top-k N", "only the N most probable tokens; 0 is off"),
    _set("top_p", float, "/top-p X", "only the most probable tokens up to this mass; 1 is off"),
    _set("min_p", float, "/min-p X", "only tokens of this share of the largest probability; 0 is off"),
    _set("max_new_tokens", int, "/max-new-tokens N", "most tokens of an answer"),
    _set("seed", int, "/seed N", "the same seed, rule and costs give the same tokens"),
    _set(
        "system",
        lambda text: None if text == "none" else text,
        "/system TEXT",
        "the system prompt; none: the template's own",
    ),
    Command("/compare [N]", "the last prompt with plain, static N and the current policy", _compare, "Comparing"),
    _alone("/stats", "the settings and the statistics of the last answer", lambda chat: reports.stats(chat.session)),
    Command("/tokens all|on|off", "colour tokens: accepted, recovered, bonus; all: rejected drafts too", _tokens),
    Command("/phases [on|off]", "watch routine and reasoning phases; alone it shows the last answer's", _phases),
    Command(
        "/save FILE.html", "the last answer as a page", lambda chat, text: reports.save(chat.session, text), "Saving"
    ),
    _alone("/reset", "begin a new conversation", lambda chat: chat.session.reset() or Text("A new conversation.")),
    Command("/help [COMMAND]", "this list", _help),
    _alone("/quit", "leave", lambda chat: setattr(chat, "ended", True)),
]
COMMANDS = {command.usage.split()[0]: command for command in _LIST}
