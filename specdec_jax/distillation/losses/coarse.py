"""Distributions over the stored labels and the rest."""

import jax.numpy as jnp

from specdec_jax.types import Array

LEAST_REST = 1e-6  # minimum probability outside the labels, because of rounding


def coarse_distributions(top_log_prob: Array, drafter_log_prob: Array) -> tuple[Array, Array]:
    """Both distributions over k labels and the rest: ([..., k], [..., k]) to ([..., k + 1], [..., k + 1]), nats.

    The last outcome is all tokens without a label. A label of -inf is missing: its probability belongs to the rest on
    both sides. Merging outcomes cannot increase a divergence (data processing inequality), so these divergences are
    lower bounds of the true ones, and the acceptance is an upper bound. The rest is at least 1e-6 on both sides, which
    keeps its logarithm and gradient finite; the bounds hold up to about that value.
    """
    stored = jnp.isfinite(top_log_prob)
    return _with_rest(top_log_prob, stored), _with_rest(drafter_log_prob, stored)


def _with_rest(log_prob: Array, stored: Array) -> Array:
    inside = jnp.sum(jnp.where(stored, jnp.exp(jnp.where(stored, log_prob, 0.0)), 0.0), axis=-1, keepdims=True)
    rest = jnp.log(jnp.maximum(1.0 - inside, LEAST_REST))
    return jnp.concatenate([jnp.where(stored, log_prob, -jnp.inf), rest], axis=-1)
