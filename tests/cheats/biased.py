"""Shared by cheats: rejection verification that accepts too much in some places."""

import jax.numpy as jnp

from specdec_jax.types import Verifier
from specdec_jax.verification import bonus_or, draft_log_probabilities, residual, token_by_token
from specdec_jax.verification._common import no_hyperparameters


def biased(where, more=3.0):
    """Accepts with min(1, more p / q) where `where(draft, context)`, [B, 1] or [B, K] bool, is true."""

    def verify(state, draft, distributions, context):
        log_p = distributions.log_prob
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
        extra = jnp.where(where(draft, context), jnp.log(more), 0.0).astype(log_p.dtype)
        lengths = token_by_token(jnp.minimum(0.0, log_p_token - log_q_token + extra), draft)
        return lengths, lambda accepted: bonus_or(residual, draft, log_p, log_q, accepted), state

    return Verifier(no_hyperparameters, verify, lossless=True)
