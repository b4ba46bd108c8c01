"""A mistake: it guards the residual against 0/0 with twice the type's epsilon, which is little in float64 only."""

import jax.numpy as jnp

from specdec_jax.types import Verifier
from specdec_jax.verification import bonus_or, draft_log_probabilities, token_by_token
from specdec_jax.verification._common import no_hyperparameters


def eps_guard():
    def verify(state, draft, distributions, context):
        log_p = distributions.log_prob
        tiny = 2 * float(jnp.finfo(log_p.dtype).eps)
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
        lengths = token_by_token(jnp.minimum(0.0, log_p_token - log_q_token), draft)

        def rest(log_p, log_q):
            return jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), tiny)

        return lengths, lambda accepted: bonus_or(rest, draft, log_p, log_q, accepted), state

    return Verifier(no_hyperparameters, verify, lossless=True)
