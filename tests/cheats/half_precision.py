"""A mistake: rejection verification that takes float32 distributions as bfloat16."""

import jax.numpy as jnp

from specdec_jax.verification import rejection


def half_precision():
    inner = rejection()

    def rounded(log_prob):
        low = jnp.bfloat16 if log_prob.dtype == jnp.float32 else log_prob.dtype
        return log_prob.astype(low).astype(log_prob.dtype)

    def verify(state, draft, distributions, context):
        log_q = None if draft.log_q is None else rounded(draft.log_q)
        seen = distributions._replace(log_prob=rounded(distributions.log_prob))
        return inner.verify(state, draft._replace(log_q=log_q), seen, context)

    return inner.replace(verify=verify)
