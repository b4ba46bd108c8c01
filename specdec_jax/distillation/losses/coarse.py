"""Distributions over the labels kept and everything else."""

import jax.numpy as jnp

from specdec_jax.types import Array

LEAST_REST = 1e-6  # of probability: what rounding may take from the mass outside the labels


def coarse_distributions(top_log_prob: Array, drafter_log_prob: Array) -> tuple[Array, Array]:
    """Both distributions over k labels and the rest: ([..., k], [..., k]) to ([..., k + 1], [..., k + 1]), nats.

    The last outcome is all that is no label. A label of -inf is none: its probability counts with the rest on both
    sides. Merging outcomes cannot raise a divergence (data processing), so a divergence of these is a lower bound of
    the true one, and their acceptance an upper bound. The rest is at least 1e-6 on both sides, so that labels that hold
    all of the mass leave a logarithm and its gradient finite; the bounds hold to about that much.
    """
    stored = jnp.isfinite(top_log_prob)
    return _with_rest(top_log_prob, stored), _with_rest(drafter_log_prob, stored)


def _with_rest(log_prob: Array, stored: Array) -> Array:
    inside = jnp.sum(jnp.where(stored, jnp.exp(jnp.where(stored, log_prob, 0.0)), 0.0), axis=-1, keepdims=True)
    rest = jnp.log(jnp.maximum(1.0 - inside, LEAST_REST))
    return jnp.concatenate([jnp.where(stored, log_prob, -jnp.inf), rest], axis=-1)
