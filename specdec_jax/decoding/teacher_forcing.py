"""Teacher forcing: next-token logits of target and drafter at every position of a known text.

A drafter that reads its target's hidden states reads them at every position, as in the first pass of a round; its
features are stored by position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.cache_feed import check_reads, note_tokens, window
from specdec_jax.types import Array, Cache, DraftModel, LanguageModel, Params

PREFILL = 64  # prompt tokens per pass
Text = tuple[Sequence[int], Sequence[int]]  # a prompt and its answer, token ids


class PairCache(NamedTuple):
    """The caches of both models, of equal length."""

    target: Cache
    drafter: Cache
    reads: Array | None  # [B, S, P], slot t: the drafter's features of position t - 1; None: it reads none


def store_reads(reads: Array, new_reads: Array, start: Array, count: Array) -> Array:
    """reads [B, S, P] with the features [B, T, P] of positions start[b] ... start[b] + count[b] - 1 written.

    The features of a position are stored in the slot of the next position. Entries beyond `count` are dropped.
    """
    rows, slots = jnp.arange(new_reads.shape[0])[:, None], start[:, None] + 1 + jnp.arange(new_reads.shape[1])[None, :]
    slots = jnp.where(slots <= (start + count)[:, None], slots, reads.shape[1])
    return reads.at[rows, slots].set(new_reads.astype(reads.dtype), mode="drop")


def init_caches(
    models: tuple[LanguageModel, LanguageModel], params: tuple[Params, Params], batch: int, slots: int
) -> PairCache:
    """Empty caches of (target, drafter). Raises ValueError if the target lacks hidden states that the drafter reads."""
    check_reads(*models)
    target, drafter = (model.init_cache(weights, batch, slots) for model, weights in zip(models, params, strict=True))
    reading = DraftModel.of(models[1]).reading
    reads = None if reading is None else jnp.zeros((batch, slots, reading.width), reading.dtype)
    return PairCache(target, drafter, reads)


def feed_both(
    models: tuple[LanguageModel, LanguageModel],
    params: tuple[Params, Params],
    tokens: Array,
    caches: PairCache,
    start: Array | None = None,
) -> tuple[Array, Array, PairCache]:
    """A pass over tokens [B, T] by both models: (the target's logits [B, T, V], the drafter's [B, T, V], caches).

    `start`: the position [B] of the first tokens; None: the end of the caches.
    """
    target, drafter = models[0], DraftModel.of(models[1])
    if start is not None:
        both = target.with_length(caches.target, start), drafter.with_length(caches.drafter, start)
        caches = PairCache(*both, caches.reads)
    reading = drafter.reading
    if reading is None or caches.reads is None:
        p_logits, target_cache = target.apply(params[0], tokens, caches.target)
        q_logits, drafter_cache = drafter.apply(params[1], tokens, caches.drafter)
        return p_logits, q_logits, PairCache(target_cache, drafter_cache, None)
    assert target.hidden.streams is not None  # checked by init_caches
    begin = caches.target.length
    p_logits, hidden, target_cache = target.hidden.streams(params[0], tokens, caches.target, reading.layers)
    reads = store_reads(caches.reads, reading.read(params[1], hidden), begin, jnp.full_like(begin, tokens.shape[1]))
    here = window(reads, begin, tokens.shape[1]).astype(jnp.float32)
    drafter_cache = note_tokens(drafter, params[1], caches.drafter, tokens)
    q_logits, _, drafter_cache = reading.apply(params[1], tokens, here, drafter_cache)
    if drafter.head is not None:
        q_logits = drafter.head.spread(params[1], drafter_cache, q_logits)
    return p_logits, q_logits, PairCache(target_cache, drafter_cache, reads)


def filled_caches(
    models: tuple[LanguageModel, LanguageModel], params: tuple[Params, Params], tokens: Array, wanted: Array
) -> PairCache:
    """Caches that hold the first `wanted` [] int32 of tokens [B, S], and possibly some more."""

    def feed(step: Array, caches: PairCache) -> PairCache:
        return feed_both(models, params, lax.dynamic_slice_in_dim(tokens, step * PREFILL, PREFILL, axis=1), caches)[2]

    return lax.fori_loop(0, (wanted + PREFILL - 1) // PREFILL, feed, init_caches(models, params, *tokens.shape))
