"""Feeding text to a language model's cache, many tokens per pass: prompts, and the backlog of idle drafters."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from specdec_jax.types import Array, Cache, DraftModel, LanguageModel, Observer, Params

Pass = Callable[[Array, Array, Any], Any]  # (tokens [B, T] from `start` [B], start, cache) -> cache


def pass_of(model: LanguageModel, params: Params) -> Pass:
    """A pass of a language model whose output is not used."""
    return lambda tokens, start, cache: model.apply(params, tokens, model.with_length(cache, start))[1]


def feed(run: Pass, cache: Any, tokens: Array, valid: Array, wanted: Array, chunk: int) -> tuple[Any, Array]:
    """Feeds each row's tokens `valid` ... `wanted` [B] - 1, `chunk` per pass, to a cache with the first `valid` [B].

    Returns the cache and the number of tokens [B] it now holds, max(valid, wanted). The cache's length is that of the
    last pass: the caller must set it (`with_length`).
    """
    chunk = min(chunk, tokens.shape[1])

    def one_pass(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        cache, valid = carry
        # Starting early enough to end inside the cache recomputes some entries with equal values. A later start would
        # run over the end, be clamped silently and overwrite valid entries.
        start = jnp.minimum(valid, tokens.shape[1] - chunk)
        cache = run(window(tokens, start, chunk), start, cache)
        return cache, jnp.maximum(valid, jnp.minimum(start + chunk, wanted))

    return lax.while_loop(lambda carry: jnp.any(carry[1] < wanted), one_pass, (cache, valid))


def feed_long(
    run: Pass, cache: Any, tokens: Array, valid: Array, wanted: Array, chunk: int, wide: int
) -> tuple[Any, Array]:
    """As `feed`, but with `wide` tokens per pass where the tokens [B, S] have S of 2 * `wide` or more.

    A remainder that fills less than three quarters of a wide pass is fed `chunk` per pass.
    """
    if tokens.shape[1] >= 2 * wide:
        passes = (jnp.maximum(wanted - valid, 0) + wide // 4) // wide
        cache, valid = feed(run, cache, tokens, valid, jnp.minimum(valid + passes * wide, wanted), wide)
    return feed(run, cache, tokens, valid, wanted, chunk)


def note_tokens(model: LanguageModel, params: Params, cache: Cache, tokens: Array) -> Cache:
    """Prepares the cache for a pass over tokens [B, T] by the model's `head` or `reading`; `apply` does it itself."""
    head = DraftModel.of(model).head
    return cache if head is None else head.note(params, tokens, cache)


def window(values: Array, start: Array, size: int) -> Array:
    """values[b, start[b] : start[b] + size] for every row, [B, size, ...]; past the end the last one is repeated."""
    offset = jnp.arange(size, dtype=jnp.int32)[None, :]
    slots = jnp.expand_dims(start[:, None] + offset, range(2, values.ndim))
    return jnp.take_along_axis(values, slots, axis=1, mode="clip")


def check_reads(target: LanguageModel, drafter: LanguageModel | Observer | None) -> None:
    """Raises ValueError for a drafter that reads hidden states which the target does not provide."""
    reads = DraftModel.of(drafter).reading if isinstance(drafter, LanguageModel) else drafter
    if reads is None:
        return
    needs = f"this drafter reads hidden states of the target's layers {reads.layers}, {reads.target_width} wide"
    if target.hidden.streams is None:
        raise ValueError(f"{needs}, and the target gives none; draft with one that reads none")
    layers, width = target.hidden.num_layers, target.hidden.width
    if not reads.layers or max(reads.layers) > layers or reads.target_width != width:
        has = f"has {layers} layers, {width} wide"
        raise ValueError(f"{needs}, and the target {has}; draft with one trained for it, or that reads none")
