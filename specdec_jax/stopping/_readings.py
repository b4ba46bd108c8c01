"""Quantities that several policies derive from their arguments: token probability, drafter cost, evaluated positions.

A position is evaluated if its token was drafted and all earlier drafts were accepted; positions beyond the first
rejected token are not evaluated. Buffers are [B, P], P a static number of positions; later drafts are not stored.
"""

import jax.numpy as jnp

from specdec_jax.decoding.sampling import log_prob_of
from specdec_jax.stopping._thresholded import in_unit
from specdec_jax.types import Array, Distribution, Draft, RoundContext, VerificationResult

show_probability = in_unit("probability", lambda state: state.threshold)  # of policies that compare one with it


def token_probability(distribution: Distribution, token: Array, context: RoundContext) -> Array:
    """Probability [B] float32 of the drawn `token` [B] in the sampled distribution; at temperature 0 the raw one.

    At temperature 0 the token is the most probable one and the sampled distribution is one-hot, so its raw probability
    is `raw_max_prob`.
    """
    drawn = log_prob_of(distribution, token)
    is_sampled = context.warp.temperature > 0
    return jnp.where(is_sampled, jnp.exp(drawn.astype(jnp.float32)), distribution.raw_max_prob.astype(jnp.float32))


def relative_drafter_cost(context: RoundContext) -> Array:
    """[B] float32, cost of a prediction of this round's drafter in passes of the first drafter model (`drafter_cost`).

    Where a round's first prediction costs more (`opening_cost`) it is that of each later one.
    """
    cost = context.relative_drafter_cost
    if cost is None:
        return jnp.ones(context.length.shape, jnp.float32)
    return cost if cost.ndim == 1 else cost[:, 1]


def opening_cost(context: RoundContext) -> Array | float:
    """[B] float32, what a round's first prediction costs in addition, in the same unit; 0.0 if all cost the same."""
    cost = context.relative_drafter_cost
    return 0.0 if cost is None or cost.ndim == 1 else cost[:, 0] - cost[:, 1]


def remember(buffer: Array, position: Array, value: Array) -> Array:
    """`buffer` [B, P] with `value` [B] at `position` [B] of this round's draft (0 is its first token)."""
    slot = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(slot == position[:, None], value.astype(buffer.dtype)[:, None], buffer)


def evaluated_positions(draft: Draft, result: VerificationResult, positions: int) -> tuple[Array, Array]:
    """Masks [B, P] bool of the positions that were evaluated and of those that were accepted."""
    slot = jnp.arange(positions, dtype=jnp.int32)[None, :]
    accepted = slot < (result.length - 1)[:, None]
    evaluated = (slot < result.length[:, None]) & (slot < draft.length[:, None])
    return evaluated, accepted
