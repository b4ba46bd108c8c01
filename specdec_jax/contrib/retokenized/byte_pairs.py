"""The target's tokens for the text of a drafter's tokens, inside the compiled loop.

The target's byte-pair encoding is given by tables: bytes or characters are split into words as by its pre-tokenizer,
and each word is merged by rank until no merge applies. Any draft is lossless; the closer it is to the tokenizer's
result for the same text, the higher the acceptance rate.

Source: universal assisted generation, UAG (Hugging Face and Intel, 2024; arXiv 2502.05202 calls it string-level exact
match, SLEM), where both tokenizers run on the host between passes; tables inside the loop are an addition here.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

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
    theirs = jnp.cumsum(size, axis=1)  # [B, K], bytes
    symbols = _symbols(tables, tokens, theirs, size)
    symbols = lax.while_loop(lambda now: now.more, lambda now: _merged(tables, now), symbols)
    ids, end = symbols.token[:, :width], symbols.end[:, :width]
    valid = jnp.cumprod(((ids >= 0) & (ids < vocab_size)).astype(jnp.int32), axis=1)
    together = (theirs[:, None, :] == end[:, :, None]) & (size > 0)[:, None, :]  # [B, K, K]
    ended = jnp.where(jnp.any(together, axis=2), jnp.argmax(together, axis=2) + 1, -1)
    return jnp.where(valid > 0, ids, 0), jnp.sum(valid, axis=1), ended.astype(jnp.int32)


def _symbols(tables: Tables, tokens: Array, ends: Array, size: Array) -> _Symbols:
    """The bytes of tokens [B, K] that end at bytes [B, K], a symbol each."""
    at = jnp.arange(BYTES * tokens.shape[1] + MORE, dtype=jnp.int32)[None, :]  # [1, W]
    which = jnp.minimum(jnp.sum(at[:, :, None] >= ends[:, None, :], axis=2), tokens.shape[1] - 1)
    token = jnp.take_along_axis(tokens, which, axis=1)
    offset = at - jnp.take_along_axis(ends - size, which, axis=1)
    byte = tables.text[token, jnp.clip(offset, 0, tables.text.shape[1] - 1)].astype(jnp.int32)
    whole, inside = tables.whole[token], at < ends[:, -1:]
    symbol = jnp.where(inside, jnp.where(whole == TEXT, tables.single[byte], whole), NONE)
    kind = jnp.where(inside, tables.kind[byte], KINDS)  # KINDS: beyond the end
    before, after = jnp.pad(kind, ((0, 0), (1, 0)))[:, :-1], jnp.pad(kind, ((0, 0), (0, 1)), constant_values=KINDS)
    splits = tables.splits[before, jnp.minimum(kind, KINDS - 1), after[:, 1:]]
    begins = splits | (at == 0) | ~inside
    return _Symbols(symbol, jnp.broadcast_to(at + 1, symbol.shape), begins, jnp.ones((), bool))


def _merged(tables: Tables, now: _Symbols) -> _Symbols:
    """One merge in every word, the first one with the lowest rank; words are independent."""
    width = now.token.shape[1]
    at = jnp.arange(width, dtype=jnp.int32)[None, :]
    following = jnp.pad(now.token[:, 1:], ((0, 0), (0, 1)), constant_values=NONE)
    rank, union = _lookup(tables, now.token, following)
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


def _lookup(tables: Tables, left: Array, right: Array) -> tuple[Array, Array]:
    """Rank and union of pairs of tokens, each [B, W]; NEVER if they do not merge."""
    buckets = tables.start.shape[0] - 1
    bucket = hashed(left.astype(jnp.uint32), right.astype(jnp.uint32), buckets).astype(jnp.int32)
    at = tables.start[bucket][:, :, None] + tables.probes[None, None, :]
    entry = tables.merges[jnp.minimum(at, tables.merges.shape[0] - 1)]  # [B, W, M, 4]
    hit = (entry[..., 0] == left[..., None]) & (entry[..., 1] == right[..., None])
    return jnp.min(jnp.where(hit, entry[..., 2], NEVER), axis=-1), jnp.max(jnp.where(hit, entry[..., 3], NONE), axis=-1)


def hashed(left: Any, right: Any, buckets: int) -> Any:
    """The bucket of pairs of uint32, among `buckets`, a power of two; also for numpy arrays."""
    mixed = left * MULTIPLIERS[0] ^ right * MULTIPLIERS[1]
    return (mixed ^ (mixed >> np.uint32(15))) & np.uint32(buckets - 1)
