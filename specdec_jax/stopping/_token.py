"""The drawn token's probability, read the one way that every replay can serve."""

import jax.numpy as jnp

from specdec_jax.sampling import log_prob_of
from specdec_jax.types import Array, Law, RoundContext


def token_probability(law: Law, token: Array, context: RoundContext) -> Array:
    """The probability [B] float32 of the drawn `token` [B] under the drafter's law as sampled; at temperature 0 raw.

    At temperature 0 the token is the top one and its law as sampled is one-hot, so its raw probability is
    `raw_max_prob`.
    """
    drawn = log_prob_of(law, token)
    hot = context.warp.temperature > 0
    return jnp.where(hot, jnp.exp(drawn.astype(jnp.float32)), law.raw_max_prob.astype(jnp.float32))
