"""A drafter that reads the rows of its head for the most frequent tokens only.

Most of a small drafter's pass is its head: V rows, read from memory, for tokens that text hardly uses. With those of
the N most frequent ones the pass costs less; a token outside them is never proposed, which costs acceptance. The
target's distribution is untouched: the drafter's is another one, exactly the distribution that its tokens are drawn
from.

Source: FR-Spec (arXiv 2502.14856), who do it to EAGLE's head; EAGLE-3's checkpoints are trained with one.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.models.layers import project
from specdec_jax.types import Array, LanguageModel, Params, Reading, ReducedHead


class ReducedParams(NamedTuple):
    """A model's weights, and what drafting reads in place of its whole head."""

    model: Params
    kernel: Array  # [N, D], rows of the head
    tokens: Array  # [N] int32, whose rows they are, ascending
    place: Array  # [V] int32, where a token stands among them; N: nowhere

    @property
    def unread_bytes(self) -> int:
        """What a pass leaves unread: the whole head, which may be the embedding too, and all but N places."""
        return self.place.size * self.kernel.shape[1] * self.kernel.dtype.itemsize + self.place.nbytes


@functools.lru_cache(maxsize=16)
def with_reduced_head(model: LanguageModel) -> LanguageModel:
    """The same model with `ReducedParams` as its parameters.

    `apply` gives logits of the whole vocabulary, -inf for tokens without a row; `reduced` those of the N tokens.

    Raises:
        ValueError: the model does not offer its head, or has a reduced one.
    """
    head = model.head
    if head is None or model.reduced is not None:
        raise ValueError("its head is reduced already" if model.reduced else "this model does not offer its head apart")

    def few(params, tokens, cache, positions=None, mask=None):
        hidden, cache = head.hidden(params.model, tokens, cache, positions, mask)
        return project(hidden, params.kernel, params.kernel.dtype), cache

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, cache = few(params, tokens, cache, positions, mask)
        return spread(params, logits), cache

    def init_cache(params, batch, slots, source=None):
        return model.init_cache(None if params is None else params.model, batch, slots, source)

    reduced, reading = ReducedHead(few, lambda params: params.tokens, spread), model.reading
    reading = None if reading is None else _reduced_reading(reading)
    return model._replace(init_cache=init_cache, apply=apply, head=None, reduced=reduced, reading=reading)


def _reduced_reading(whole: Reading) -> Reading:
    """The same reading with `ReducedParams`, and logits of the N tokens."""
    return Reading(
        whole.layers,
        whole.width,
        whole.dtype,
        lambda params, hidden: whole.read(params.model, hidden),
        lambda params, hidden: whole.own(params.model, hidden),
        lambda params, tokens, reads, cache: whole.forward(params.model, tokens, reads, cache),
        lambda params, hidden: project(hidden, params.kernel, params.kernel.dtype),
    )


def spread(params: ReducedParams, values: Array) -> Array:
    """[..., N] values of the N tokens as [..., V], -inf where a token has none."""
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
    return jnp.take(padded, params.place, axis=-1)


def reduce_params(model: LanguageModel, params: Params, tokens: Sequence[int] | np.ndarray) -> ReducedParams:
    """Weights for `with_reduced_head(model)`: the head's rows of these tokens, in any order.

    Raises:
        ValueError: no tokens, one twice, one outside the vocabulary, or a model that does not offer its head.
    """
    if model.head is None:
        raise ValueError("this model does not offer its head apart")
    vocab, given = model.spec.vocab_size, np.asarray(tokens)
    if given.ndim != 1 or not given.size or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"a draft vocabulary is a list of token ids, got {_short(given)}")
    if given.min() < 0 or given.max() >= vocab:
        wrong = given[(given < 0) | (given >= vocab)][0]
        raise ValueError(f"a draft vocabulary holds tokens 0 to {vocab - 1}, got {wrong}")
    chosen = np.unique(given).astype(np.int32)
    if chosen.size < given.size:
        raise ValueError(f"a draft vocabulary names each token once, {given.size - chosen.size} are there again")
    place = np.full(vocab, chosen.size, np.int32)
    place[chosen] = np.arange(chosen.size)
    kernel = jnp.asarray(model.head.kernel(params))[chosen]
    return ReducedParams(params, kernel, jnp.asarray(chosen), jnp.asarray(place))


def check_whole(params: Params) -> None:
    """For those who save weights. Raises ValueError for those of a drafter with a draft vocabulary."""
    if isinstance(params, ReducedParams):
        raise ValueError("a draft vocabulary is no part of saved weights: save `params.model`, and load it with @N")


def _short(given: np.ndarray) -> str:
    return f"an array of shape {given.shape} and dtype {given.dtype}"
