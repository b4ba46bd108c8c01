"""The target's tokens for the text of a drafter's tokens, inside the compiled loop.

The target's byte-pair encoding is given by tables: bytes or characters are split into words as by its pre-tokenizer,
and each word is merged by rank until no merge applies. Any draft is lossless; the closer it is to the tokenizer's
result for the same text, the higher the acceptance rate.

Source: universal assisted generation, UAG (Hugging Face and Intel, 2024; arXiv 2502.05202 calls it string-level exact
match, SLEM), where both tokenizers run on the host between passes; tables inside the loop are an addition here.

The tables are of a target's byte-pair encoding and of a drafter's tokens as bytes:

- Words are derived from the pre-tokenizer's splits of short texts of two or three kinds of bytes (letters, digits ...).
- Characters that are tokens, in tokenizers that start from characters (SentencePiece's), are merged from their bytes
  first; parts of characters have ids beyond the vocabulary.
- Added tokens that are runs of one character (Gemma's spaces and line feeds) are merged to the longest run.
"""

import json
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from tokenizers import models

from specdec_jax.loading.across import ids_by_key, ids_in, is_byte_level, keys_of
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.types import Array

BYTES, MORE = 8, 16  # maximum bytes of a draft that are tokenised: per token, and in addition
TEXT, NONE = -2, -1  # markers instead of a token
KINDS = 6  # number of kinds of bytes
MULTIPLIERS = np.array([0x9E3779B1, 0x85EBCA6B], np.uint32)
NEVER = np.iinfo(np.int32).max


class Tables(NamedTuple):
    """The drafter's U tokens as bytes, at most L each, and the target's byte-pair encoding with N merges."""

    text: Array  # [U, L] uint8
    size: Array  # [U] int32, number of bytes, 1 to L
    whole: Array  # [U] int32, TEXT, or for tokens without text the corresponding token of the target, or NONE
    single: Array  # [256] int32, the target's token of a byte, or NONE
    kind: Array  # [256] int32, kind of each byte, below KINDS
    splits: Array  # [KINDS, KINDS, KINDS + 1] bool: a word begins at the second, by those around it; the last: the end
    start: Array  # [2^h + 1] int32, start of the merges of each hash value
    merges: Array  # [N, 4] int32: left, right, rank, and union; ordered by hash
    probes: Array  # [M] int32, 0 to M - 1, with M the largest number of merges with the same hash value


class _Symbols(NamedTuple):
    """A text of W symbols during merging; NONE beyond its end."""

    token: Array  # [B, W] int32, the target's ids; beyond its vocabulary: part of a character
    end: Array  # [B, W] int32, index of the byte after each
    begins: Array  # [B, W] bool, beginnings of words
    more: Array  # [] bool, whether the last step merged anything


def retokenize(tables: Tables, tokens: Array, length: Array, vocab_size: int) -> tuple[Array, Array, Array]:
    """The target's tokens for the text of the drafter's.

    The result ends before text that the target cannot represent (a special token of the drafter only, a byte without a
    token, part of a character that is a token), or after `BYTES` bytes per token.

    Args:
        tokens: [B, K] int32, the drafter's tokens, of which the first `length` [B] are valid.

    Returns:
        tokens [B, K] int32, at most K of them; their number [B]; and the number of the drafter's tokens [B, K] that end
        with each, -1 inside a token.
    """
    width = tokens.shape[1]
    size = jnp.where(jnp.arange(width)[None, :] < length[:, None], tables.size[tokens], 0)
    theirs = jnp.cumsum(size, axis=1)  # [B, K], the byte after each
    at = jnp.arange(BYTES * width + MORE, dtype=jnp.int32)[None, :]  # [1, W]
    which = jnp.minimum(jnp.sum(at[:, :, None] >= theirs[:, None, :], axis=2), width - 1)
    token = jnp.take_along_axis(tokens, which, axis=1)
    offset = at - jnp.take_along_axis(theirs - size, which, axis=1)
    byte = tables.text[token, jnp.clip(offset, 0, tables.text.shape[1] - 1)].astype(jnp.int32)
    whole, inside = tables.whole[token], at < theirs[:, -1:]
    symbol = jnp.where(inside, jnp.where(whole == TEXT, tables.single[byte], whole), NONE)
    kind = jnp.where(inside, tables.kind[byte], KINDS)  # KINDS: beyond the end
    before, after = jnp.pad(kind, ((0, 0), (1, 0)))[:, :-1], jnp.pad(kind, ((0, 0), (0, 1)), constant_values=KINDS)
    begins = tables.splits[before, jnp.minimum(kind, KINDS - 1), after[:, 1:]] | (at == 0) | ~inside
    symbols = _Symbols(symbol, jnp.broadcast_to(at + 1, symbol.shape), begins, jnp.ones((), bool))
    symbols = lax.while_loop(lambda now: now.more, lambda now: _merged(tables, now), symbols)
    ids, end = symbols.token[:, :width], symbols.end[:, :width]
    valid = jnp.cumprod(((ids >= 0) & (ids < vocab_size)).astype(jnp.int32), axis=1)
    together = (theirs[:, None, :] == end[:, :, None]) & (size > 0)[:, None, :]  # [B, K, K]
    ended = jnp.where(jnp.any(together, axis=2), jnp.argmax(together, axis=2) + 1, -1)
    return jnp.where(valid > 0, ids, 0), jnp.sum(valid, axis=1), ended.astype(jnp.int32)


def _merged(tables: Tables, now: _Symbols) -> _Symbols:
    """One merge in every word, the first one with the lowest rank; words are independent."""
    width = now.token.shape[1]
    at = jnp.arange(width, dtype=jnp.int32)[None, :]
    following = jnp.pad(now.token[:, 1:], ((0, 0), (0, 1)), constant_values=NONE)
    buckets = tables.start.shape[0] - 1
    bucket = hashed(now.token.astype(jnp.uint32), following.astype(jnp.uint32), buckets).astype(jnp.int32)
    places = tables.start[bucket][:, :, None] + tables.probes[None, None, :]
    entry = tables.merges[jnp.minimum(places, tables.merges.shape[0] - 1)]  # [B, W, M, 4]
    hit = (entry[..., 0] == now.token[..., None]) & (entry[..., 1] == following[..., None])
    rank = jnp.min(jnp.where(hit, entry[..., 2], NEVER), axis=-1)
    union = jnp.max(jnp.where(hit, entry[..., 3], NONE), axis=-1)
    apart = jnp.pad(now.begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    order = jnp.where(apart | (rank == NEVER), NEVER, rank * width + at)  # [B, W], NEVER: no merge
    word = jnp.cumsum(now.begins, axis=1)
    same = word[:, :, None] == word[:, None, :]
    joins = (order < NEVER) & (order == jnp.min(jnp.where(same, order[:, None, :], NEVER), axis=2))
    stays = ~jnp.pad(joins[:, :-1], ((0, 0), (1, 0)))
    place = jnp.where(stays, jnp.cumsum(stays, axis=1) - 1, width)
    rows = jnp.arange(now.token.shape[0])[:, None]
    token = jnp.where(joins, union, now.token)
    end = jnp.where(joins, jnp.pad(now.end[:, 1:], ((0, 0), (0, 1))), now.end)

    def closed(values: Array, rest: int | bool) -> Array:
        return jnp.full_like(values, rest).at[rows, place].set(values, mode="drop")

    return _Symbols(closed(token, NONE), closed(end, NONE), closed(now.begins, True), jnp.any(joins))


def hashed(left: Any, right: Any, buckets: int) -> Any:
    """The bucket of pairs of uint32, among `buckets`, a power of two; also for numpy arrays."""
    mixed = left * MULTIPLIERS[0] ^ right * MULTIPLIERS[1]
    return (mixed ^ (mixed >> np.uint32(15))) & np.uint32(buckets - 1)


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
    keys = {token: key for token, key in keys_of(drafter).items() if token < rows}
    texts = {token: key for token, key in keys.items() if isinstance(key, bytes) and 0 < len(key) <= LONGEST}
    text = np.zeros((rows, max(map(len, texts.values()))), np.uint8)
    size, whole = np.ones(rows, np.int32), np.full(rows, NONE, np.int32)
    for token, key in texts.items():
        text[token, : len(key)], size[token], whole[token] = list(key), len(key), TEXT
    theirs, ids = ids_in(target, drafter), ids_by_key(target)
    for token, key in keys.items():
        if isinstance(key, str):
            whole[token] = theirs.get(key, NONE)
    single = np.array([ids.get(bytes([byte]), NONE) for byte in range(256)], np.int32)
    entries = np.array([(*pair, *value) for pair, value in _merges(target, single).items()], np.int32).reshape(-1, 4)
    entries = np.full((1, 4), NONE, np.int32) if not len(entries) else entries  # nothing merges with nothing
    buckets = 1 << (len(entries) - 1).bit_length()
    values = hashed(entries[:, 0].astype(np.uint32), entries[:, 1].astype(np.uint32), buckets)
    counts = np.bincount(values, minlength=buckets)
    start, merges = np.append(0, np.cumsum(counts)).astype(np.int32), entries[np.argsort(values, kind="stable")]
    kinds = np.array([_kind(byte) for byte in range(256)], np.int32)
    probes = np.arange(counts.max(), dtype=np.int32)
    return Tables(*map(jnp.asarray, (text, size, whole, single, kinds, _splits(target), start, merges, probes)))


def _merges(tokenizer: Tokenizer, single: np.ndarray) -> Merges:
    """The tokenizer's merges, with ranks from 0; `single` as in `Tables`."""
    vocabulary, added = tokenizer.vocabulary(), tokenizer.backend.get_added_tokens_decoder()
    ids, keys, unions = ids_by_key(tokenizer), keys_of(tokenizer), dict[tuple[int, int], int]()
    # Added tokens of one repeated byte, the longest first, so that a run grows before another begins.
    extra = (keys[i] for i, token in added.items() if not token.special)
    runs = {key for key in extra if isinstance(key, bytes) and len(key) > 1 and len(set(key)) == 1}
    for run in sorted(runs, key=len, reverse=True):
        if run[:-1] in ids and single[run[0]] != NONE:
            unions[ids[run[:-1]], int(single[run[0]])] = ids[run]
    # The bytes of characters that are tokens.
    beyond, parts = max(keys) + 1, dict[bytes, int]()
    for token, key in {} if is_byte_level(tokenizer) else keys.items():
        if not isinstance(key, bytes) or not 2 <= len(key) <= 4 or NONE in single[list(key)]:
            continue
        if len(text := key.decode(errors="ignore")) != 1 or text.encode() != key:  # no character alone
            continue
        left = int(single[key[0]])
        for end in range(2, len(key) + 1):
            union = token if end == len(key) else parts.setdefault(key[:end], beyond + len(parts))
            unions[left, int(single[key[end - 1]])] = union
            left = union
    for merge in json.loads(tokenizer.backend.model.__getstate__())["merges"]:
        first, other = merge.split(" ") if isinstance(merge, str) else merge
        left, right, union = vocabulary[first], vocabulary[other], vocabulary[first + other]
        if added.keys().isdisjoint((left, right, union)):  # added tokens are extracted before merging
            unions.setdefault((left, right), union)
    return {pair: (rank, union) for rank, (pair, union) in enumerate(unions.items())}


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
