"""A prompt goes into the caches of target and drafter, each by a program of its own.

Apart from `run` and from each other, because nothing of a policy or verifier is in them: all decoders of a target share
its program, and with the persistent cache all processes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.types import Array, Cache, Drafter, LanguageModel, Params


@functools.lru_cache(maxsize=32)
def target_prefill(target: LanguageModel, chunk: int) -> Any:
    """(params, tokens [B, S], lengths [B]) -> the target's cache of all but the last tokens, jitted.

    A program by itself, without what a policy brings: all decoders of a target share it.
    """

    def prefill(params: Params, tokens: Array, length: Array) -> Cache:
        return fill(target, params, tokens, length, target.init_cache(params, *tokens.shape), chunk)

    return jax.jit(prefill)


@functools.lru_cache(maxsize=32)
def drafter_prefill(drafter: Drafter) -> Any:
    """(params, tokens [B, S], lengths [B]) -> the drafter's state after it, jitted; shared as `target_prefill` is."""

    def prefill_drafter(params: Params, tokens: Array, length: Array) -> Any:
        return drafter.commit(params, drafter.init(params, *tokens.shape), tokens, length)

    return jax.jit(prefill_drafter)


def fill(target: LanguageModel, params: Params, tokens: Array, length: Array, cache: Cache, chunk: int) -> Cache:
    """Feed the target all tokens but the last, from where its cache ends."""
    slots = tokens.shape[1]
    chunk = min(chunk, slots)
    wanted = length - 1

    def feed(carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        known, cache = carry
        start = jnp.minimum(known, slots - chunk)  # never over the end: updates past it are clamped silently
        offset = jnp.arange(chunk, dtype=jnp.int32)[None, :]
        window = jnp.take_along_axis(tokens, start[:, None] + offset, axis=1)
        _, cache = target.apply(params, window, target.with_length(cache, start))
        return jnp.maximum(known, jnp.minimum(start + chunk, wanted)), cache

    with jax.named_scope("prefill"):
        _, cache = lax.while_loop(lambda carry: jnp.any(carry[0] < wanted), feed, (cache.length, cache))
    return target.with_length(cache, wanted)
