"""A prompt goes into the caches of target and drafter, each by a program of its own.

Apart from `run` and from each other, because nothing of a policy or verifier is in them: all decoders of a target share
its program, and with the persistent cache all processes.
"""

import functools
from typing import Any

import jax

from specdec_jax.decoding.cache_feed import feed
from specdec_jax.types import Array, Cache, Drafter, LanguageModel, Params


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
    """Feed the target all tokens but the last, from where its cache ends."""
    wanted = length - 1
    with jax.named_scope("prefill"):
        cache, _ = feed(target, params, cache, tokens, cache.length, wanted, chunk)
    return target.with_length(cache, wanted)
