"""Adapters to `types.LanguageModel`: for a plain function, a function with a cache, and an nnx module."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import attention
from specdec_jax.types import Cache, LanguageModel, ModelSpec, Params

if TYPE_CHECKING:
    from flax import nnx

Array = jax.Array


class TokenCache(NamedTuple):
    """The cache of a model without a cache: the tokens."""

    tokens: Array  # [B, S] int32
    length: Array  # [B] int32, number of valid tokens; a causal model never reads the others


def from_logits_function(function: Callable[[Params, Array], Array], spec: ModelSpec) -> LanguageModel:
    """A model from `function(params, tokens [B, S] int32) -> logits [B, S, V]`, for toys and models without a cache.

    The function must be causal: entry s may depend on tokens 0..s only. Every pass recomputes all S slots.

    Raises ValueError, at tracing, for logits with another vocabulary size and for `positions` or `mask`.
    """

    def init_cache(params, batch, slots, source=None):
        del params, source
        return TokenCache(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def apply(params, tokens, cache, positions=None, mask=None):
        _refuse(positions, mask)
        slots = cache.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
        rows = jnp.arange(tokens.shape[0])[:, None]
        text = cache.tokens.at[rows, slots].set(tokens.astype(jnp.int32), mode="drop", unique_indices=True)
        logits = _checked(function(params, text), (*text.shape, spec.vocab_size))
        logits = jnp.take_along_axis(logits, slots[:, :, None], axis=1, mode="clip")
        return logits, TokenCache(text, cache.length + tokens.shape[1])

    return LanguageModel(init_cache, apply, attention.with_length, spec)


def from_function(
    apply: Callable[[Params, Array, Cache], tuple[Array, Cache]],
    init_cache: Callable[[Params, int, int], Cache],
    spec: ModelSpec,
    with_length: Callable[[Cache, Array], Cache] = attention.with_length,
) -> LanguageModel:
    """A model from `apply(params, tokens [B, T], cache) -> (logits [B, T, V], cache)` and `init_cache(params, batch,
    slots)`, without support for trees and encoders. The cache must be a pytree, written from slot `length` [B].

    Raises ValueError, at tracing, for logits of another shape and for `positions` or `mask`.
    """

    def init(params, batch, slots, source=None):
        if source is not None:
            raise ValueError("this model takes no source: its init_cache has three arguments")
        return init_cache(params, batch, slots)

    def checked_apply(params, tokens, cache, positions=None, mask=None):
        _refuse(positions, mask)
        logits, cache = apply(params, tokens, cache)
        return _checked(logits, (*tokens.shape, spec.vocab_size)), cache

    return LanguageModel(init, checked_apply, with_length, spec)


def from_nnx(
    module: "nnx.Module",
    init_cache: Callable[[Params, int, int], Cache],
    spec: ModelSpec,
    with_length: Callable[[Cache, Array], Cache] = attention.with_length,
) -> tuple[LanguageModel, Params]:
    """(model, params) from an nnx module called as `module(tokens [B, T], cache) -> (logits [B, T, V], cache)`.

    The module is split once: the graph is static, the state is `params`. The module must return its cache, not store
    it: writes to its variables inside a pass are dropped, because mutating a module inside `lax.while_loop` is an error
    (`TraceContextError`) and `nnx.while_loop` retraces on every call.
    """
    from flax import nnx  # here, because its import takes half a second

    graph, params = nnx.split(module)

    def apply(params, tokens, cache):
        return nnx.merge(graph, params)(tokens, cache)

    return from_function(apply, init_cache, spec, with_length), params


def with_source(model: LanguageModel, tokens: Sequence[int]) -> LanguageModel:
    """A model with an encoder as one without: every row has this source.

    For code without sources: proofs, and measurements of passes. Raises ValueError for a model without an encoder.
    """
    if model.spec.source is None:
        raise ValueError("this model has no encoder: there is nothing that would read a source")
    ids = np.asarray(tokens, np.int32)

    def init_cache(params, batch, slots, source=None):
        if source is not None:
            raise ValueError("this model has its source already")
        repeated = jnp.broadcast_to(ids[None], (batch, ids.size)), jnp.full((batch,), ids.size, jnp.int32)
        return model.init_cache(params, batch, slots, repeated)

    return model.replace(init_cache=init_cache, spec=model.spec._replace(source=None))


def with_vocabulary(model: LanguageModel, vocab_size: int) -> LanguageModel:
    """The same model over `vocab_size` tokens: logits of padding tokens are cut, those of missing tokens are -inf.

    For pairs that share a tokenizer but not the padding of their embeddings; the caller must check that common tokens
    have the same meaning. Raises ValueError for a size below 1.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    if vocab_size == model.spec.vocab_size:
        return model

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, cache = model.apply(params, tokens, cache, positions, mask)
        return resized(logits, vocab_size), cache

    streams: Any = model.hidden.streams

    def tapped(params, tokens, cache, layers, positions=None, mask=None):
        logits, hidden, cache = streams(params, tokens, cache, layers, positions, mask)
        return resized(logits, vocab_size), hidden, cache

    spec = model.spec._replace(vocab_size=vocab_size)
    hidden = model.hidden._replace(last=None, kernel=None, streams=None if streams is None else tapped)
    return LanguageModel(model.init_cache, apply, model.with_length, spec, hidden)


def resized(values: Array, size: int) -> Array:
    """Values [..., V] cut to [..., size], or padded with -inf."""
    missing = size - values.shape[-1]
    if missing < 0:
        return values[..., :size]
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def _refuse(positions: Array | None, mask: Array | None) -> None:
    if positions is not None or mask is not None:
        raise ValueError("this adapter serves plain causal passes: positions and mask must be None")


def _checked(logits: Array, shape: tuple[int, ...]) -> Array:
    if logits.shape != shape:
        raise ValueError(f"the function returned logits of shape {logits.shape} instead of {shape}")
    return logits.astype(jnp.float32)
