"""What several rules read of their arguments: a token's probability, the drafter's cost, what was evaluated.

A position is evaluated if its token was drafted and all before it were accepted; what lies beyond the first rejected
token was never evaluated. Buffers are [B, P], P a static number of positions; drafts beyond it are not remembered.
"""

import jax.numpy as jnp

from specdec_jax.decoding.sampling import log_prob_of
from specdec_jax.types import Array, Distribution, Draft, RoundContext, VerificationResult


def token_probability(distribution: Distribution, token: Array, context: RoundContext) -> Array:
    """Probability [B] float32 of the drawn `token` [B] in the drafter's distribution as sampled; at temperature 0 raw.

    At temperature 0 the token is the top one and its distribution as sampled is one-hot, so its raw probability is
    `raw_max_prob`.
    """
    drawn = log_prob_of(distribution, token)
    is_sampled = context.warp.temperature > 0
    return jnp.where(is_sampled, jnp.exp(drawn.astype(jnp.float32)), distribution.raw_max_prob.astype(jnp.float32))


def relative_drafter_cost(context: RoundContext) -> Array:
    """[B] float32, a pass of this round's drafter in passes of the pair's first model, the unit of `drafter_cost`."""
    return (
        jnp.ones(context.length.shape, jnp.float32)
        if context.relative_drafter_cost is None
        else context.relative_drafter_cost
    )


def remember(buffer: Array, position: Array, value: Array) -> Array:
    """`buffer` [B, P] with `value` [B] at `position` [B] of this round's draft (0 is its first token)."""
    slot = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(slot == position[:, None], value.astype(buffer.dtype)[:, None], buffer)


def evaluated_positions(draft: Draft, result: VerificationResult, positions: int) -> tuple[Array, Array]:
    """Masks [B, P] bool: the positions that were evaluated, and those of them that were accepted."""
    slot = jnp.arange(positions, dtype=jnp.int32)[None, :]
    accepted = slot < (result.length - 1)[:, None]
    evaluated = (slot < result.length[:, None]) & (slot < draft.length[:, None])
    return evaluated, accepted
