"""Tokens on a terminal: accepted drafts, the target's own tokens, and rejected drafts struck out."""

from collections.abc import Sequence

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from specdec_jax.streaming import Piece

STYLES = {"accepted": "green", "recovered": "bold yellow", "bonus": "bold cyan", "rejected": "strike dim red"}
LEGEND = {
    "accepted": "accepted draft",
    "recovered": "recovered by the target",
    "bonus": "bonus of the target",
    "rejected": "rejected draft",
}


def shows_colours(console: Console) -> bool:
    """Whether escape codes are wanted where the console writes: a terminal, not a dumb one, and NO_COLOR not set."""
    return console.is_terminal and not console.no_color and console.color_system is not None


def visible(piece: Piece) -> str:
    """Its text; a rejected draft breaks no line, and an escape code the model wrote is shown, not obeyed."""
    text = piece.text.replace("\x1b", "␛")
    return text.replace("\n", "↵") if piece.kind == "rejected" else text


def coloured(pieces: Sequence[Piece], show_rejected: bool = True) -> Text:
    """Pieces as rich's styled text, for panels and tables."""
    text = Text()
    for piece in pieces:
        if show_rejected or piece.kind != "rejected":
            text.append(visible(piece), STYLES[piece.kind])
    return text


def ansi(pieces: Sequence[Piece], show_rejected: bool = True) -> str:
    """Pieces with escape codes, to be written as they are: `Console.print` would expand tabs within each piece."""
    return "".join(
        Style.parse(STYLES[piece.kind]).render(visible(piece), color_system=ColorSystem.STANDARD)
        for piece in pieces
        if show_rejected or piece.kind != "rejected"
    )


def legend(show_rejected: bool = True) -> Text:
    """The colours and what they mean, on one line."""
    kinds = [kind for kind in LEGEND if show_rejected or kind != "rejected"]
    return Text("   ").join(Text(LEGEND[kind], STYLES[kind]) for kind in kinds)
