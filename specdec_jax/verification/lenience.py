"""Lossy rejection sampling with a lenience factor (Leviathan et al., arXiv 2211.17192, appendix A.5)."""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.decoding.sampling import pick
from specdec_jax.ranges import Between
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, NextDistribution, RoundContext, Verifier
from specdec_jax.verification._common import bonus_or, draft_log_probabilities, residual, token_by_token


class LenienceState(NamedTuple):
    lenience: Array  # [B] float32


@strategy
def lenience() -> Verifier:
    """Accept draft x with probability min(1, p(x) / (l q(x))); at the first rejection draw from max(0, p - q).

    q is multiplied by l only in the acceptance test; after a rejection the token is drawn from the residual of plain
    rejection sampling. The residual of l q, max(0, p - l q), would add to tokens that are already too frequent; given
    this acceptance, ours has the smallest total variation to the target. The output distribution at a drafted position
    is min(q, p / l) + c max(0, p - q) with c = sum max(0, q - p / l) / sum max(0, q - p): no token has more than p / l,
    the paper's guarantee, and the total variation is sum max(0, min(q, p / l) - p).

    At temperature 0 the target's distribution is one-hot and a factor has no effect, so the raw distribution is used
    (the paper's form for argmax): accept x if it is the target's argmax or p(x) > l max p; rejection emits the argmax.
    With > instead of the paper's >=, ties with the argmax are rejected at l = 1.

    Lossy for l < 1, and exactly `rejection` for l = 1. Hyperparameters (`init`): lenience 0.5 (l, in (0, 1]).
    """

    def init(batch: int, lenience: Annotated[Any, Between(0, 1, open="low")] = 0.5) -> LenienceState:
        return LenienceState(lenience)

    def verify(
        state: LenienceState, draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, NextDistribution, LenienceState]:
        log_p = distributions.log_prob
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
        allowance = jnp.log(state.lenience)[:, None]  # [B, 1], log l <= 0
        sampled = jnp.minimum(0.0, log_p_token - log_q_token - allowance)
        assert distributions.raw_log_prob is not None  # None in replays only, which call no verifier
        raw_log_prob = pick(distributions.raw_log_prob[:, :-1], draft.tokens)
        near = raw_log_prob - jnp.log(distributions.raw_max_prob[:, :-1]) > allowance
        chosen = jnp.where(near | (draft.tokens == distributions.top_token[:, :-1]), 0.0, -jnp.inf)
        is_sampled = (context.warp.temperature > 0)[:, None]
        log_prob_accepted = token_by_token(jnp.where(is_sampled, sampled, chosen.astype(sampled.dtype)), draft)

        def next_distribution(accepted: Array) -> Array:
            return bonus_or(residual, draft, log_p, log_q, accepted)

        return log_prob_accepted, next_distribution, state

    return Verifier(init, verify, lossless=False)
