"""Tokens on a terminal: accepted drafts, the target's own tokens, and rejected drafts struck out."""

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.cells import cell_len
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


def visible(piece: Piece) -> str:
    """A piece's text, as `shown`; line breaks in rejected drafts are replaced."""
    text = shown(piece.text)
    return text.replace("\n", "↵") if piece.kind == "rejected" else text


def ansi(pieces: Sequence[Piece]) -> str:
    """Pieces with escape codes, to be written directly: `Console.print` would expand tabs within each piece."""
    return "".join(_styled(visible(piece), piece.kind, True) for piece in pieces)


class Wrapping:
    """Streamed text for a terminal, with line breaks between words.

    A word is written as it arrives. If it reaches the right edge, it is erased and begins the next line; a word wider
    than a line is broken, as by the terminal.
    """

    def __init__(self, width: Callable[[], int]):
        self._width = width  # columns; evaluated for every piece, because windows change
        self._column = 0
        self._word: list[Piece] = []  # the written part of the last word, one piece per character

    def add(self, pieces: Sequence[Piece], styled: bool = True) -> str:
        """The text to write for these pieces; without colours unless `styled`."""
        out: list[Piece] = []
        for piece in pieces:
            for text in visible(piece):
                width, character = self._width(), Piece(text, piece.kind)
                if text == "\n":
                    out.append(Piece("\n", ""))
                    self._column, self._word = 0, []
                    continue
                size = 8 - self._column % 8 if text == "\t" else cell_len(text)
                if text.isspace():
                    self._word = []
                    if self._column + size <= width:  # a space that does not fit becomes the line break
                        out.append(character)
                        self._column += size
                    continue
                if self._column + size >= width:  # the last column stays free, where the cursor's line is ambiguous
                    written = sum(cell_len(each.text) for each in self._word)
                    if written == self._column:  # a word wider than the line
                        self._word, written = [], 0
                    out += [Piece(f"\x1b[{written}D\x1b[K" * bool(written) + "\n", ""), *self._word]
                    self._column = written
                out.append(character)
                self._word.append(character)
                self._column += size
        runs = groupby(out, key=lambda each: each.kind)
        return "".join(_styled("".join(each.text for each in run), kind, styled) for kind, run in runs)


def wrapping_on(console: Console) -> Wrapping | None:
    """For text that is streamed to this console; None if it is not a terminal that can erase."""
    return Wrapping(lambda: console.width) if console.is_terminal and not console.is_dumb_terminal else None


def streamed(pieces: Sequence[Piece], text: str, styled: bool, wrapping: Wrapping | None) -> str:
    """What to write for the next part of an answer: its pieces if `styled`, else its `text`."""
    if wrapping is not None:
        return wrapping.add(pieces if styled else [Piece(text, "accepted")], styled)
    return ansi(pieces) if styled else printed(text)


def _styled(text: str, kind: str, styled: bool) -> str:
    return Style.parse(STYLES[kind]).render(text, color_system=ColorSystem.STANDARD) if styled and kind else text


def legend(branches: bool = False) -> Text:
    """The colours with their meanings, on one line; `branches`: for policies whose drafts are trees."""
    kinds = [kind for kind in LEGEND if branches or kind != "branch"]
    return Text("   ").join(Text(LEGEND[kind], STYLES[kind]) for kind in kinds)
