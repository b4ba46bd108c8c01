"""The output of commands: text by kind of token, coloured on a terminal, or one JSON object; tables, progress bars."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from specdec_jax.text.escapes import printed, shown
from specdec_jax.text.generation import Generation
from specdec_jax.text.json_lines import json_text
from specdec_jax.text.streaming import Piece, Stream

KINDS = {
    "accepted": ("green", "accepted draft"),
    "branch": ("bold magenta", "accepted in place of a rejected draft"),
    "recovered": ("bold yellow", "recovered by the target"),
    "bonus": ("bold cyan", "bonus of the target"),
    "rejected": ("strike dim red", "rejected draft"),
}
"""Style and meaning of each kind of token on a terminal."""

ENDS = {
    "stop": "ended",
    "stop_string": "ended by a stop string",
    "length": "reached max-new-tokens",
    "interrupted": "interrupted",
}


def shows_colours(console: Console) -> bool:
    """Whether the console supports escape codes: a terminal, not a dumb one, and NO_COLOR not set."""
    return console.is_terminal and not console.no_color and console.color_system is not None


def error_console() -> Console:
    """Standard error; on a terminal lines break between words, elsewhere not at all."""
    return Console(stderr=True, highlight=False, soft_wrap=not Console(stderr=True).is_terminal)


def streamed(pieces: Sequence[Piece], text: str, styled: bool) -> str:
    """What to write for the next part of an answer: its pieces with escape codes if `styled`, else its `text`.

    Line breaks in rejected drafts are replaced. To be written directly: `Console.print` would expand tabs.
    """
    if not styled:
        return printed(text)
    parts = ((shown(text).replace("\n", "↵") if kind == "rejected" else shown(text), kind) for text, kind in pieces)
    return "".join(Style.parse(KINDS[kind][0]).render(part, color_system=ColorSystem.STANDARD) for part, kind in parts)


def legend(branches: bool = False) -> Text:
    """The colours with their meanings, on one line; `branches`: for policies whose drafts are trees."""
    return Text("   ").join(
        Text(meaning, style) for kind, (style, meaning) in KINDS.items() if branches or kind != "branch"
    )


def print_stream(chunks: Stream, *, statistics: bool = True) -> bool:
    """Prints the text to standard output while it is decoded, then a line of statistics to standard error; returns
    whether it finished.
    """
    colours, finished = shows_colours(Console()), False
    with contextlib.suppress(KeyboardInterrupt):
        for chunk in chunks:
            print(streamed(chunk.pieces, chunk.text, colours), end="", flush=True)
        finished = True
    print(flush=True)
    console = error_console()
    if colours and statistics:
        console.print(legend(not chunks.pair.policy.drafts_chains))
    if statistics:
        console.print(Text(summary(chunks.result(), chunks.pair.drafter_cost), "dim"))
    return finished


def print_json(chunks: Stream, record: bool = False) -> bool:
    """Prints the Generation as one line of JSON, after Ctrl-C the part so far; returns whether it finished."""
    finished = False
    with contextlib.suppress(KeyboardInterrupt):
        for _ in chunks:
            pass
        finished = True
    result = chunks.result()._replace(**{} if record else {"rounds": None})
    fields = {name: value for name, value in result._asdict().items() if value is not None}  # requested fields only
    print(printed(json_text(fields)), flush=True)
    return finished


def summary(result: Generation, drafter_cost: float | None = None) -> str:
    """One line: tokens, speed, acceptance of drafts, compile time, finish reason.

    With `drafter_cost` (a drafter pass in target passes) also the predicted speed-up over plain decoding.
    """
    figures, count = result.statistics, len(result.tokens)
    parts = [f"{count} tokens"]
    if result.seconds > 0:
        parts.append(f"{count / result.seconds:.1f} tokens/s")
    if figures["num_draft_tokens"]:
        parts += [
            f"{figures['draft_acceptance_rate']:.0%} of drafts accepted",
            "{mean_draft_length:.2f} drafts, {mean_acceptance_length:.2f} tokens a drafting round".format_map(figures),
        ]
    elif figures["drafter_passes"]:
        parts.append(f"nothing drafted in {figures['drafter_passes']} drafter passes: try a lower threshold")
    if drafter_cost is not None and figures["num_rounds"]:
        passes = figures["num_rounds"] + drafter_cost * figures["drafter_passes"]
        speedup = figures["num_emitted_tokens"] / passes
        parts.append(f"predicted {speedup:.2f} times plain decoding (--compare measures)")
    if figures["num_reasoning_tokens"]:
        parts.append(f"{figures['num_reasoning_tokens'] / max(count, 1):.0%} in reasoning phases")
    if result.compile_seconds:
        parts.append(f"compiled in {result.compile_seconds:.1f} s")
    return "[" + ", ".join([*parts, ENDS[result.finish_reason]]) + "]"


def columns(*heads: str, texts: int = 0, **options: Any) -> Table:
    """A table without a frame whose first `texts` columns are words and the others numbers; `options` are rich's."""
    sides = ["left"] * texts + ["right"] * (len(heads) - texts)
    each = [Column(head, justify=side) for head, side in zip(heads, sides, strict=True)]  # type: ignore[arg-type]
    return Table(*each, box=box.SIMPLE_HEAD, show_edge=False, **options)


def progress(console: Console, **options: Any) -> Progress:
    """A progress bar with count, elapsed and remaining time; `options` are rich's."""
    description = TextColumn("{task.description:44s}", markup=False)
    rest = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(description, *rest, console=console, **options)


def status(message: str) -> contextlib.AbstractContextManager[Any]:
    """A spinner with a clock on standard error; nothing if that is not a terminal."""
    console = _Console(stderr=True)
    return console.status(_Timed(message, time.monotonic())) if console.is_terminal else contextlib.nullcontext()


@contextlib.contextmanager
def interrupts_end_here() -> Iterator[None]:
    """Ctrl-C ends the process at once, by the system's default action: Python would wait until XLA has compiled.

    Only for work without unsaved results, in the main thread. A handler other than Python's own stays.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor visible, because an interrupted process cannot show it again."""
        return False


class _Timed(NamedTuple):
    """A message with the seconds since it began."""

    message: str
    begun: float

    def __rich__(self) -> Text:
        return Text(f"{shown(self.message)} ({time.monotonic() - self.begun:.0f} s)")
