"""Distillation losses: `loss(log_p, log_q) -> [..., N]` of log-probabilities [..., N, O] float32 (nats).

`log_p` is the target's distribution and `log_q` the drafter's, over the same outcomes. Gradients flow into `log_q`.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from specdec_jax.types import Array

Loss = Callable[[Array, Array], Array]

LEAST = -60.0  # nats; keeps divergences finite where q is 0 and p is not
LEAST_REST = 1e-6  # minimum probability outside the labels, because of rounding


def acceptance(log_p: Array, log_q: Array) -> Array:
    """The acceptance rate of rejection sampling, sum(min(p, q)) over outcomes (arXiv 2211.17192)."""
    return jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)), axis=-1)


def forward_kl(log_p: Array, log_q: Array) -> Array:
    """KL(p || q), mass-covering: the sum of p (log p - log q) over outcomes, nats (DistillSpec, arXiv 2310.08461)."""
    log_p = lax.stop_gradient(log_p)
    p = jnp.exp(log_p)
    return jnp.sum(jnp.where(p > 0, p * (_finite(log_p) - _finite(log_q)), 0.0), axis=-1)


def nla(log_p: Array, log_q: Array) -> Array:
    """Negative log acceptance, -log sum(min(p, q)), nats (LK losses, arXiv 2602.23881)."""
    return -jnp.log(acceptance(lax.stop_gradient(log_p), _finite(log_q)))


def lk_hybrid(eta: float = 3.0) -> Loss:
    """w KL(p || q) + (1 - w) (1 - a), where a = sum(min(p, q)) is the acceptance rate and w = exp(-eta mean(a)).

    It begins as the forward KL, whose gradient reaches every outcome, and becomes the rejection rate as the drafter
    improves (LK losses, arXiv 2602.23881). The mean is over all positions of a call: `distillation.head` calls a loss
    for every chunk, padding included, so the weight depends on `chunk` and on the mesh. Raises ValueError unless eta is
    positive.
    """
    if not eta > 0:
        raise ValueError(f"eta must be positive, got {eta!r}")

    def loss(log_p: Array, log_q: Array) -> Array:
        rate = acceptance(lax.stop_gradient(log_p), _finite(log_q))
        weight = jnp.exp(-eta * lax.stop_gradient(jnp.mean(rate)))
        return weight * forward_kl(log_p, log_q) + (1.0 - weight) * (1.0 - rate)

    loss.__qualname__ = f"lk_hybrid({eta:g})"  # what a run and a model card record
    return loss


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


def _finite(log: Array) -> Array:
    """Log-probabilities clipped at `LEAST` from below; their gradient is then zero."""
    return jnp.where(log > LEAST, log, LEAST)
