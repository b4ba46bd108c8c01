"""Where two outputs differ first, and the target's logit gap between the two tokens.

Also the differences between the next-token distributions of two models along a text, such as those of one model with
weights in two precisions.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.teacher_forcing import feed_both, init_caches
from specdec_jax.types import Array, LanguageModel, Params

PADDED = 64  # texts are padded to multiples of this, to compile few shapes


class Difference(NamedTuple):
    """The first token at which two outputs differ."""

    position: int  # index into the new tokens
    tokens: tuple[int | None, int | None]  # None: the output has ended
    logit_gap: float | None  # |logit difference| of the two tokens under the target, at temperature 1


def first_difference(first: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that only one of them has); None for equal sequences."""
    if list(first) == list(other):
        return None
    shared = min(len(first), len(other))
    return next((i for i in range(shared) if first[i] != other[i]), shared)


def compare_outputs(
    target: LanguageModel, params: Params, prompt: Sequence[int], first: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """The first difference of two outputs for one prompt; None if they are equal.

    In bfloat16 passes of different widths round differently, so a greedy choice between nearly equal logits may change;
    a small gap indicates this case. It is computed by one teacher-forced pass over the common prefix.
    """
    at = first_difference(first, other)
    if at is None:
        return None
    pair = (first[at] if at < len(first) else None, other[at] if at < len(other) else None)
    if pair[0] is None or pair[1] is None:
        return Difference(at, pair, None)
    common = [*prompt, *first[:at]]
    padded = _padded(common)
    cache = target.init_cache(params, 1, padded.shape[1])
    logits, _ = target.apply(params, padded, cache)
    row = logits[0, len(common) - 1]
    return Difference(at, pair, float(jnp.abs(row[pair[0]] - row[pair[1]])))


class Change(NamedTuple):
    """Differences of two models' next-token distributions; entry t is for token t + 1 of a text of T tokens."""

    divergence: Array  # [T-1] float32, nats, KL(one || other)
    same_top: Array  # [T-1] bool, the most probable token is the same
    mean: Array  # [T-1] float32, mean absolute difference of logits
    largest: Array  # [T-1] float32, largest absolute difference


def changes_along(
    models: tuple[LanguageModel, LanguageModel], params: tuple[Params, Params], text: Sequence[int]
) -> Change:
    """Differences of two models with the same vocabulary, from one pass each over a text, as host arrays.

    Raises ValueError for texts of fewer than two tokens, or different sizes of vocabularies.
    """
    if len(text) < 2:
        raise ValueError(f"a text of {len(text)} tokens has no next one")
    sizes = [model.spec.vocab_size for model in models]
    if sizes[0] != sizes[1]:
        raise ValueError(f"logits of {sizes[0]} and of {sizes[1]} tokens cannot be compared")
    changes = jax.device_get(_changes(models, params, _padded(text)))
    return Change(*(values[: len(text) - 1] for values in changes))


@functools.partial(jax.jit, static_argnums=0)
def _changes(models: tuple[LanguageModel, LanguageModel], params: tuple[Params, Params], tokens: Array) -> Change:
    *both, _ = feed_both(models, params, tokens, init_caches(models, params, *tokens.shape))
    first, other = (logits[0].astype(jnp.float32) for logits in both)
    log_p, log_q = jax.nn.log_softmax(first), jax.nn.log_softmax(other)
    p, apart = jnp.exp(log_p), jnp.abs(first - other)
    divergence = jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
    same = jnp.argmax(first, axis=-1) == jnp.argmax(other, axis=-1)
    return Change(divergence, same, jnp.mean(apart, axis=-1), jnp.max(apart, axis=-1))


def _padded(text: Sequence[int]) -> Array:
    """The padded text, [1, S] int32."""
    return jnp.asarray(np.pad(np.asarray(text, np.int32), (0, -len(text) % PADDED))[None])
