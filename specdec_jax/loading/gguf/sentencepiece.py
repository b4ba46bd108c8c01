"""A SentencePiece tokenizer (Llama 2's, Gemma's) from GGUF metadata: pieces and their scores.

SentencePiece's BPE merges the two neighbours whose union has the highest score, whatever pieces they are, and so does
llama.cpp (`llm_tokenizer_spm`). As merges of `tokenizers` that is every way to cut a piece in two, by its score.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from specdec_jax.loading.gguf.reader import GGUF

SPACE = "▁"
NORMAL, UNUSED, BYTE = 1, 5, 6  # of tokenizer.ggml.token_type
SCORES, KINDS, ADD_PREFIX = (f"tokenizer.ggml.{name}" for name in ("scores", "token_type", "add_space_prefix"))
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
NO_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Gemma's pre-tokenizer, which finds no space where the normalizer has left none."""


def sentencepiece_backend(file: GGUF, tokens: list[str], vocabulary: dict[str, int]) -> Backend:
    """Pieces merged by score, characters without a piece as bytes, spaces as `▁`.

    Raises ValueError naming the file: missing scores or types, lists of another length.
    """
    scores, kinds = (_list(file, name, len(tokens)) for name in (SCORES, KINDS))
    pieces = {tokens[i]: float(scores[i]) for i in np.flatnonzero(kinds == NORMAL)}
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    unk = tokens[int(unknown)] if unknown is not None and int(unknown) < len(tokens) else None
    model: Any = models.BPE(vocabulary, merges(pieces), unk_token=unk, fuse_unk=True, byte_fallback=True)
    backend: Any = Backend(model)
    prefix = bool(file.metadata.get(ADD_PREFIX, True))
    backend.normalizer = normalizer(prefix)
    backend.decoder = decoder(prefix)
    return backend


def merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Every two pieces that make up a third, those of the highest score first."""
    found = [
        (score, piece[:i], piece[i:])
        for piece, score in pieces.items()
        for i in range(1, len(piece))
        if piece[:i] in pieces and piece[i:] in pieces
    ]
    found.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in found]


def normalizer(prefix: bool) -> Any:
    """Spaces as `▁`, and one in front where the model was trained so."""
    replace = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace


def decoder(prefix: bool) -> Any:
    """The way back: bytes become characters, and the space in front goes."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def sentencepiece_entries(state: dict[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """What GGUF says of such a tokenizer given as in tokenizer.json, with tokens and their types by id.

    Scores are the order of merges; pieces that nothing makes are unused. Raises ValueError for what would be lost,
    merges by another rule among it.
    """
    model = state["model"]
    prefix = state["normalizer"] == _state_of(True)["normalizer"]
    found = {name: state[name] for name in ("normalizer", "decoder") if state[name] != _state_of(prefix)[name]}
    found |= {f"model.{name}": model[name] for name in ("dropout", "ignore_merges") if model[name]}
    if state["pre_tokenizer"] not in (None, NO_SPACES):
        found["pre_tokenizer"] = state["pre_tokenizer"]
    if missing := [token for token in BYTES if token not in model["vocab"]]:
        found["model.vocab without"] = missing[0]
    check_stated(found)
    given: list[Any] = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    order = {union: -float(rank) for rank, union in enumerate(dict.fromkeys(map("".join, given)))}
    kinds = [
        _kind(token, token in order) if kind == NORMAL else kind for token, kind in zip(tokens, kinds, strict=True)
    ]
    scores = [order.get(token, -float(len(tokens))) for token in tokens]
    pieces = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    if _grouped(given) != _grouped(merges(pieces)):
        raise ValueError("a GGUF file cannot state the tokenizer's merges: they are not those of scored pieces")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        SCORES: scores,
        KINDS: kinds,
        ADD_PREFIX: prefix,
    }


def check_stated(found: Mapping[str, Any]) -> None:
    """Raises ValueError that names what was found and has no place in GGUF; nothing: it is stated."""
    if found:
        said = ", ".join(f"{name} {json.dumps(value)}" for name, value in found.items())
        raise ValueError(f"a GGUF file cannot state the tokenizer's {said}")


def _kind(token: str, merged: bool) -> int:
    """The type of a token that is neither special nor whole."""
    if token in BYTES:
        return BYTE
    return NORMAL if merged or len(token) == 1 else UNUSED


def _grouped(found: Iterable[tuple[str, str]]) -> list[tuple[str, set[tuple[str, str]]]]:
    """What comes of merges in their order, and out of which two; these in any order."""
    return [(union, set(group)) for union, group in itertools.groupby(found, "".join)]


def _state_of(prefix: bool) -> dict[str, Any]:
    backend: Any = Backend(models.BPE())
    backend.normalizer, backend.decoder = normalizer(prefix), decoder(prefix)
    return json.loads(backend.to_str())


def _list(file: GGUF, name: str, length: int) -> np.ndarray:
    values = file.metadata.get(name)
    if values is None:
        raise ValueError(f"{file.path} lacks {name}, without which its tokenizer cannot be rebuilt")
    if len(values) != length:
        raise ValueError(f"{file.path} has {len(values)} of {name} for {length} tokens")
    return np.asarray(values)
