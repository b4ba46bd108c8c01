"""Total variation: one minus the acceptance rate of drafts, the objective of a drafter."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.types import Array


def total_variation(log_p: Array, log_q: Array, progress: Array) -> Array:
    """Half the sum of |p - q| over outcomes: [..., N, O] to [..., N], equal to 1 - sum min(p, q) (Leviathan et al.,
    2211.17192, section 3). Its gradient vanishes for disjoint supports: begin training with another loss."""
    del progress
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(lax.stop_gradient(log_p)) - jnp.exp(log_q)), axis=-1)
