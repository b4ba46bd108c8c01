"""Typical acceptance: a probability threshold that depends on the target's entropy (Medusa, arXiv 2401.10774)."""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.decoding.sampling import pick
from specdec_jax.ranges import NotNegative, Share
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, NextDistribution, RoundContext, Verifier
from specdec_jax.verification._common import at_position, token_by_token


class TypicalState(NamedTuple):
    epsilon: Array  # [B] float32
    delta: Array  # [B] float32


@strategy
def typical() -> Verifier:
    """Accept draft x iff p(x) > min(epsilon, delta exp(-H)), H the entropy of p in nats; then draw from p itself.

    p is the target's sampled distribution. Acceptance is deterministic and independent of q, so the drafter's
    preferences enter the text. The token after k accepted drafts has the target's distribution there, whether draft
    k + 1 was rejected or did not exist, so a rejected token may be drawn again. Medusa always keeps its first token,
    which is the target's own, like the last token of our rounds; there is no special case for the first draft. The
    output distribution at a drafted position is q(x) [p(x) > t] + (1 - Q) p(x), with t the threshold and Q the mass of
    q on the accepted tokens.

    At temperature 0 p is one-hot, so for epsilon < 1 only the target's argmax is accepted, for any H (that of the raw
    distribution): the output is that of greedy decoding. Thresholds of 1 reject every draft.

    Lossy. Hyperparameters (`init`): epsilon 0.09 (in [0, 1]) and delta 0.3 (0 or more), Medusa's defaults.
    """

    def init(batch: int, epsilon: Share = 0.09, delta: NotNegative = 0.3) -> TypicalState:
        return TypicalState(epsilon, delta)

    def verify(
        state: TypicalState, draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, NextDistribution, TypicalState]:
        log_p = distributions.log_prob
        chance = jnp.exp(pick(log_p[:, :-1], draft.tokens))  # [B, K]
        surprise = jnp.asarray(state.delta)[:, None] * jnp.exp(-distributions.entropy[:, :-1])
        threshold = jnp.minimum(jnp.asarray(state.epsilon)[:, None], surprise)
        accept = jnp.where(chance > threshold, 0.0, -jnp.inf).astype(log_p.dtype)

        def next_distribution(accepted: Array) -> Array:
            return jnp.exp(at_position(log_p, accepted))

        return token_by_token(accept, draft), next_distribution, state

    return Verifier(init, verify, lossless=False, needs_log_q=False)
