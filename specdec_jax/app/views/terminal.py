"""Tokens on a terminal: accepted drafts, the target's own tokens, and rejected drafts struck out."""

from collections.abc import Sequence

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from specdec_jax.app.views.escapes import printed, shown
from specdec_jax.text.streaming import Piece

STYLES = {
    "accepted": "green",
    "branch": "bold magenta",
    "recovered": "bold yellow",
    "bonus": "bold cyan",
    "rejected": "strike dim red",
}
LEGEND = {
    "accepted": "accepted draft",
    "branch": "accepted in place of a rejected draft",
    "recovered": "recovered by the target",
    "bonus": "bonus of the target",
    "rejected": "rejected draft",
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
    return "".join(Style.parse(STYLES[kind]).render(part, color_system=ColorSystem.STANDARD) for part, kind in parts)


def legend(branches: bool = False) -> Text:
    """The colours with their meanings, on one line; `branches`: for policies whose drafts are trees."""
    kinds = [kind for kind in LEGEND if branches or kind != "branch"]
    return Text("   ").join(Text(LEGEND[kind], STYLES[kind]) for kind in kinds)
