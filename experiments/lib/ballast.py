"""Models with ballast: the text of a small model at the cost of a large one.

Every pass of such a model is followed by a pass of a random model of another shape over the same tokens, whose result
changes nothing. Text, acceptance and drafts are real, and so are bytes read and operations; what is said is the small
model's. For machines that no large weights are on.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.loading import LoadedModel
from specdec_jax.models import llama
from specdec_jax.types import Array, Cache, LanguageModel

NEVER = 3e38  # no logit of the ballast is larger


class BallastCache(NamedTuple):
    """Both caches; they have one length."""

    real: Any
    ballast: Any

    @property
    def length(self) -> Array:
        """[B] int32."""
        return self.real.length


def with_ballast(loaded: LoadedModel, config: llama.LlamaConfig, dtype: Any, seed: int = 0) -> LoadedModel:
    """The loaded model with a random model of that shape as ballast; parameters are a pair, theirs and the ballast's.

    Raises:
        ValueError: a drafter with a draft vocabulary, whose pass cannot be left whole.
    """
    if loaded.model.reduced is not None:
        raise ValueError(f"{loaded.name!r} has a draft vocabulary: ballast goes with whole models")
    model = ballasted(loaded.model, llama.language_model(config, jnp.dtype(dtype)))
    made = jax.jit(functools.partial(llama.init_params, config, dtype=jnp.dtype(dtype)))(jax.random.key(seed))
    return loaded._replace(model=model, params=(loaded.params, made), name=f"{loaded.name} with ballast")


def ballasted(real: LanguageModel, ballast: LanguageModel) -> LanguageModel:
    """Both passes, one after the other."""

    def init_cache(params, batch, slots, source=None):
        own, extra = params if params is not None else (None, None)
        return BallastCache(real.init_cache(own, batch, slots, source), ballast.init_cache(extra, batch, slots))

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, kept = real.apply(params[0], tokens, cache.real, positions, mask)
        own = tokens % ballast.spec.vocab_size
        extra, also = ballast.apply(params[1], own, cache.ballast, positions, mask)
        # what no compiler can know to be nothing
        weight = jnp.where(jnp.max(extra, axis=-1, keepdims=True) > NEVER, 1.0, 0.0).astype(logits.dtype)
        return logits + weight, BallastCache(kept, also)

    def with_length(cache: Cache, length: Array) -> Cache:
        return BallastCache(real.with_length(cache.real, length), ballast.with_length(cache.ballast, length))

    return LanguageModel(init_cache, apply, with_length, real.spec._replace(by_position=False))
