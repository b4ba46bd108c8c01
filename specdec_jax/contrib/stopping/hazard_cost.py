"""Hazard and cost: continue while the last draft's acceptance probability times a token's time exceeds a drafter pass.

The rule of Afterimage, an engine that streams its target's weights (oney-erge/Afterimage, `runtime/spec_policy.py`,
2026). The conditional acceptance probability of a draft is estimated by position and confidence, the drafter's largest
probability, in equal bins: (prior_accepted + accepted) / (prior_accepted + prior_rejected + all). Positions after the
first rejected draft are censored. After a draft another pass is run iff

    chance(position, confidence) * token_time > drafter_cost,

where token_time is a running mean of target passes per token, 1 / (accepted + 1). The first `least` drafts are always
followed by another one.

Differences: times are those of the cost model, in target passes, instead of a clock (with an initial cost of 0.001 and
a time of 1); a verification costs one pass at any width; a round without drafts is ignored; drafts beyond `positions`
use the last position's counts and are not counted. The rule uses the probability of the last draft only, whereas
`survival` uses the product over the whole draft; for the effect see docs/which_rule.md.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import full, host
from specdec_jax.ranges import Between, Count, NotNegative, Positive, Share
from specdec_jax.stopping._readings import evaluated_positions, relative_drafter_cost, remember
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, RoundContext, StoppingPolicy, VerificationResult


class HazardCostState(NamedTuple):
    confidence: Array  # [B, P] float32, of this round's drafts
    accepted: Array  # [B, P, bins] int32
    rejected: Array  # [B, P, bins] int32
    token_time: Array  # [B] float32, target passes per token
    drafter_cost: Array  # [B] float32, a drafter pass, in target passes
    prior_accepted: Array  # [B] float32, drafts
    prior_rejected: Array  # [B] float32
    weight: Array  # [B] float32, of the newest round in token_time
    least: Array  # [B] int32


@strategy
def hazard_cost(bins: Annotated[int, Between(1)] = 10, positions: Annotated[int, Between(1)] = 16) -> StoppingPolicy:
    """Continue drafting while the acceptance probability of the last draft is worth another drafter pass.

    Args:
        bins: number of bins of confidence.
        positions: P, number of drafts per round whose acceptance is counted.

    Hyperparameters (`init`): drafter_cost 0.1 (>= 0), prior_accepted 2 and prior_rejected 2 (drafts, > 0), weight 0.2
    (0 to 1), least 1 (drafts, >= 0).
    """

    def init(
        batch: int,
        drafter_cost: NotNegative = 0.1,
        prior_accepted: Positive = 2.0,
        prior_rejected: Positive = 2.0,
        weight: Share = 0.2,
        least: Count = 1,
    ) -> HazardCostState:
        counts = host(np.zeros((batch, positions, bins), np.int32))
        return HazardCostState(
            confidence=host(np.zeros((batch, positions), np.float32)),
            accepted=counts,
            rejected=counts,
            token_time=full(batch, 1.0),
            drafter_cost=drafter_cost,
            prior_accepted=prior_accepted,
            prior_rejected=prior_rejected,
            weight=weight,
            least=least,
        )

    def proceed(
        state: HazardCostState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, HazardCostState]:
        confidence = distribution.max_prob.astype(jnp.float32)
        worth = _chance(state, drafted - 1, confidence) * state.token_time
        go_on = (drafted <= state.least) | (worth > state.drafter_cost * relative_drafter_cost(context))
        return go_on, state._replace(confidence=remember(state.confidence, drafted - 1, confidence))

    return StoppingPolicy(init, proceed=proceed, update=_update, threshold=lambda state: state.token_time)


def _bin(confidence: Array, bins: int) -> Array:
    """[..., bins] bool, one-hot: the bin of a confidence."""
    return jax.nn.one_hot(jnp.clip((confidence * bins).astype(jnp.int32), 0, bins - 1), bins, dtype=bool)


def _chance(state: HazardCostState, position: Array, confidence: Array) -> Array:
    """[B] float32, conditional acceptance probability of the draft at `position` [B] with this confidence."""
    _, places, bins = state.accepted.shape
    at = jax.nn.one_hot(jnp.clip(position, 0, places - 1), places, dtype=bool)[:, :, None]
    at = at & _bin(confidence, bins)[:, None]
    accepted, rejected = (jnp.sum(jnp.where(at, counts, 0), axis=(1, 2)) for counts in (state.accepted, state.rejected))
    accepted = state.prior_accepted + accepted.astype(jnp.float32)
    return accepted / (accepted + state.prior_rejected + rejected.astype(jnp.float32))


def _update(state: HazardCostState, draft: Draft, result: VerificationResult) -> HazardCostState:
    _, places, bins = state.accepted.shape
    evaluated, accepted = evaluated_positions(draft, result, places)
    seen = _bin(state.confidence, bins)
    passes = 1.0 / jnp.maximum(result.length, 1).astype(jnp.float32)
    token_time = (1.0 - state.weight) * state.token_time + state.weight * passes
    return state._replace(
        accepted=state.accepted + (seen & (evaluated & accepted)[:, :, None]).astype(jnp.int32),
        rejected=state.rejected + (seen & (evaluated & ~accepted)[:, :, None]).astype(jnp.int32),
        token_time=jnp.where(draft.length > 0, token_time, state.token_time),
    )
