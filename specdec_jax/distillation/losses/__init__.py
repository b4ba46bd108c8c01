"""Distillation losses, one per file.

All have the signature `loss(log_p, log_q, progress) -> [..., N]`: log-probabilities [..., N, O] float32 (nats) of
target and drafter over the same outcomes, and the progress of training, from 0 to 1. Gradients flow into `log_q`
only.
"""

from specdec_jax.distillation.losses.coarse import coarse_distributions
from specdec_jax.distillation.losses.forward_kl import forward_kl
from specdec_jax.distillation.losses.jensen_shannon import jensen_shannon
from specdec_jax.distillation.losses.reverse_kl import reverse_kl
from specdec_jax.distillation.losses.scheduled import scheduled
from specdec_jax.distillation.losses.total_variation import total_variation
from specdec_jax.distillation.losses.tvd_plus_plus import tvd_plus_plus

__all__ = [
    "coarse_distributions",
    "forward_kl",
    "jensen_shannon",
    "reverse_kl",
    "scheduled",
    "total_variation",
    "tvd_plus_plus",
]
