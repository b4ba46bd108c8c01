"""Prefill of the caches of target and drafter with a prompt, one program each.

They are separate from `run` and do not depend on the policy or verifier: all decoders of a target share its program,
and with the persistent compilation cache all processes do. `counted` counts the programs of a jitted function.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.decoding.cache_feed import feed_long, window
from specdec_jax.sharding import by_rows
from specdec_jax.types import Array, Cache, Drafter, LanguageModel, Observer, Params, Seen


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function for `jax.jit` to count its traces, one per program, in its attribute `programs`."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        traced.programs += 1  # type: ignore[attr-defined]
        return function(*arguments)

    traced.programs = 0  # type: ignore[attr-defined]
    return traced


WIDE = 8  # tokens per pass for long prompts, in chunks


@functools.lru_cache(maxsize=32)
def target_prefill(
    target: LanguageModel, observer: Observer | None, chunk: int, compiler_options: tuple[Any, ...] = ()
) -> Any:
    """(params, drafter's params, tokens [B, S], lengths [B], source) -> (the target's cache of all but the last tokens,
    the observer's result for them, leaves [B, S, ...]), jitted. An encoder encodes its source here.
    """

    def prefill(params: Params, reader: Params, tokens: Array, length: Array, source: Any = None) -> tuple[Cache, Any]:
        batch, slots = tokens.shape
        cache = target.init_cache(params, batch, slots, source)
        return by_rows(fill(target, observer, params, reader, tokens, length, cache, chunk))

    return jax.jit(counted(prefill), compiler_options=dict(compiler_options) or None)


@functools.lru_cache(maxsize=32)
def drafter_prefill(drafter: Drafter, compiler_options: tuple[Any, ...] = ()) -> Any:
    """(params, tokens [B, S], lengths [B], reads, source) -> the drafter's state after the tokens, jitted.

    `reads` is the observer's result from `target_prefill`.
    """

    def prefill_drafter(params: Params, tokens: Array, length: Array, reads: Any, source: Any = None) -> Any:
        more = () if source is None else (source,)
        fresh = drafter.init(params, *tokens.shape, *more)
        return by_rows(fill_drafter(drafter, params, fresh, tokens, reads, jnp.zeros_like(length), length))

    return jax.jit(counted(prefill_drafter), compiler_options=dict(compiler_options) or None)


def fill_drafter(
    drafter: Drafter, params: Params, state: Any, tokens: Array, reads: Any, start: Array, length: Array
) -> Any:
    """The drafter's state for a text of `length` [B] tokens; `reads` [B, S, ...] are valid from `start` [B]."""
    if not drafter.layers:
        return drafter.fill(params, state, tokens, length)
    from_start = jax.tree.map(lambda leaf: window(leaf, start, leaf.shape[1]), reads)
    seen = Seen(from_start, start, jnp.maximum(length - 1 - start, 0))
    return drafter.fill(params, state, tokens, length, seen)  # type: ignore[call-arg]


def fill(
    target: LanguageModel,
    observer: Observer | None,
    params: Params,
    reader: Params,
    tokens: Array,
    length: Array,
    cache: Cache,
    chunk: int,
) -> tuple[Cache, Any]:
    """Feeds all tokens but the last, from the cache's end; returns the cache and the observer's result.

    `reader` are the drafter's parameters. The result has leaves [B, S, ...]; slots that were not fed are zero.
    """
    wanted = length - 1

    def run(fed: Array, start: Array, held: tuple[Cache, Any]) -> tuple[Cache, Any]:
        cache, reads = target.with_length(held[0], start), held[1]
        if observer is None:
            return target.apply(params, fed, cache)[1], reads
        assert target.hidden.streams is not None  # checked by build_decoder
        _, hidden, cache = target.hidden.streams(params, fed, cache, observer.layers)
        rows, slots = jnp.arange(fed.shape[0])[:, None], start[:, None] + jnp.arange(fed.shape[1])[None, :]
        put = lambda leaf, new: leaf.at[rows, slots].set(new, mode="drop")  # noqa: E731
        return cache, jax.tree.map(put, reads, observer.features(reader, hidden))

    reads = ()
    if observer is not None:
        hidden = jax.ShapeDtypeStruct((*tokens.shape, len(observer.layers), observer.target_width), jnp.float32)
        empty = jax.eval_shape(observer.features, reader, hidden)
        reads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)
    with jax.named_scope("prefill"):  # products of 512 rows are closer to peak throughput than those of 64
        held, _ = feed_long(run, (cache, reads), tokens, cache.length, wanted, chunk, WIDE * chunk)
    return target.with_length(held[0], wanted), held[1]
