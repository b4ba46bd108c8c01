"""The distribution of a drafted token after a lossy verifier, in closed form, compared with the target's.

Positions without a draft, including bonus tokens, have the target's distribution. Where x was drafted from q, each
function below returns the distribution of the emitted token, given that all earlier drafts were accepted; the sum over
x costs V, not V * V, because the distribution after a rejection depends on x in at most one entry.

`deviations` measures them along texts with real models, as if a token had been drafted at every position. It does not
measure the deviation of whole texts.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding import Decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import distributions, entropy, make_warp, normalised, pick
from specdec_jax.decoding.scoring import texts_of_one_length
from specdec_jax.decoding.teacher_forcing import PairCache, feed_both, init_caches
from specdec_jax.types import Array, Distribution, LanguageModel, Warp
from specdec_jax.verification.easd import shared_share

# (target Distribution, drafter Distribution, is_sampled [..., 1] bool, **hyperparameters) -> [..., V] probabilities
EmittedDistribution = Callable[..., Array]


def rejection_distribution(target: Distribution, drafter: Distribution, is_sampled: Array) -> Array:
    """The distribution p of the target."""
    del drafter, is_sampled
    return jnp.exp(target.log_prob)


def lenience_distribution(target: Distribution, drafter: Distribution, is_sampled: Array, lenience: Any = 0.5) -> Array:
    """min(q, p / l), with the rest from max(0, p - q); for greedy rows (not `is_sampled`) by the raw one, l max p."""
    p, q = jnp.exp(target.log_prob), jnp.exp(drafter.log_prob)
    assert target.raw_log_prob is not None
    near = jnp.exp(target.raw_log_prob) > lenience * target.raw_max_prob[..., None]
    accepted = jnp.where(is_sampled, jnp.minimum(q, p / lenience), jnp.where(near, q, jnp.minimum(q, p)))
    return accepted + _missing(accepted) * normalised(jnp.maximum(p - q, 0.0))


def typical_distribution(
    target: Distribution, drafter: Distribution, is_sampled: Array, epsilon: Any = 0.09, delta: Any = 0.3
) -> Array:
    """q where p exceeds the threshold, with the rest from p."""
    del is_sampled
    p, q = jnp.exp(target.log_prob), jnp.exp(drafter.log_prob)
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-target.entropy))[..., None]
    accepted = jnp.where(p > threshold, q, 0.0)
    return accepted + _missing(accepted) * p


def easd_distribution(
    target: Distribution,
    drafter: Distribution,
    is_sampled: Array,
    drafter_entropy: Any = 1.0,
    target_entropy: Any = 1.0,
    overlap: Any = 0.6,
    top_n: int = 8,
) -> Array:
    """p; at uncertain positions p(y) (S - s(y)) + max(0, p - q)(y) with s = min(p, q) / (1 - p), S its sum."""
    del is_sampled
    p, q = jnp.exp(target.log_prob), jnp.exp(drafter.log_prob)
    high_entropy = (entropy(drafter.log_prob) > drafter_entropy) & (target.entropy > target_entropy)
    uncertain = high_entropy & (shared_share(target.log_prob, drafter.log_prob, top_n) >= overlap)
    share = jnp.where(p < 1, jnp.minimum(p, q) / jnp.where(p < 1, 1.0 - p, 1.0), 0.0)
    redrawn = p * (jnp.sum(share, axis=-1, keepdims=True) - share) + jnp.maximum(p - q, 0.0)
    return jnp.where(uncertain[..., None], redrawn, p)


DISTRIBUTIONS: Mapping[str, EmittedDistribution] = {
    "rejection": rejection_distribution,
    "lenience": lenience_distribution,
    "typical": typical_distribution,
    "easd": easd_distribution,
}


class Deviations(NamedTuple):
    """The deviation of the emitted token's distribution from the target's at each position of texts.

    Entry t is for token t + 1 given tokens 0..t.
    """

    total_variation: Array  # [B, T-1] float32; [N, B, T-1] of N settings
    divergence: Array  # as above, nats, KL(emitted || target); infinite for a token of probability 0 under the target
    log_likelihood: Array  # [B, T-1] float32, nats, of the token under the target at temperature 1 without truncation
    first_choice: Array  # [B, T-1] bool, the token is the target's most probable one


def deviations(
    decoder: Decoder,
    params: ModelParams,
    tokens: Any,
    *,
    verifier: str,
    hyperparameters: Mapping[str, Any] | None = None,
    warp: Warp | None = None,
    chunk: int = 32,
) -> Deviations:
    """`Deviations` of texts [B, T] with both models of a decoder, by passes of `chunk` tokens; T = 2 or more.

    The `hyperparameters` of the verifier's distribution (`DISTRIBUTIONS`) are traced, so that a sweep compiles once;
    with arrays [N], N settings share the passes. `warp` is that of both distributions, by default temperature 1.

    Raises ValueError: an unknown verifier, another shape, or a drafter without a model.
    """
    if verifier not in DISTRIBUTIONS:
        raise ValueError(f"no emitted distribution of {verifier!r} is known (there are: {', '.join(DISTRIBUTIONS)})")
    text = texts_of_one_length("deviations need", tokens, decoder.parts.target.spec)
    if decoder.parts.drafter.model is None:
        raise ValueError("deviations need a drafter that is a language model")
    settings = dict(hyperparameters or {})
    static_options = tuple((name, settings.pop(name)) for name in ("top_n",) if name in settings)
    padded = np.pad(text, ((0, 0), (0, -(text.shape[1] - 1) % chunk)))
    warp = warp or make_warp(len(text), temperature=1.0)
    models = decoder.parts.target, decoder.parts.drafter.model
    by_position = _passes(*models, verifier, static_options, chunk, params, padded, warp, settings)
    return jax.tree.map(lambda leaf: leaf[..., : text.shape[1] - 1], by_position)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _passes(
    target: LanguageModel,
    drafter: LanguageModel,
    verifier: str,
    static_options: tuple[tuple[str, Any], ...],
    chunk: int,
    params: ModelParams,
    tokens: Array,
    warp: Warp,
    hyperparameters: Mapping[str, Any],
) -> Deviations:
    """Passes that keep a number per position, never [B, T, V]."""
    batch, length = tokens.shape
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    is_sampled = (warp.temperature > 0)[:, None, None]

    def one_chunk(caches: PairCache, index: Array) -> tuple[PairCache, Deviations]:
        fed = lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1)
        token = lax.dynamic_slice_in_dim(following, index * chunk, chunk, axis=1)
        p_logits, q_logits, caches = feed_both((target, drafter), (params.target, params.drafter), fed, caches)
        big, small = distributions(p_logits, warp), distributions(q_logits, warp)

        def moved(settings: Mapping[str, Any]) -> tuple[Array, Array]:
            emitted = DISTRIBUTIONS[verifier](big, small, is_sampled, **settings, **dict(static_options))
            distance = 0.5 * jnp.sum(jnp.abs(emitted - jnp.exp(big.log_prob)), axis=-1)
            ratio = jnp.log(jnp.where(emitted > 0, emitted, 1.0)) - big.log_prob
            return distance, jnp.sum(jnp.where(emitted > 0, emitted * ratio, 0.0), axis=-1)

        swept = any(jnp.ndim(value) for value in hyperparameters.values())
        distance, divergence = lax.map(moved, hyperparameters) if swept else moved(hyperparameters)
        assert big.raw_log_prob is not None
        likelihood = pick(big.raw_log_prob, token)
        return caches, Deviations(distance, divergence, likelihood, token == big.top_token)

    caches = init_caches((target, drafter), (params.target, params.drafter), batch, length)
    _, by_chunk = lax.scan(one_chunk, caches, jnp.arange(length // chunk, dtype=jnp.int32))
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -2).reshape(*leaf.shape[1:-1], -1), by_chunk)


def _missing(accepted: Array) -> Array:
    return jnp.maximum(1.0 - jnp.sum(accepted, axis=-1, keepdims=True), 0.0)
