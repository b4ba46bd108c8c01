"""Which share of a target's probability the tokens hold that a drafter of another vocabulary has too."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.loading.intersection import SAMPLE_TEXT
from specdec_jax.models.intersection import SharedParams
from specdec_jax.types import Array, LanguageModel, Params


def probability_shared(target: Any, drafter: Any) -> float | None:
    """The target's probability, at temperature 1, of the tokens that both have: a mean over a sample text's positions.

    One pass of the target, a `LoadedModel`. None: `drafter`, parameters, is of the target's own vocabulary.
    """
    if not isinstance(drafter, SharedParams):
        return None
    tokens = jnp.asarray([target.tokenizer.encode(SAMPLE_TEXT, add_special=True)], jnp.int32)
    return float(_mean(target.model, target.params, tokens, drafter.tokens))


@functools.partial(jax.jit, static_argnums=0)
def _mean(model: LanguageModel, params: Params, tokens: Array, shared: Array) -> Array:
    """The probability of the `shared` tokens [N] after each of tokens [1, T], its mean []."""
    logits, _ = model.apply(params, tokens, model.init_cache(params, 1, tokens.shape[1]))
    return jnp.mean(jnp.sum(jax.nn.softmax(logits, axis=-1)[:, :, shared], axis=-1))
