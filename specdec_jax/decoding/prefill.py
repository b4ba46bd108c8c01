"""A prompt goes into the caches of target and drafter, each by a program of its own.

Apart from `run` and from each other, because nothing of a policy or verifier is in them: all decoders of a target share
its program, and with the persistent cache all processes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding.cache_feed import feed_long
from specdec_jax.decoding.programs import counted
from specdec_jax.sharding import by_rows
from specdec_jax.types import Array, Cache, Drafter, LanguageModel, Observer, Params, Seen

WIDE = 8  # times the chunk, of passes that long prompts are fed by


class _WithReads(NamedTuple):
    """A target's cache, and beside it what a drafter keeps of the hidden states at each of its slots."""

    cache: Cache
    reads: Any  # leaves [B, S, ...]
    length: Array  # [B] int32, the cache's


@functools.lru_cache(maxsize=32)
def target_prefill(
    target: LanguageModel, observer: Observer | None, chunk: int, compiler_options: tuple[Any, ...] = ()
) -> Any:
    """(params, drafter's params, tokens [B, S], lengths [B], source) -> (the target's cache of all but the last tokens,
    what `observer` takes of them, leaves [B, S, ...]), jitted. An encoder reads its source here.

    A program by itself, without what a policy brings: all decoders of a target share it, and those whose drafters read
    it with others that read the same.
    """

    def prefill(params: Params, reader: Params, tokens: Array, length: Array, source: Any = None) -> tuple[Cache, Any]:
        batch, slots = tokens.shape
        cache = target.init_cache(params, batch, slots, source)
        return by_rows(fill(target, observer, params, reader, tokens, length, cache, chunk))

    return jax.jit(counted(prefill), compiler_options=dict(compiler_options) or None)


@functools.lru_cache(maxsize=32)
def drafter_prefill(drafter: Drafter, compiler_options: tuple[Any, ...] = ()) -> Any:
    """(params, tokens [B, S], lengths [B], reads, source) -> the drafter's state after them, jitted.

    `reads` is what `target_prefill` gives, and the program is shared as that one is.
    """

    def prefill_drafter(params: Params, tokens: Array, length: Array, reads: Any, source: Any = None) -> Any:
        more = () if source is None else (source,)
        fresh = drafter.init(params, *tokens.shape, *more)
        return by_rows(fill_drafter(drafter, params, fresh, tokens, reads, jnp.zeros_like(length), length))

    return jax.jit(counted(prefill_drafter), compiler_options=dict(compiler_options) or None)


def fill_drafter(
    drafter: Drafter, params: Params, state: Any, tokens: Array, reads: Any, start: Array, length: Array
) -> Any:
    """The drafter's state for a text of `length` [B], with what was kept [B, S, ...] of it from `start` [B] on."""
    if not drafter.layers:
        return drafter.fill(params, state, tokens, length)

    def from_start(leaf: Array) -> Array:
        slots = start[:, None] + jnp.arange(leaf.shape[1], dtype=jnp.int32)[None, :]
        return jnp.take_along_axis(leaf, slots.reshape(*slots.shape, *[1] * (leaf.ndim - 2)), axis=1, mode="clip")

    seen = Seen(jax.tree.map(from_start, reads), start, jnp.maximum(length - 1 - start, 0))
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
    """The target's cache after all tokens but the last were fed from where it ends, and what `observer` takes of them.

    `reader` are the drafter's parameters. What is kept has leaves [B, S, ...]; slots that were not fed are zero.
    """
    if observer is None:
        return _fill(target, params, tokens, length, cache, chunk), ()
    model = _keeping(target, observer)
    shapes = jax.eval_shape(
        lambda: model.apply((params, reader), tokens[:, :1], _WithReads(cache, None, cache.length))[0]
    )
    reads = jax.tree.map(lambda leaf: jnp.zeros((*tokens.shape, *leaf.shape[2:]), leaf.dtype), shapes)
    filled = _fill(model, (params, reader), tokens, length, _WithReads(cache, reads, cache.length), chunk)
    return filled.cache, filled.reads


def _keeping(target: LanguageModel, observer: Observer) -> LanguageModel:
    """The target with `_WithReads` as its cache, and no logits: what is kept comes in their place."""

    def apply(
        params: Any, tokens: Array, cache: _WithReads, positions: Any = None, mask: Any = None
    ) -> tuple[Any, _WithReads]:
        assert target.hidden.streams is not None  # build_decoder looked
        _, hidden, inner = target.hidden.streams(params[0], tokens, cache.cache, observer.layers)
        new = observer.take(params[1], hidden, None)
        rows, slots = jnp.arange(tokens.shape[0])[:, None], cache.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
        put = lambda leaf, new_leaf: leaf.at[rows, slots].set(new_leaf, mode="drop")  # noqa: E731
        reads = None if cache.reads is None else jax.tree.map(put, cache.reads, new)
        return new, _WithReads(inner, reads, cache.length + tokens.shape[1])

    def with_length(cache: _WithReads, length: Array) -> _WithReads:
        return cache._replace(cache=target.with_length(cache.cache, length), length=length)

    return target.replace(apply=apply, with_length=with_length)


def _fill(target: LanguageModel, params: Params, tokens: Array, length: Array, cache: Any, chunk: int) -> Any:
    """Feed the target all tokens but the last, from where its cache ends.

    Wide passes have eight times the size: products of 512 rows come nearer to a large one's rate than those of 64.
    """
    wanted = length - 1
    with jax.named_scope("prefill"):
        cache, _ = feed_long(target, params, cache, tokens, cache.length, wanted, chunk, WIDE * chunk)
    return target.with_length(cache, wanted)
