"""TVD++: total variation as a policy gradient with normalised reward."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.distillation.losses._safe import finite, weighted
from specdec_jax.types import Array

LEAST_SPREAD = 1e-4  # minimum standard deviation of the reward


def tvd_plus_plus(log_p: Array, log_q: Array, progress: Array) -> Array:
    """A surrogate [..., N] whose gradient is that of TVD++ (Goel et al., 2403.00858, section 3).

    The gradient of total variation is -E[r grad log q] over q with the reward r = 1{p > q}; TVD++ takes the advantage
    (r - mu) / sigma instead. The estimator is not published; here the expectation over q is exact (all outcomes, not
    samples), and mu and sigma are the mean and standard deviation of the reward under q over all positions of a call.
    Then mu has no effect (the expectation of grad log q is zero at every position) and sigma rescales: the direction
    is that of total variation, and the length grows as rewards become rare. The value itself is meaningless.

    A caller that splits a batch into chunks, such as `distillation.head`, has one mu and one sigma per chunk, including
    padding: then each chunk's part of the gradient has its own scale, and the direction is kept only within a chunk.
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
