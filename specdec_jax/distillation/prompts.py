"""Requests that start conversations: templates over pools of words and documents, and files of prompts.

They are varied, because a drafter is only good on kinds of text seen in training (the first one of this project,
trained on one kind, had a greedy agreement of 0.43 there and 0.05 on translation).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec_jax.text.json_lines import json_lines
from specdec_jax.text.prompt_file import prompt_of

WINDOW = 8  # consecutive words that a text must not share with a held-out one
_FIELD = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Openings:
    """One kind of request. Raises ValueError for invalid numbers.

    `texts`: templates with `{pool}` fields; `open`: the model continues as the user for at most `turn_limit` tokens;
    `long`: requires long rows; `weight`: relative share of conversations.
    """

    kind: str
    texts: tuple[str, ...]
    weight: float = 1.0
    open: bool = False
    turn_limit: int = 0
    long: bool = False

    def __post_init__(self):
        if not self.texts:
            raise ValueError(f"openings of kind {self.kind!r} have no texts")
        if not self.weight > 0:
            raise ValueError(f"weight of openings {self.kind!r} must be positive, got {self.weight!r}")
        if self.open and self.turn_limit < 1:
            raise ValueError(f"open openings {self.kind!r} need a positive turn_limit, got {self.turn_limit!r}")


def read_openings(path: str | Path) -> tuple[tuple[Openings, ...], dict[str, list[str]]]:
    """The openings and pools of a JSON file, `{"pools": {name: [text, ...]}, "openings": [{"kind": ..., "texts": [...],
    ...}]}`. Raises FileNotFoundError, or ValueError naming the file and the error."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file of openings: {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        openings = tuple(Openings(**entry | {"texts": tuple(entry["texts"])}) for entry in content["openings"])
        return openings, {name: [str(text) for text in pool] for name, pool in content.get("pools", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no file of openings: {type(error).__name__}: {error}") from None


class Request(NamedTuple):
    """A user's turn, complete or partial."""

    kind: str
    text: str
    open: bool
    turn_limit: int
    long: bool


class RequestSource:
    """Draws requests. `pools` maps a name in braces to texts; `documents` are cut to a random length.

    Raises ValueError for a template with an unknown pool.
    """

    def __init__(
        self,
        openings: Sequence[Openings],
        pools: Mapping[str, Sequence[str]],
        documents: Sequence[str] = (),
        *,
        document_words: tuple[int, int] = (50, 420),
    ):
        self._pools = {name: list(pool) for name, pool in pools.items()}
        self._documents, self._words = list(documents), document_words
        self._openings = [entry for entry in openings if self._served(entry)]
        if not self._openings:
            raise ValueError("no openings can be filled: give documents, or openings that need none")

    def _served(self, entry: Openings) -> bool:
        """Whether all its fields can be filled, which for documents requires some."""
        for text in entry.texts:
            for name in _FIELD.findall(text):
                if name in ("document", "beginning"):
                    if not self._documents:
                        return False
                elif name != "n" and not self._pools.get(name):
                    raise ValueError(f"openings {entry.kind!r} name the pool {name!r}, which is empty or unknown")
        return True

    def draw(self, rng: np.random.Generator, *, long: bool) -> Request:
        """One request of the long or the short kinds. Raises ValueError if there is none."""
        entries = [entry for entry in self._openings if entry.long == long]
        if not entries:
            raise ValueError(f"no openings with long={long}")
        weights = np.array([entry.weight for entry in entries])
        entry = entries[rng.choice(len(entries), p=weights / weights.sum())]
        template = entry.texts[rng.integers(len(entry.texts))]
        text = _FIELD.sub(lambda match: self._fill(match[1], rng), template)
        return Request(entry.kind, text, entry.open, entry.turn_limit, entry.long)

    def _fill(self, name: str, rng: np.random.Generator) -> str:
        if name == "n":
            return str(rng.integers(2, 100))
        if name in ("document", "beginning"):
            return self._document(rng, short=name == "beginning")
        pool = self._pools[name]
        return pool[rng.integers(len(pool))]

    def _document(self, rng: np.random.Generator, *, short: bool) -> str:
        """Words of documents, the first from the start of a random sentence; their number is uniform on a log scale."""
        low, high = (12, 40) if short else self._words
        wanted, words = int(np.exp(rng.uniform(np.log(low), np.log(high)))), []
        while len(words) < wanted:
            document = self._documents[rng.integers(len(self._documents))].split(" ")
            starts = [0, *(at for at, word in enumerate(document[:-1], start=1) if word.endswith((".", "?", "!")))]
            words += document if words else document[starts[rng.integers(len(starts))] :]
        return " ".join(words[:wanted])


class HeldOut:
    """Texts that are held out: data that shares `WINDOW` consecutive words with one of them is refused."""

    def __init__(self, texts: Iterable[str]):
        self._windows = {window for text in texts for window in _windows(text)}

    def touches(self, text: str) -> bool:
        """Whether the text shares a window of words with a held-out text."""
        return any(window in self._windows for window in _windows(text))


def _windows(text: str) -> list[tuple[str, ...]]:
    """All windows of WINDOW consecutive words, or the whole of a shorter text (none for two words or fewer)."""
    words = _WORD.findall(text.lower())
    if len(words) < WINDOW:
        return [tuple(words)] if len(words) > 2 else []
    return [tuple(words[i : i + WINDOW]) for i in range(len(words) - WINDOW + 1)]


def read_texts(path: str | Path) -> list[str]:
    """Texts of a file: a .jsonl with `text`, `turns` or `prompt` in every line; or the paragraphs of plain text.

    Raises FileNotFoundError, or ValueError naming file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file of texts: {path}")
    if path.suffix != ".jsonl":
        content = path.read_text(encoding="utf-8", errors="replace")
        return [paragraph.strip() for paragraph in re.split(r"\n\s*\n", content) if paragraph.strip()]
    return [text for number, row in json_lines(path) for text in prompt_of(row, f"{path}:{number}: ").turns]
