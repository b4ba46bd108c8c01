"""A mistake: of drafts only some of which were chosen (`Draft.one_hot`) it takes `log_q` for all."""

import jax.numpy as jnp

from specdec_jax.types import Verifier
from specdec_jax.verification import bonus_or, residual, token_by_token
from specdec_jax.verification._common import no_hyperparameters


def forgets_one_hot():
    def verify(state, draft, distributions, context):
        log_p, token = distributions.log_prob, draft.tokens[:, :, None]
        hit = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None, :] == token
        log_q = jnp.where(hit, 0.0, -jnp.inf).astype(log_p.dtype) if draft.log_q is None else draft.log_q
        log_p_token = jnp.take_along_axis(log_p[:, :-1], token, axis=2)[:, :, 0]
        log_q_token = jnp.take_along_axis(log_q, token, axis=2)[:, :, 0]
        lengths = token_by_token(jnp.minimum(0.0, log_p_token - log_q_token), draft)
        return lengths, lambda accepted: bonus_or(residual, draft, log_p, log_q, accepted), state

    return Verifier(no_hyperparameters, verify, lossless=True)
