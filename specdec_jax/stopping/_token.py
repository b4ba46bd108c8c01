"""The drawn token's probability, read the one way that every replay can serve."""

import jax.numpy as jnp

from specdec_jax.decoding.sampling import log_prob_of
from specdec_jax.types import Array, Distribution, RoundContext


def token_probability(distribution: Distribution, token: Array, context: RoundContext) -> Array:
    """Probability [B] float32 of the drawn `token` [B] in the drafter's distribution as sampled; at temperature 0 raw.

    At temperature 0 the token is the top one and its distribution as sampled is one-hot, so its raw probability is
    `raw_max_prob`.
    """
    drawn = log_prob_of(distribution, token)
    is_sampled = context.warp.temperature > 0
    return jnp.where(is_sampled, jnp.exp(drawn.astype(jnp.float32)), distribution.raw_max_prob.astype(jnp.float32))
