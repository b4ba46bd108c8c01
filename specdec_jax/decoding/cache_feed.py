"""A text fed to a language model's cache, many tokens a pass: prompts, and drafters that sat out."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.types import Array, Cache, LanguageModel, Params


def feed(
    model: LanguageModel, params: Params, cache: Cache, tokens: Array, known: Array, wanted: Array, chunk: int
) -> tuple[Cache, Array]:
    """Feed what is missing of each row's first `wanted` [B] tokens, `chunk` a pass, to a cache that holds `known` [B].

    Returns the cache and how many tokens [B] it holds now, max(known, wanted). Its own length is that of the last pass:
    the caller sets the one it wants (`with_length`).
    """
    chunk = min(chunk, tokens.shape[1])

    def one(carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
        cache, known = carry
        # Starting early enough to end inside the cache feeds some tokens again, to the same values: a start that runs
        # over the end would be clamped silently and overwrite good entries.
        start = jnp.minimum(known, tokens.shape[1] - chunk)
        _, cache = model.apply(params, window(tokens, start, chunk), model.with_length(cache, start))
        return cache, jnp.maximum(known, jnp.minimum(start + chunk, wanted))

    return lax.while_loop(lambda carry: jnp.any(carry[1] < wanted), one, (cache, known))


def window(tokens: Array, start: Array, size: int) -> Array:
    """tokens[b, start[b] : start[b] + size] for every row, [B, size]."""
    offset = jnp.arange(size, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(tokens, start[:, None] + offset, axis=1)
