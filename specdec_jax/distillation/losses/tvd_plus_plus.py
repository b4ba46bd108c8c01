"""TVD++: total variation seen as a policy gradient, its reward normalised."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.distillation.losses._safe import finite, weighted
from specdec_jax.types import Array

LEAST_SPREAD = 1e-4  # of the reward; below it there is nothing to learn from


def tvd_plus_plus(log_p: Array, log_q: Array, progress: Array) -> Array:
    """A surrogate of [..., N] whose gradient is that of TVD++ (Goel et al., 2403.00858, section 3).

    The gradient of total variation is -E[r grad log q] over q with the reward r = 1{p > q}; TVD++ takes the advantage
    (r - mu) / sigma instead. The estimator is not published, so this is our choice: the expectation over q is exact
    (every outcome, not samples), mu and sigma are the reward's mean and spread under q over all positions of a call.
    Then mu changes nothing (the expectation of grad log q is zero at every position) and sigma rescales: the direction
    is total variation's, its length grows as rewards become rare. The value itself means nothing.

    A caller that cuts a batch into chunks, as `distillation.head` does, has one mu and one sigma per chunk, padding
    included: then each chunk's part of the gradient has its own scale, and only within a chunk is the direction kept.
    """
    del progress
    log_p, fixed = lax.stop_gradient(log_p), lax.stop_gradient(log_q)
    q = jnp.exp(fixed)
    reward = (log_p > fixed).astype(q.dtype)
    total = jnp.maximum(jnp.sum(q), 1e-30)
    mean = jnp.sum(q * reward) / total
    spread = jnp.sqrt(jnp.sum(q * jnp.square(reward - mean)) / total)
    advantage = (reward - mean) / jnp.maximum(spread, LEAST_SPREAD)
    return -weighted(q, advantage * finite(log_q))
