"""Scores of a given text under target and drafter, from teacher-forced passes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.rounds import ModelParams, Parts
from specdec_jax.decoding.sampling import distributions
from specdec_jax.decoding.teacher_forcing import feed_both, init_caches
from specdec_jax.types import Array, Warp


class Scores(NamedTuple):
    """Scores of a given text under both models; entry t is for token t + 1 given tokens 0..t."""

    log_p: Array  # [B, T-1] float32, the target's, warped
    log_q: Array  # [B, T-1] float32, the drafter's (NaN without a drafter model)
    target_entropy: Array  # [B, T-1] float32, nats, as sampled
    drafter_entropy: Array  # [B, T-1] float32


def padded_text(tokens: Any, chunk: int) -> tuple[np.ndarray, int]:
    """[B, T] tokens padded to passes of `chunk`, and T. Raises ValueError for other shapes and for T < 2."""
    text = np.asarray(tokens, np.int32)
    if text.ndim != 2 or text.shape[1] < 2:
        raise ValueError(f"score needs tokens [rows, length >= 2], got shape {text.shape}")
    return np.pad(text, ((0, 0), (0, -text.shape[1] % chunk + 1))), text.shape[1]


def score_text(parts: Parts, params: ModelParams, tokens: Array, warp: Warp, chunk: int) -> Scores:
    """Scores of [B, T] tokens, `chunk` tokens per pass; logits exist for one pass at a time."""
    batch, length = tokens.shape
    steps = (length - 1) // chunk

    def scored(logits: Array, following: Array) -> tuple[Array, Array]:
        seen = distributions(logits, warp)
        return jnp.take_along_axis(seen.log_prob, following[:, :, None], axis=2)[:, :, 0], seen.entropy

    def score_one(caches: Any, index: Array) -> tuple[Any, Scores]:
        fed = lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1)
        following = lax.dynamic_slice_in_dim(tokens, index * chunk + 1, chunk, axis=1)
        if drafter is None:
            logits, caches = parts.target.apply(params.target, fed, caches)
            log_p, entropy = scored(logits, following)
            unknown = jnp.full_like(log_p, jnp.nan)
            return caches, Scores(log_p, unknown, entropy, unknown)
        p_logits, q_logits, caches = feed_both((parts.target, drafter), both, fed, caches)
        (log_p, entropy), (log_q, drafter_entropy) = scored(p_logits, following), scored(q_logits, following)
        return caches, Scores(log_p, log_q, entropy, drafter_entropy)

    drafter, both = parts.drafter.model, (params.target, params.drafter)
    caches = parts.target.init_cache(params.target, batch, length)
    if drafter is not None:
        caches = init_caches((parts.target, drafter), both, batch, length)
    _, scores = lax.scan(score_one, caches, jnp.arange(steps, dtype=jnp.int32))
    return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1).reshape(batch, -1), scores)
