"""Greedy verification: a draft token is accepted iff it is the target's first choice. Temperature 0 only."""

import jax.numpy as jnp

from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, NextDistribution, RoundContext, Verifier
from specdec_jax.verification._common import no_hyperparameters, positions


@strategy
def greedy() -> Verifier:
    """Equality with the target's argmax; needs neither the drafter's distributions nor a softmax of the target's.

    Lossless at temperature 0, where the target's distribution is one-hot. `decoding` raises ValueError for other
    temperatures, because the acceptance probability would be wrong.
    """

    def verify(
        state: tuple[()], draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, NextDistribution, tuple[()]]:
        choice = distributions.top_token  # [B, K+1]
        width = draft.tokens.shape[1]
        right = (draft.tokens == choice[:, :-1]) & (positions(width)[None, :] < draft.length[:, None])
        accepted = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
        dtype = distributions.entropy.dtype
        hit = positions(width + 1)[None, :] == accepted[:, None]
        log_prob_accepted = jnp.where(hit, jnp.zeros((), dtype), jnp.array(-jnp.inf, dtype))

        def next_distribution(accepted: Array) -> Array:
            token = jnp.take_along_axis(choice, accepted[:, None], axis=1)  # [B, 1]
            vocabulary = positions(distributions.log_prob.shape[-1])[None, :]
            return (vocabulary == token).astype(dtype)

        return log_prob_accepted, next_distribution, state

    return Verifier(no_hyperparameters, verify, lossless=True, needs_log_q=False, greedy_only=True)
