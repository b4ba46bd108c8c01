"""A prompt goes into the caches of target and drafter, each by a program of its own.

Apart from `run` and from each other, because nothing of a policy or verifier is in them: all decoders of a target share
its program, and with the persistent cache all processes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.decoding.cache_feed import feed
from specdec_jax.types import Array, Cache, Drafter, LanguageModel, Params

WIDE = 8  # times the chunk, of passes that long prompts are fed by


@functools.lru_cache(maxsize=32)
def target_prefill(target: LanguageModel, chunk: int, compiler_options: tuple[Any, ...] = ()) -> Any:
    """(params, tokens [B, S], lengths [B]) -> the target's cache of all but the last tokens, jitted.

    A program by itself, without what a policy brings: all decoders of a target share it.
    """

    def prefill(params: Params, tokens: Array, length: Array) -> Cache:
        return fill(target, params, tokens, length, target.init_cache(params, *tokens.shape), chunk)

    return jax.jit(prefill, compiler_options=dict(compiler_options) or None)


@functools.lru_cache(maxsize=32)
def drafter_prefill(drafter: Drafter, compiler_options: tuple[Any, ...] = ()) -> Any:
    """(params, tokens [B, S], lengths [B]) -> the drafter's state after it, jitted; shared as `target_prefill` is."""

    def prefill_drafter(params: Params, tokens: Array, length: Array) -> Any:
        return drafter.commit(params, drafter.init(params, *tokens.shape), tokens, length)

    return jax.jit(prefill_drafter, compiler_options=dict(compiler_options) or None)


def fill(target: LanguageModel, params: Params, tokens: Array, length: Array, cache: Cache, chunk: int) -> Cache:
    """Feed the target all tokens but the last, from where its cache ends.

    Where the cache has room for long texts, most of them go in by chunks of eight times the size: products of 512 rows
    come nearer to a large product's rate than those of 64. What fills less than three quarters of one goes in by
    small ones.
    """
    wanted, known, wide = length - 1, cache.length, WIDE * chunk
    with jax.named_scope("prefill"):
        if tokens.shape[1] >= 2 * wide:
            passes = (jnp.maximum(wanted - known, 0) + wide // 4) // wide
            cache, known = feed(target, params, cache, tokens, known, jnp.minimum(known + passes * wide, wanted), wide)
        cache, _ = feed(target, params, cache, tokens, known, wanted, chunk)
    return target.with_length(cache, wanted)
