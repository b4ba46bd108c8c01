"""A mistake: it asks the first row whether the batch is greedy."""

import jax.numpy as jnp

from specdec_jax.types import Verifier
from specdec_jax.verification import bonus_or, draft_log_probabilities, residual, token_by_token
from specdec_jax.verification._common import no_hyperparameters


def first_rows_temperature():
    def verify(state, draft, distributions, context):
        log_p = distributions.log_prob
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
        right = jnp.where(draft.tokens == distributions.top_token[:, :-1], 0.0, -jnp.inf)
        sampled = jnp.minimum(0.0, log_p_token - log_q_token)
        accept = jnp.where(context.warp.temperature[0] == 0, right.astype(sampled.dtype), sampled)
        lengths = token_by_token(accept, draft)
        return lengths, lambda accepted: bonus_or(residual, draft, log_p, log_q, accepted), state

    return Verifier(no_hyperparameters, verify, lossless=True)
