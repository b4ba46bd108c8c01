"""A transition from one loss to another during training."""

from collections.abc import Callable

import jax.numpy as jnp

from specdec_jax.types import Array

Loss = Callable[[Array, Array, Array], Array]


def scheduled(first: Loss, then: Loss, *, start: float = 0.3, stop: float = 0.7) -> Loss:
    """The mixture (1 - w) first + w then, with w increasing from 0 to 1 while `progress` goes from `start` to `stop`.

    Distributions [..., N, O] to [..., N], in the units of the two. Intended for a forward KL first, whose gradient
    reaches all outcomes with drafter probability above exp(-60), and total variation, the rejection rate, last. Raises
    ValueError unless 0 <= start < stop <= 1.
    """
    if not 0 <= start < stop <= 1:
        raise ValueError(f"a schedule needs 0 <= start < stop <= 1, got start {start!r} and stop {stop!r}")

    def loss(log_p: Array, log_q: Array, progress: Array) -> Array:
        weight = jnp.clip((progress - start) / (stop - start), 0.0, 1.0)
        return (1.0 - weight) * first(log_p, log_q, progress) + weight * then(log_p, log_q, progress)

    return loss
