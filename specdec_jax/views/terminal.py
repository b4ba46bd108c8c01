"""Tokens on a terminal: accepted drafts, the target's own tokens, and rejected drafts struck out."""

from collections.abc import Callable, Iterable

from rich.text import Text

from specdec_jax.streaming import Chunk

STYLES = {"accepted": "green", "recovered": "bold yellow", "bonus": "bold cyan", "rejected": "strike dim red"}
LEGEND = {
    "accepted": "accepted draft",
    "recovered": "recovered by the target",
    "bonus": "bonus of the target",
    "rejected": "rejected draft",
}


def coloured_chunk(chunk: Chunk, decode: Callable[[list[int]], str], show_rejected: bool = True) -> Text:
    """One round as styled text: its rejected drafts stand, struck out, before the token that replaced them.

    Tokens are decoded one by one for their colour; where a character is spread over tokens the pieces join into the
    first one's colour. `decode` turns ids into text.
    """
    text = Text()
    pieces = split_by_token(chunk.tokens, decode)
    for piece, kind in zip(pieces, chunk.kinds, strict=True):
        if kind == "recovered" and show_rejected and chunk.rejected:
            text.append(decode(chunk.rejected), STYLES["rejected"])
        text.append(piece, STYLES[kind])
    return text


def split_by_token(tokens: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Each token's share of the text of all of them; a token inside a character gets the empty string."""
    pieces, known = [], ""
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[:end])
        text = "" if text.endswith("\ufffd") and end < len(tokens) else text
        pieces.append(text[len(known) :] if text.startswith(known) else "")
        known = text if text.startswith(known) else known
    return pieces


def legend() -> Text:
    """The four colours and what they mean, on one line."""
    text = Text()
    for name, meaning in LEGEND.items():
        text.append(f"{meaning}   " if name != "rejected" else meaning, STYLES[name])
    return text


def coloured(chunks: Iterable[Chunk], decode: Callable[[list[int]], str]) -> Text:
    """A whole generation as styled text."""
    text = Text()
    for chunk in chunks:
        text.append_text(coloured_chunk(chunk, decode))
    return text
