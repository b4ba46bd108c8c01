"""The cost of a drafter pass, for rules that weigh costs."""

import jax.numpy as jnp

from specdec_jax.types import Array, RoundContext


def relative_drafter_cost(context: RoundContext) -> Array:
    """[B] float32, a pass of this round's drafter in passes of the pair's first model, the unit of `drafter_cost`."""
    return (
        jnp.ones(context.length.shape, jnp.float32)
        if context.relative_drafter_cost is None
        else context.relative_drafter_cost
    )
