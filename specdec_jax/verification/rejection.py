"""Token-by-token rejection sampling (Leviathan et al., arXiv 2211.17192, alg. 1; Chen et al., arXiv 2302.01318)."""

import jax.numpy as jnp

from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, NextDistribution, RoundContext, Verifier
from specdec_jax.verification._common import (
    bonus_or,
    draft_log_probabilities,
    no_hyperparameters,
    residual,
    token_by_token,
)


@strategy
def rejection() -> Verifier:
    """Accept draft x_i with probability min(1, p(x_i) / q(x_i)); at the first rejection draw from max(0, p - q).

    Lossless: the output distribution is the target's for any drafter.
    """

    def verify(
        state: tuple[()], draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, NextDistribution, tuple[()]]:
        log_p = distributions.log_prob
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
        accept = jnp.minimum(0.0, log_p_token - log_q_token)  # [B, K], log of the acceptance probability
        log_prob_accepted = token_by_token(accept, draft)

        def next_distribution(accepted: Array) -> Array:
            return bonus_or(residual, draft, log_p, log_q, accepted)

        return log_prob_accepted, next_distribution, state

    return Verifier(no_hyperparameters, verify, lossless=True)
