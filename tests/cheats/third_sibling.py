"""A mistake: when the third sibling is tried, the second is still in the distribution that it was drawn from."""

import jax.numpy as jnp

from specdec_jax.contrib.trees import SiblingOutcomes, TreeVerifier
from specdec_jax.contrib.trees.siblings import after_rejection, at_depth, by_candidate
from specdec_jax.decoding.sampling import normalised, without
from specdec_jax.verification import draft_log_probabilities, rejection, residual
from specdec_jax.verification._common import at_position


def third_sibling(forgotten: int = 1):
    """Siblings from number `forgotten` (the first is 0) on stay in q."""

    def outcomes(draft, distributions, accepted, context):
        log_q, _, _ = draft_log_probabilities(draft, distributions.log_prob)
        inside = accepted < draft.length
        log_p, log_q = at_position(distributions.log_prob, accepted), at_position(log_q, accepted)
        p = jnp.where(inside[:, None], normalised(residual(log_p, log_q)), jnp.exp(log_p))
        left = without(jnp.exp(log_q), at_depth(draft.tokens, accepted), 0.0)
        tokens, count = at_depth((draft.siblings, draft.sibling_counts), accepted)
        accepts = []
        for index in range(tokens.shape[1]):
            token = tokens[:, index]
            certain = without(jnp.zeros_like(p), token, 1.0)
            q = jnp.where((context.warp.temperature > 0)[:, None], normalised(left), certain)
            p_token, q_token = (jnp.take_along_axis(values, token[:, None], axis=1)[:, 0] for values in (p, q))
            tried = (index < jnp.where(inside, count, 0)) & (q_token > 0)
            accepts.append(jnp.where(tried, jnp.minimum(1.0, p_token / jnp.where(tried, q_token, 1.0)), 0.0))
            rest, _ = after_rejection(p, q, jnp.ones_like(p[:, 0]))
            p = jnp.where(tried[:, None], rest, p)
            left = left if index >= forgotten else without(left, token, 0.0)
        return SiblingOutcomes(by_candidate(jnp.stack(accepts, axis=1)), tokens, p)

    inner = rejection()
    return TreeVerifier(inner.init, inner.verify, lossless=True, outcomes=outcomes)
