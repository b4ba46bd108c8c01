"""The terminal of a session: reads lines, prints tokens as they are accepted, runs slash commands."""

import contextlib
import os
import sys
import termios
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from rich.console import Console
from rich.text import Text

from specdec_jax.app.chat.commands import COMMANDS, LOADING, TOKENS, Chat, find
from specdec_jax.app.chat.reports import describe
from specdec_jax.app.chat.session import Session
from specdec_jax.app.settings import Settings, download_models
from specdec_jax.app.views.printing import (
    error_console,
    interrupts_end_here,
    legend,
    shows_colours,
    status,
    streamed,
    summary,
)
from specdec_jax.compilation_cache import describe_cache, enable
from specdec_jax.decoding.user_code import describe_error
from specdec_jax.loading import download, refuse_encoders
from specdec_jax.loading.builtin import BUILTIN, DRAFTERS
from specdec_jax.text.citations import citations
from specdec_jax.text.escapes import error_line
from specdec_jax.text.pair import modelless, split_drafters
from specdec_jax.text.strategies import names
from specdec_jax.text.streaming import Piece

BAD_INPUT = 2
AGAIN = "(Ctrl-C once more, Ctrl-D or /quit leaves)"
HIDDEN = "[rejected drafts are hidden from now on; /tokens all shows them]"


def talk(settings: Settings, cite: bool = False) -> int:
    """The `chat` command: loads the models and runs the chat. Returns 2 if a line of a script was refused.

    Raises ValueError, OSError: models that cannot be loaded, or a closed standard input.
    """
    if sys.stdin is None:  # standard input is closed
        raise ValueError("standard input is closed: a chat reads its messages from it")
    folder = enable()
    with interrupts_end_here():
        refuse_encoders("chat", settings.target)  # before its weights are downloaded
        download_models(settings)
        with status(f"Loading {settings.target} and {settings.drafter}"):
            chat = Chat(Session(settings))
    if cite:
        print(citations(chat.session.pair), file=sys.stderr)
    terminal = Terminal(chat, describe_cache(folder))
    by_hand = sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    return terminal.by_hand() if by_hand else terminal.from_script(sys.stdin)


class Terminal:
    """Output of a Chat: text to standard output, errors (and in scripts statistics) to standard error."""

    def __init__(self, chat: Chat, cache_note: str):
        self._chat, self._cache_note = chat, cache_note  # location of compiled programs, for status messages
        self._console = Console(highlight=False)
        self._errors = error_console()
        self._colours = shows_colours(self._console)

    def by_hand(self) -> int:
        """Prompts until /quit, Ctrl-D, or Ctrl-C twice."""
        self._console.print(Text(describe(self._chat.session.settings)))
        if self._colours:
            self._console.print(legend(not self._chat.session.pair.policy.drafts_chains))
        self._note("Alt-Enter is a new line, Ctrl-C stops an answer, /help lists the commands.")
        prompts = prompt_session(lambda: describe(self._chat.session.settings))
        pressed = False  # Ctrl-C, just before
        while not self._chat.ended:
            try:
                line, pressed = prompts.prompt("> "), False
            except KeyboardInterrupt:
                if pressed:
                    break
                pressed = True
                self._note(AGAIN)
                continue
            except EOFError:
                break
            before = termios.tcgetattr(sys.stdin)  # the terminal does not show keys now; the next prompt reads them
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
            try:
                self._obey(line)
            finally:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        return 0

    def from_script(self, lines: Iterable[str]) -> int:
        """Runs the lines without colours or prompts. Ctrl-C ends it."""
        good = True
        for line in lines:
            good = self._obey(line.rstrip("\n"), script=True) and good
            if self._chat.ended:
                break
        return 0 if good else BAD_INPUT

    def _obey(self, line: str, script: bool = False) -> bool:
        """Runs a command or sends a message; False: it was refused, and nothing has changed."""
        try:
            if line.startswith("/"):
                command, rest = find(line)
                if command.slow == LOADING:
                    download(*(name for word in rest.split() for name in split_drafters(word)))
                with status(command.slow) if command.slow else contextlib.nullcontext():
                    shown = command.run(self._chat, rest)
                if shown is not None:
                    self._console.print(shown)
            elif line.strip():
                self._decode(line, script)
        except Exception as error:  # a user's file may raise any error in decoding; the chat continues
            message = str(error) if isinstance(error, OSError) else describe_error(error)
            self._errors.print(Text(error_line(message), "red" if self._colours else ""))
            return False
        except KeyboardInterrupt:
            if script:
                raise
            self._note("interrupted")
        return True

    def _decode(self, question: str, script: bool) -> None:
        session, before = self._chat.session, self._chat.session.last
        try:
            with contextlib.closing(session.answer(question)) as chunks:  # type: ignore[type-var]
                first = None
                try:
                    with status(f"Thinking; what compiles is {self._cache_note}"):
                        first = next(chunks, None)
                finally:
                    if first is not None:
                        self._print(first.pieces, first.text)
                for chunk in chunks:
                    self._print(chunk.pieces, chunk.text)
        finally:
            if session.last is not before and session.last is not None:
                print(flush=True)
                console = self._errors if script else self._console
                console.print(Text(summary(session.last.result), "dim"), soft_wrap=script)
                if self._chat.tokens is None and self._colours:
                    console.print(Text(HIDDEN, "dim"), soft_wrap=script)
                self._chat.tokens = self._chat.tokens or "on"

    def _print(self, pieces: list[Piece], text: str) -> None:
        tokens = self._chat.tokens or "all"
        pieces = [piece for piece in pieces if tokens == "all" or piece.kind != "rejected"]
        print(streamed(pieces, text, self._colours and tokens != "off"), end="", flush=True)

    def _note(self, text: str) -> None:
        self._console.print(Text(text, "dim"))


def prompt_session(toolbar: Callable[[], str]) -> PromptSession[str]:
    """prompt_toolkit's session: Enter sends, Alt-Enter is a new line, pasted lines stay lines, Tab completes."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=open_history(),
        completer=_Completer(),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        bottom_toolbar=lambda: toolbar(),
        reserve_space_for_menu=6,
    )


def open_history() -> History:
    """Earlier lines, from a file in the user's state folder ($XDG_STATE_HOME); none if it cannot be written."""
    folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(folder).expanduser() / "specdec_jax" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


class _Completer(Completer):
    def get_completions(self, document: Document, complete_event: Any) -> Iterable[Completion]:
        return complete(document.text_before_cursor)


def complete(before: str) -> list[Completion]:
    """Completions of a line with the text `before` the cursor: commands and values. Empty if it is not a command."""
    if not before.startswith("/") or "\n" in before:
        return []
    command, space, rest = before.partition(" ")
    if not space:
        listed = [(name, command.help) for name, command in COMMANDS.items() if name.startswith(before)]
        return [Completion(name, -len(before), display_meta=about) for name, about in listed]
    offered = VALUES[command]() if command in VALUES else ()
    return [Completion(text, -len(rest)) for text in offered if text.startswith(rest)]


VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "/policy": lambda: names("policy"),
    "/verifier": lambda: names("verifier"),
    "/drafter": lambda: [*BUILTIN, *(f"{name}@8192" for name in DRAFTERS), "none", *modelless()],
    "/target": lambda: BUILTIN,
    "/tokens": lambda: TOKENS,
    "/phases": lambda: ("on", "off"),
    "/system": lambda: ("none",),
    "/help": lambda: COMMANDS,
}
