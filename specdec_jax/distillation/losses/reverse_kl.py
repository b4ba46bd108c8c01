"""KL(q || p), mode-seeking: the drafter must avoid outcomes that are improbable under the target."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.distillation.losses._safe import finite, weighted
from specdec_jax.types import Array


def reverse_kl(log_p: Array, log_q: Array, progress: Array) -> Array:
    """Sum of q (log q - log p) over outcomes, nats: [..., N, O] to [..., N] (DistillSpec, 2310.08461, section 3)."""
    del progress
    log_p = lax.stop_gradient(log_p)
    return weighted(jnp.exp(finite(log_q)), finite(log_q) - finite(log_p))
