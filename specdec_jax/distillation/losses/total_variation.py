"""Total variation: one minus the probability that a draft is accepted, which is what a drafter is for."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.types import Array


def total_variation(log_p: Array, log_q: Array, progress: Array) -> Array:
    """Half the sum of |p - q| over outcomes: [..., N, O] to [..., N], equal to 1 - sum min(p, q) (Leviathan et al.,
    2211.17192, section 3). Its gradient vanishes where the supports are apart: begin with another loss."""
    del progress
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(lax.stop_gradient(log_p)) - jnp.exp(log_q)), axis=-1)
