"""A SentencePiece tokenizer (Llama 2's, Gemma's) from GGUF metadata: pieces and their scores.

SentencePiece's BPE merges the two neighbours whose union has the highest score, and so does llama.cpp
(`llm_tokenizer_spm`). For `tokenizers` the merges are all splits of every piece in two, in order of its score.
"""

from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from specdec_jax.loading.gguf.reader import GGUF

SPACE = "▁"
NORMAL = 1  # value of tokenizer.ggml.token_type
SCORES, KINDS, ADD_PREFIX = (f"tokenizer.ggml.{name}" for name in ("scores", "token_type", "add_space_prefix"))


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
    """All pairs of pieces whose union is a piece, highest score first."""
    ranked = [
        (score, piece[:i], piece[i:])
        for piece, score in pieces.items()
        for i in range(1, len(piece))
        if piece[:i] in pieces and piece[i:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in ranked]


def normalizer(prefix: bool) -> Any:
    """Replaces spaces by `▁`, with a prefix for models trained with one."""
    replace = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace


def decoder(prefix: bool) -> Any:
    """The inverse: bytes become characters, and the prefix is removed."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _list(file: GGUF, name: str, length: int) -> np.ndarray:
    values = file.metadata.get(name)
    if values is None:
        raise ValueError(f"{file.path} lacks {name}, without which its tokenizer cannot be rebuilt")
    if len(values) != length:
        raise ValueError(f"{file.path} has {len(values)} of {name} for {length} tokens")
    return np.asarray(values)
