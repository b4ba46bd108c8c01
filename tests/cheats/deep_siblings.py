"""A mistake: siblings of the third draft and later ones are decided by the target's raw distribution, not as warped."""

import jax.numpy as jnp

from specdec_jax.contrib.trees import TreeVerifier
from specdec_jax.contrib.trees.siblings import sibling_outcomes
from specdec_jax.verification import draft_log_probabilities, rejection, residual
from specdec_jax.verification._common import at_position


def deep_siblings(first: int = 2):
    """From draft `first` + 1 on."""

    def outcomes(draft, distributions, accepted, context):
        sampled = context.warp.temperature > 0
        raw = ((accepted >= first) & sampled)[:, None, None]
        log_p = jnp.where(raw, distributions.raw_log_prob, distributions.log_prob)
        log_q, _, _ = draft_log_probabilities(draft, log_p)
        at_draft = residual(at_position(log_p, accepted), at_position(log_q, accepted))
        bonus = jnp.exp(at_position(distributions.log_prob, accepted))
        following = jnp.where((accepted < draft.length)[:, None], at_draft, bonus)
        return sibling_outcomes(following, draft, accepted, sampled)

    inner = rejection()
    return TreeVerifier(inner.init, inner.verify, lossless=True, outcomes=outcomes)
