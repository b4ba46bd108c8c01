"""A target's byte-pair encoding, and a drafter's tokens as bytes, as tables for byte_pairs.py.

- Words are derived from the pre-tokenizer's splits of short texts of two or three kinds of bytes (letters, digits ...).
- Characters that are tokens, in tokenizers that start from characters (SentencePiece's), are merged from their bytes
  first; parts of characters have ids beyond the vocabulary.
- Added tokens that are runs of one character (Gemma's spaces and line feeds) are merged to the longest run.
"""

import json
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from tokenizers import models

from specdec_jax.contrib.retokenized.byte_pairs import KINDS, NONE, TEXT, Tables, hashed
from specdec_jax.loading.token_keys import ids_by_key, ids_in, is_byte_level, keys_of
from specdec_jax.loading.tokenizer import Tokenizer

LONGEST = 32  # maximum bytes of a drafter's token; longer ones are never proposed
LETTER, DIGIT, LINE, BLANK, OTHER, APOSTROPHE = range(KINDS)
PROBES = {LETTER: "b", DIGIT: "5", LINE: "\n", BLANK: " ", OTHER: "%", APOSTROPHE: "'"}

Merges = dict[tuple[int, int], tuple[int, int]]  # pair of ids -> rank and union


def is_bpe(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer uses merges, which the tables can represent."""
    return isinstance(tokenizer.backend.model, models.BPE)


def check_target(target: Tokenizer) -> None:
    """Raises ValueError for a tokenizer of another kind than byte-pair encoding."""
    if not is_bpe(target):
        kind = type(target.backend.model).__name__
        raise ValueError(f"text is tokenised again by byte-pair encoding, and the target's tokenizer is {kind}")


def tables(target: Tokenizer, drafter: Tokenizer, rows: int) -> Tables:
    """The tables for converting text of the drafter's U = `rows` tokens to the target's tokens.

    Raises:
        ValueError: as `check_target`.
    """
    check_target(target)
    text, size, whole = _texts(drafter, target, rows)
    ids = ids_by_key(target)
    single = np.array([ids.get(bytes([byte]), NONE) for byte in range(256)], np.int32)
    start, merges, longest = _by_hash(_merges(target, single))
    kinds = np.array([_kind(byte) for byte in range(256)], np.int32)
    probes = np.arange(longest, dtype=np.int32)
    return Tables(*map(jnp.asarray, (text, size, whole, single, kinds, _splits(target), start, merges, probes)))


def _texts(drafter: Tokenizer, target: Tokenizer, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(text [U, L], size [U], whole [U]) as in `Tables`."""
    keys = {token: key for token, key in keys_of(drafter).items() if token < rows}
    texts = {token: key for token, key in keys.items() if isinstance(key, bytes) and 0 < len(key) <= LONGEST}
    text = np.zeros((rows, max(map(len, texts.values()))), np.uint8)
    size, whole = np.ones(rows, np.int32), np.full(rows, NONE, np.int32)
    for token, key in texts.items():
        text[token, : len(key)], size[token], whole[token] = list(key), len(key), TEXT
    ids = ids_in(target, drafter)
    for token, key in keys.items():
        if isinstance(key, str):
            whole[token] = ids.get(key, NONE)
    return text, size, whole


def _merges(tokenizer: Tokenizer, single: np.ndarray) -> Merges:
    """The tokenizer's merges, with ranks from 0."""
    vocabulary, added = tokenizer.vocabulary(), tokenizer.backend.get_added_tokens_decoder().keys()
    unions = dict(_runs(tokenizer, single))
    unions |= {} if is_byte_level(tokenizer) else dict(_characters(tokenizer, single))
    for merge in json.loads(tokenizer.backend.model.__getstate__())["merges"]:
        first, other = merge.split(" ") if isinstance(merge, str) else merge
        left, right, union = vocabulary[first], vocabulary[other], vocabulary[first + other]
        if added.isdisjoint((left, right, union)):  # added tokens are extracted before merging
            unions.setdefault((left, right), union)
    return {pair: (rank, union) for rank, (pair, union) in enumerate(unions.items())}


def _runs(tokenizer: Tokenizer, single: np.ndarray) -> Iterator[tuple[tuple[int, int], int]]:
    """Added tokens of one repeated byte, the longest first, so that a run grows before another begins."""
    ids, keys = ids_by_key(tokenizer), keys_of(tokenizer)
    added = (keys[i] for i, token in tokenizer.backend.get_added_tokens_decoder().items() if not token.special)
    runs = {key for key in added if isinstance(key, bytes) and len(key) > 1 and len(set(key)) == 1}
    for run in sorted(runs, key=len, reverse=True):
        if run[:-1] in ids and single[run[0]] != NONE:
            yield (ids[run[:-1]], int(single[run[0]])), ids[run]


def _characters(tokenizer: Tokenizer, single: np.ndarray) -> Iterator[tuple[tuple[int, int], int]]:
    """The bytes of characters that are tokens."""
    keys = keys_of(tokenizer)
    beyond, halves = max(keys) + 1, dict[bytes, int]()
    for token, key in keys.items():
        if not isinstance(key, bytes) or not _is_long_character(key) or NONE in single[list(key)]:
            continue
        left = int(single[key[0]])
        for end in range(2, len(key) + 1):
            union = token if end == len(key) else halves.setdefault(key[:end], beyond + len(halves))
            yield (left, int(single[key[end - 1]])), union
            left = union


def _is_long_character(key: bytes) -> bool:
    """Whether the bytes are a single character of two or more bytes."""
    try:
        return 2 <= len(key) <= 4 and len(key.decode()) == 1
    except UnicodeDecodeError:
        return False


def _by_hash(merges: Merges) -> tuple[np.ndarray, np.ndarray, int]:
    """(start [2^h + 1], merges [N, 4], largest number of merges with the same hash value)."""
    entries = np.array([(*pair, *value) for pair, value in merges.items()], np.int32).reshape(-1, 4)
    entries = np.full((1, 4), NONE, np.int32) if not len(entries) else entries  # nothing merges with nothing
    buckets = 1 << (len(entries) - 1).bit_length()
    values = hashed(entries[:, 0].astype(np.uint32), entries[:, 1].astype(np.uint32), buckets)
    counts = np.bincount(values, minlength=buckets)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return start, entries[np.argsort(values, kind="stable")], int(counts.max())


def _kind(byte: int) -> int:
    character = chr(byte)
    if byte >= 128 or character.isalpha():
        return LETTER
    if character.isdigit():
        return DIGIT
    return {"\n": LINE, "\r": LINE, " ": BLANK, "\t": BLANK, "'": APOSTROPHE}.get(character, OTHER)


def _splits(tokenizer: Tokenizer) -> np.ndarray:
    """[KINDS, KINDS, KINDS + 1] bool, as in `Tables`."""
    splits = np.zeros((KINDS, KINDS, KINDS + 1), bool)
    normalizer, splitter = tokenizer.backend.normalizer, tokenizer.backend.pre_tokenizer
    if splitter is None:
        return splits
    for before, first in PROBES.items():
        for here, other in PROBES.items():
            for after, third in (PROBES | {KINDS: ""}).items():
                probe = first + other + third
                normal = probe if normalizer is None else normalizer.normalize_str(probe)
                at = len(normal) - len(other + third)  # there may be a prefix
                splits[before, here, after] = any(begin == at for _, (begin, _) in splitter.pre_tokenize_str(normal))
    splits[APOSTROPHE, LETTER] = False  # "'s" is a word in many pre-tokenizers: merges decide
    return splits
