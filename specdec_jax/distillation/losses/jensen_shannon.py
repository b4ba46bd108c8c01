"""The generalised Jensen-Shannon divergence, a bounded interpolation of the two KL divergences."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.distillation.losses._safe import finite, weighted
from specdec_jax.types import Array


def jensen_shannon(beta: float = 0.5):
    """The loss beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (DistillSpec, 2310.08461, section 3).

    Distributions [..., N, O] to [..., N], nats. Near beta 0 its gradient is beta times that of the forward KL, near 1
    it is 1 - beta times that of the reverse: an extreme beta is also a small learning rate. Raises ValueError unless 0
    < beta < 1.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta of the Jensen-Shannon divergence must lie between 0 and 1, got {beta!r}")

    def loss(log_p: Array, log_q: Array, progress: Array) -> Array:
        del progress
        log_p = lax.stop_gradient(log_p)
        low_p, low_q = finite(log_p), finite(log_q)
        middle = jnp.logaddexp(low_p + jnp.log(beta), low_q + jnp.log(1.0 - beta))
        return beta * weighted(jnp.exp(low_p), low_p - middle) + (1.0 - beta) * weighted(jnp.exp(low_q), low_q - middle)

    return loss
