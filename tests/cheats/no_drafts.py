"""A mistake: a pass without drafts takes the raw distribution, without temperature and truncation."""

import jax.numpy as jnp

from specdec_jax.verification import rejection


def no_drafts():
    inner = rejection()

    def verify(state, draft, distributions, context):
        if draft.tokens.shape[1]:
            return inner.verify(state, draft, distributions, context)
        sampled = context.warp.temperature[:, None] > 0
        following = jnp.exp(jnp.where(sampled, distributions.raw_log_prob[:, 0], distributions.log_prob[:, 0]))
        return jnp.zeros((draft.length.shape[0], 1), following.dtype), lambda accepted: following, state

    return inner.replace(verify=verify)
