"""KL(p || q), mass-covering: the drafter must cover all outcomes of the target."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.distillation.losses._safe import finite, weighted
from specdec_jax.types import Array


def forward_kl(log_p: Array, log_q: Array, progress: Array) -> Array:
    """Sum of p (log p - log q) over outcomes, nats: [..., N, O] to [..., N] (DistillSpec, 2310.08461, section 3)."""
    del progress
    log_p = lax.stop_gradient(log_p)
    return weighted(jnp.exp(log_p), finite(log_p) - finite(log_q))
