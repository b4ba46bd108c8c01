"""A hash table of n-gram counts for each row: arrays of fixed size that a loop updates in place.

Every order (context length) has its own buckets. A bucket has WAYS contexts, a context has CANDIDATES next tokens with
their counts; both are ordered by recency. This order breaks all ties: among equally frequent tokens the latest is
proposed, among equally rare ones the oldest is dropped. A context is identified by a 32-bit fingerprint that is
independent of its bucket: a false match, one in billions, only costs a rejected draft, and storing whole contexts would
double the size of the table.
"""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.types import Array

WAYS, CANDIDATES = 4, 4
EMPTY = -1  # count of an empty place; candidates from the target's distributions have count 0


class NgramTable(NamedTuple):
    """Counts of one row, or of B rows with a leading axis. R orders, M buckets, W contexts per bucket, C candidates."""

    key: Array  # [R, M, W] uint32, fingerprints; 0: free
    token: Array  # [R, M, W, C] int32, latest first
    count: Array  # [R, M, W, C] int32


class Bucket(NamedTuple):
    """The bucket of a context for every row and order: key [B, R, W], token and count [B, R, W, C]."""

    key: Array
    token: Array
    count: Array


def empty_table(orders: int, buckets: int, batch: int) -> NgramTable:
    """A table without contexts, leaves [B, R, ...]."""
    shape = (batch, orders, buckets, WAYS)
    full = (*shape, CANDIDATES)
    return NgramTable(jnp.zeros(shape, jnp.uint32), jnp.zeros(full, jnp.int32), jnp.full(full, EMPTY, jnp.int32))


def hashes(recent: Array, lengths: tuple[int, ...], buckets: int) -> tuple[Array, Array]:
    """(bucket [B, R] int32, fingerprint [B, R] uint32 >= 1) of the contexts of `lengths` tokens at the end of `recent`.

    Args:
        recent: [B, N] int32, the last tokens, oldest first; N at least max(lengths).
    """
    place = jnp.full(recent.shape[:1], 0x811C9DC5, jnp.uint32)
    print_ = jnp.full(recent.shape[:1], 0x2545F491, jnp.uint32)
    places, prints = [], []
    for back in range(1, max(lengths) + 1):  # from the newest token: longer contexts extend shorter ones
        token = recent[:, -back].astype(jnp.uint32)
        place = _mixed(place ^ token, 0x9E3779B1)
        print_ = _mixed(print_ + token, 0x85EBCA6B)
        if back in lengths:
            places.append(place)
            prints.append(print_)
    bucket = jnp.stack(places, axis=1) & jnp.uint32(buckets - 1)
    return bucket.astype(jnp.int32), jnp.maximum(jnp.stack(prints, axis=1), jnp.uint32(1))


def _mixed(value: Array, factor: int) -> Array:
    value = (value ^ (value >> jnp.uint32(16))) * jnp.uint32(factor)
    value = (value ^ (value >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> jnp.uint32(16))


def read(table: NgramTable, bucket: Array) -> Bucket:
    """The bucket [B, R] of every row and order."""
    rows, orders = _grid(bucket)
    return Bucket(*(leaf[rows, orders, bucket] for leaf in table))


def write(table: NgramTable, bucket: Array, new: Bucket) -> NgramTable:
    """The table with those buckets replaced. The indices are unique: each bucket has its own row and order."""
    rows, orders = _grid(bucket)
    replaced = (
        leaf.at[rows, orders, bucket].set(value, unique_indices=True) for leaf, value in zip(table, new, strict=True)
    )
    return NgramTable(*replaced)


def best(bucket: Bucket, print_: Array) -> tuple[Array, Array, Array, Array]:
    """(token, its count, the context's total, known), [B, R] each, of the most frequent token, the latest if tied."""
    hit = bucket.key == print_[:, :, None]
    way = jnp.argmax(hit, axis=2)[:, :, None, None]
    tokens = jnp.take_along_axis(bucket.token, way, axis=2)[:, :, 0]
    counts = jnp.take_along_axis(bucket.count, way, axis=2)[:, :, 0]  # [B, R, C]
    first = jnp.argmax(counts, axis=2)[:, :, None]
    token = jnp.take_along_axis(tokens, first, axis=2)[:, :, 0]
    count = jnp.take_along_axis(counts, first, axis=2)[:, :, 0]
    return token, count, _total(counts), jnp.any(hit, axis=2) & (count >= 0)


def counted(bucket: Bucket, print_: Array, token: Array) -> Bucket:
    """The buckets with the count of `token` [B] incremented; its context and the token move to the front."""
    hit = bucket.key == print_[:, :, None]
    present = jnp.any(hit, axis=2)
    rarest = _last_least(jnp.where(bucket.key > 0, _total(bucket.count), EMPTY))
    way = jnp.where(present, jnp.argmax(hit, axis=2), rarest).astype(jnp.int32)
    tokens = jnp.take_along_axis(bucket.token, way[:, :, None, None], axis=2)[:, :, 0]  # [B, R, C]
    counts = jnp.take_along_axis(bucket.count, way[:, :, None, None], axis=2)[:, :, 0]
    counts = jnp.where(present[:, :, None], counts, EMPTY)
    same = (tokens == token[:, None, None]) & (counts >= 0)
    again = jnp.any(same, axis=2)
    place = jnp.where(again, jnp.argmax(same, axis=2), _last_least(counts)).astype(jnp.int32)
    before = jnp.take_along_axis(counts, place[:, :, None], axis=2)[:, :, 0]
    tokens = _to_front(tokens, place, jnp.broadcast_to(token[:, None], place.shape))
    counts = _to_front(counts, place, jnp.where(again, before + 1, 1))
    return Bucket(
        _to_front(bucket.key, way, print_), _to_front(bucket.token, way, tokens), _to_front(bucket.count, way, counts)
    )


def filled(bucket: Bucket, print_: Array, tokens: Array) -> Bucket:
    """The buckets with `tokens` [B, k] (best first, -1 for none) as candidates of contexts that were never counted.

    Counted contexts are neither changed nor replaced: tokens of the text are better evidence than the target's
    distributions after rejected drafts.
    """
    hit = bucket.key == print_[:, :, None]
    spare = jnp.where(bucket.key > 0, _total(bucket.count), EMPTY) <= 0  # free or never counted
    present = jnp.any(hit, axis=2)
    way = jnp.where(present, jnp.argmax(hit, axis=2), _last_least(jnp.where(spare, 0, 1))).astype(jnp.int32)
    replaceable = jnp.take_along_axis(spare, way[:, :, None], axis=2)  # [B, R, 1]
    padded = jnp.pad(tokens, ((0, 0), (0, CANDIDATES - tokens.shape[1])), constant_values=-1)[:, None, :]
    candidates = jnp.broadcast_to(padded, (*way.shape, CANDIDATES))
    new = Bucket(
        _to_front(bucket.key, way, print_),
        _to_front(bucket.token, way, jnp.maximum(candidates, 0)),
        _to_front(bucket.count, way, jnp.where(candidates >= 0, 0, EMPTY)),
    )
    replaceable = replaceable & jnp.any(candidates >= 0, axis=2, keepdims=True)
    return Bucket(
        jnp.where(replaceable, new.key, bucket.key),
        jnp.where(replaceable[..., None], new.token, bucket.token),
        jnp.where(replaceable[..., None], new.count, bucket.count),
    )


def _total(counts: Array) -> Array:
    return jnp.sum(jnp.maximum(counts, 0), axis=-1)


def _last_least(values: Array) -> Array:
    """Index of the minimum over the last axis, the last one in case of ties."""
    size = values.shape[-1]
    return size - 1 - jnp.argmin(values[..., ::-1], axis=-1)


def _to_front(values: Array, place: Array, first: Array) -> Array:
    """values [B, R, N, ...] with the entry at `place` [B, R] removed and `first` [B, R, ...] inserted in front."""
    shifted = jnp.concatenate([first[:, :, None].astype(values.dtype), values[:, :, :-1]], axis=2)
    index = jnp.arange(values.shape[2], dtype=jnp.int32)
    behind = index[None, None, :] > place[:, :, None]
    return jnp.where(behind.reshape(*behind.shape, *[1] * (values.ndim - 3)), values, shifted)


def _grid(bucket: Array) -> tuple[Array, Array]:
    batch, orders = bucket.shape
    return jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.arange(orders, dtype=jnp.int32)[None, :]
