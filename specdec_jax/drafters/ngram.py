"""Drafting from n-gram counts of the text: proposes the token that most often followed the last tokens.

Like the n-gram storages of assisted decoding (NASD and adaptive n-gram decoding), with arrays of fixed size inside jit:
a hash table per row, of contexts of 1 to n - 1 tokens. Every token of the prompt and every emitted token
is counted once, when it is committed; rejected drafts are not counted.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.drafters._parts import lookup
from specdec_jax.ranges import Between, DraftLength
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Drafter, RoundContext, Source

WAYS, CANDIDATES = 4, 4


class NgramTable(NamedTuple):
    """Counts of one row, or of B rows with a leading axis. R orders, M buckets, W contexts per bucket, C candidates.

    Without the axis M it is the bucket of a context, for every row and order.

    Arrays of fixed size that a loop updates in place. Every order (context length) has its own buckets. A bucket has
    WAYS contexts, a context has CANDIDATES next tokens with their counts; both are ordered by recency. This order
    breaks all ties: among equally frequent tokens the latest is proposed, among equally rare ones the oldest is
    dropped. A context is identified by a 32-bit fingerprint that is independent of its bucket: a false match, one in
    billions, only costs a rejected draft, and storing whole contexts would double the size of the table.
    """

    key: Array  # [R, M, W] uint32, fingerprints; 0: free
    token: Array  # [R, M, W, C] int32, latest first
    count: Array  # [R, M, W, C] int32; 0: an empty place


class NgramState(NamedTuple):
    table: NgramTable  # every leaf [B, R, ...]
    counted: Array  # [B] int32, length of the text whose n-grams are counted


class _Recent(NamedTuple):
    tokens: Array  # [B, N] int32, the last tokens with the draft appended, oldest first
    count: Array  # [B] int32, number of valid tokens


@strategy
def ngram(
    max_draft_length: DraftLength = 7,
    order: Annotated[int, Between(2, 16)] = 4,
    slots: int = 4096,
    vocab_size: int | None = None,
) -> Drafter:
    """Propose the most frequent next token after the longest known context, up to `max_draft_length` (K) times.

    Parameters are None, or an initial table, from `table_of` of an earlier state. Drafting needs no model pass.
    Verification treats the drafts as one-hot distributions, so lossless verifiers stay lossless. Stopping policies see
    the probability (c + m - 1/2) / (t + m) for a token with c of t counts after m tokens, the estimate of prompt lookup
    with the counts added. Counts stay when a state is extended with another text (`Decoder.extend`).

    Args:
        order: n, for contexts of up to n - 1 tokens; 2 to 16.
        slots: number of contexts per order, a power of two of at least 4. A full bucket of 4 drops its rarest context.
        vocab_size: the target's (set by `build_pair`), for policies that read the drafted token's probability.

    Raises:
        ValueError: slots of another kind, or a table of another shape.
    """
    if slots < WAYS or slots & (slots - 1):
        raise ValueError(f"slots must be a power of two of at least {WAYS}, got {slots}")

    def init(params: NgramTable | None, batch: int, cache_slots: int, source: Any = None) -> NgramState:
        shape, none = (batch, order - 1, slots // WAYS, WAYS), jnp.zeros((batch,), jnp.int32)
        empty = (jnp.zeros((*shape, CANDIDATES), jnp.int32) for _ in range(2))  # two buffers, which can be donated
        table = NgramTable(jnp.zeros(shape, jnp.uint32), *empty)
        if params is None:
            return NgramState(table, none)
        for name, counts, empty in zip(NgramTable._fields, params, table, strict=True):
            if counts.shape != empty.shape[1:]:
                raise ValueError(
                    f"the n-gram table's {name} has shape {counts.shape}, this drafter's {empty.shape[1:]}: "
                    "order and slots must be those it was learnt with"
                )
        copies = (jnp.broadcast_to(jnp.asarray(leaf)[None], (batch, *leaf.shape)) for leaf in params)
        return NgramState(NgramTable(*copies), none)

    def source(params: Any, state: NgramState, tokens: Array, context: RoundContext) -> Source:

        def retrieve(recent: _Recent, drafted: Array) -> tuple[Array, Array, Array]:
            """(token, known, chance), [B] each, after the longest context that has a candidate."""
            bucket, print_ = hashes(recent.tokens, state.table.key.shape[2])
            token, count, total, available = best(read(state.table, bucket), print_)
            available = available & _inside(recent)
            index = jnp.arange(available.shape[1], dtype=jnp.int32)
            longest = jnp.max(jnp.where(available, index, 0), axis=1)[:, None]
            pick = lambda values: jnp.take_along_axis(values, longest, axis=1)[:, 0]  # noqa: E731
            c, t, m = (values.astype(jnp.float32) for values in (pick(count), pick(total), longest[:, 0] + 1))
            return pick(token), pick(available), (c + m - 0.5) / (t + m)

        return lookup(state, retrieve, vocab_size, _recent(tokens, context.length, order - 1), _with_token)

    def commit(params: Any, state: NgramState, tokens: Array, length: Array) -> NgramState:
        """Counts all tokens not counted yet, one per step, because two tokens of one step could share a context.

        A text shorter than the counted length was truncated: counts of truncated tokens stay in the table, and the
        rest of the text is not counted twice.
        """
        state = state._replace(counted=jnp.minimum(state.counted, length))

        def count_one(now: NgramState) -> NgramState:
            more = now.counted < length
            recent = _recent(tokens, now.counted, order - 1)
            here = jnp.minimum(now.counted, tokens.shape[1] - 1)[:, None]
            bucket, print_ = hashes(recent.tokens, slots // WAYS)
            entries, following = read(now.table, bucket), jnp.take_along_axis(tokens, here, axis=1)[:, 0]
            chosen, new = more[:, None] & _inside(recent), counted(entries, print_, following)
            masks = (chosen.reshape(*chosen.shape, *[1] * (leaf.ndim - 2)) for leaf in new)
            new = NgramTable(*(jnp.where(m, a, b) for m, a, b in zip(masks, new, entries, strict=True)))
            rows, orders = _grid(bucket)  # indices are unique: each bucket has its own row and order
            put = lambda leaf, value: leaf.at[rows, orders, bucket].set(value, unique_indices=True)  # noqa: E731
            return NgramState(jax.tree.map(put, now.table, new), now.counted + more.astype(jnp.int32))

        return lax.while_loop(lambda now: jnp.any(now.counted < length), count_one, state)

    return Drafter(init, source, commit, max_draft_length)


def table_of(state: NgramState, row: int = 0) -> NgramTable:
    """The table of row `row`, usable as drafter parameters for another prompt: `table_of(decode_state.drafter)`.

    A copy on the host: states are donated to the next call and their arrays deleted.
    """
    return NgramTable(*(np.array(np.asarray(leaf)[row]) for leaf in state.table))  # type: ignore[arg-type]


def _recent(tokens: Array, length: Array, size: int) -> _Recent:
    """The last `size` tokens before `length` [B] of every row."""
    index = length[:, None] - size + jnp.arange(size, dtype=jnp.int32)[None, :]
    return _Recent(jnp.take_along_axis(tokens, jnp.maximum(index, 0), axis=1), jnp.minimum(length, size))


def _inside(recent: _Recent) -> Array:
    """[B, N] bool: whether the text has as many as 1 to N tokens."""
    return jnp.arange(1, recent.tokens.shape[1] + 1, dtype=jnp.int32)[None, :] <= recent.count[:, None]


def _with_token(recent: _Recent, token: Array) -> _Recent:
    size = recent.tokens.shape[1]
    shifted = jnp.concatenate([recent.tokens[:, 1:], token[:, None]], axis=1)
    return _Recent(shifted, jnp.minimum(recent.count + 1, size))


def hashes(recent: Array, buckets: int) -> tuple[Array, Array]:
    """(bucket [B, N] int32, fingerprint [B, N] uint32 >= 1) of the contexts of 1 to N tokens at the end of `recent`.

    Args:
        recent: [B, N] int32, the last tokens, oldest first.
    """
    place = jnp.full(recent.shape[:1], 0x811C9DC5, jnp.uint32)
    print_ = jnp.full(recent.shape[:1], 0x2545F491, jnp.uint32)
    places, prints = [], []
    for back in range(1, recent.shape[1] + 1):  # from the newest token: longer contexts extend shorter ones
        token = recent[:, -back].astype(jnp.uint32)
        place = _mixed(place ^ token, 0x9E3779B1)
        print_ = _mixed(print_ + token, 0x85EBCA6B)
        places.append(place)
        prints.append(print_)
    bucket = jnp.stack(places, axis=1) & jnp.uint32(buckets - 1)
    return bucket.astype(jnp.int32), jnp.maximum(jnp.stack(prints, axis=1), jnp.uint32(1))


def _mixed(value: Array, factor: int) -> Array:
    value = (value ^ (value >> jnp.uint32(16))) * jnp.uint32(factor)
    value = (value ^ (value >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> jnp.uint32(16))


def read(table: NgramTable, bucket: Array) -> NgramTable:
    """The bucket [B, R] of every row and order."""
    rows, orders = _grid(bucket)
    return NgramTable(*(leaf[rows, orders, bucket] for leaf in table))


def best(bucket: NgramTable, print_: Array) -> tuple[Array, Array, Array, Array]:
    """(token, its count, the context's total, known), [B, R] each, of the most frequent token, the latest if tied."""
    hit = bucket.key == print_[:, :, None]
    way = jnp.argmax(hit, axis=2)[:, :, None, None]
    tokens = jnp.take_along_axis(bucket.token, way, axis=2)[:, :, 0]
    counts = jnp.take_along_axis(bucket.count, way, axis=2)[:, :, 0]  # [B, R, C]
    first = jnp.argmax(counts, axis=2)[:, :, None]
    token = jnp.take_along_axis(tokens, first, axis=2)[:, :, 0]
    count = jnp.take_along_axis(counts, first, axis=2)[:, :, 0]
    return token, count, jnp.sum(counts, axis=2), jnp.any(hit, axis=2)


def counted(bucket: NgramTable, print_: Array, token: Array) -> NgramTable:
    """The buckets with the count of `token` [B] incremented; its context and the token move to the front."""
    hit = bucket.key == print_[:, :, None]
    present = jnp.any(hit, axis=2)
    rarest = _last_least(jnp.sum(bucket.count, axis=3))
    way = jnp.where(present, jnp.argmax(hit, axis=2), rarest).astype(jnp.int32)
    tokens = jnp.take_along_axis(bucket.token, way[:, :, None, None], axis=2)[:, :, 0]  # [B, R, C]
    counts = jnp.take_along_axis(bucket.count, way[:, :, None, None], axis=2)[:, :, 0]
    counts = jnp.where(present[:, :, None], counts, 0)
    same = (tokens == token[:, None, None]) & (counts > 0)
    again = jnp.any(same, axis=2)
    place = jnp.where(again, jnp.argmax(same, axis=2), _last_least(counts)).astype(jnp.int32)
    before = jnp.take_along_axis(counts, place[:, :, None], axis=2)[:, :, 0]
    tokens = _to_front(tokens, place, jnp.broadcast_to(token[:, None], place.shape))
    counts = _to_front(counts, place, jnp.where(again, before + 1, 1))
    newest = zip(bucket, (print_, tokens, counts), strict=True)
    return NgramTable(*(_to_front(leaf, way, new) for leaf, new in newest))


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
