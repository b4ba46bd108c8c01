"""Products with logarithms of distributions that have zeros, without a NaN in the value or the gradient."""

import jax.numpy as jnp

from specdec_jax.types import Array

LEAST = -60.0  # nats; keeps divergences finite where q is 0 and p is not


def finite(log: Array) -> Array:
    """Log-probabilities clipped at `LEAST` from below; their gradient is then zero."""
    return jnp.where(log > LEAST, log, LEAST)


def weighted(weight: Array, value: Array) -> Array:
    """Sum over outcomes of weight times value, zero where the weight is zero."""
    return jnp.sum(jnp.where(weight > 0, weight * value, 0.0), axis=-1)
