"""Survival: run another drafter pass while its expected gain exceeds the value of its time (see docs/survival.md).

Speculative decoding is a renewal process: rounds emit tokens and take time, and the long-run rate R is the value of
time in tokens. With S the probability that all drafts of the round so far are accepted, a_1, a_2, ... the acceptance
probabilities of the next ones, c the time of a drafter pass and V(k) of verifying k drafts, in plain passes:

- the token of a computed distribution is drafted unless the wider verification costs more than the expected gain of it
  and its successors;
- n more passes pay iff  S E[a_1 + a_1 a_2 + ... n terms]  >  R (n c + V(k + n) - V(k));  they are run one at a
  time, and the best n within the budget decides, because V is a step function: only the first token of a width costs.

The odds that a token is accepted are proportional to those of the most probable token in greedy decoding, and inversely
proportional to the entropy in sampling; the factor depends on the temperature and, once the token is drawn, slightly on
its surprise. These parameters are a prior fitted to pairs of models (metrics/prior.py). Two parameters per row adapt to
the observed acceptance: an offset of all logits, by an extended Kalman filter, and the lapse rate, the share of drafts
that are rejected regardless of the drafter's confidence. They adapt within a few rounds.

Tokens whose distribution is not known yet follow a Markov chain over four confidence levels. Each row counts its own
transitions, so that none are assumed from other pairs and long runs of confidence are learnt in the first rounds. The
prior counts, one per level and three for the highest, are optimistic: with costly passes, a row that expected an
average drafter would never draft, and never learn that its drafter is better.

In a batch a pass runs for all rows or for none, and the longest draft sets the verification width. With `together`, n
more passes pay iff the expected gain of all rows exceeds the value of the time for all rows, and then every row drafts.
Each row keeps its distribution, but which tokens a row draws depends on the other rows.

Sources: the optimality of a threshold on survival, SpecDec++ (arXiv 2405.19715, theorem 3.1); the rest is new here.
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.sampling import log_prob_of
from specdec_jax.hyperparameters import host, per_row
from specdec_jax.ranges import Between, Positive
from specdec_jax.stopping._defaults import in_unit
from specdec_jax.stopping._readings import opening_cost, relative_drafter_cost, remember
from specdec_jax.stopping._survival_gain import Ahead, after_distribution, after_level, gain_by_row, gain_together
from specdec_jax.stopping._survival_state import (
    HORIZON,
    LAPSE,
    LAPSE_WEIGHT,
    LEVELS,
    PRECISION,
    Prior,
    Settings,
    SurvivalState,
    chance_of,
    forecast,
    learn_chances,
    learn_moves,
    learn_rate,
    level_of,
    logit_of,
    prior_of,
    rate_of,
)
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, RoundContext, StoppingPolicy, VerificationResult

# Fitted by `metrics.prior.fit_prior` to fourteen traces of four pairs (docs/results.md).
GREEDY = Prior(0.7, 0.0, 0.0)
SAMPLED = Prior(0.92, 2.1, 0.1)
Weights = Annotated[Any, Between(entries=len(Prior._fields))]
USUAL = 0.6  # prior acceptance rate, for the initial rate


@strategy
def survival(positions: Annotated[int, Between(1)] = 32, together: bool = False) -> StoppingPolicy:
    """Draft while it pays, by calibrated acceptance probabilities and measured costs.

    Args:
        positions: number of drafts per round that the state learns from (P).
        together: one decision for all rows, by the gain of the whole batch; costs are then those of the batch
            (`measure_costs(batch=)`). A sampled row's draws depend on the other rows, its distribution does not.

    Hyperparameters (`init`): drafter_cost (c, a drafter pass relative to a pass of plain decoding, default 0.1;
    `generate` passes the measured cost), verification_times ([P+1] or fewer, time of the pass that verifies k drafts
    relative to one of plain decoding, the last one also for longer drafts; default 1 + 0.02 k), greedy and sampled (a
    Prior each), prior_precision (4; the prior weighs roughly four times as many verified tokens), initial_rate
    (initial R, in tokens per pass of plain decoding; default: that of the best fixed length at these costs with an
    acceptance rate of 0.6), rate_weight (its weight, 5 passes). Times are >= 0; cost, precision, rate and weight > 0.
    """
    return survival_with(gain_together if together else gain_by_row, positions, together)


def survival_with(
    gain: Callable[[SurvivalState, Ahead, RoundContext], Array], positions: int, together: bool = False
) -> StoppingPolicy:
    """`survival` with a `gain` [B] float32, in tokens: drafts while it is above 0. P (`positions`) as in `survival`."""

    def init(
        batch: int,
        drafter_cost: Positive = 0.1,
        verification_times: Annotated[Any, Between(0, entries=0)] = None,
        greedy: Weights = GREEDY,
        sampled: Weights = SAMPLED,
        prior_precision: Positive = PRECISION,
        initial_rate: Positive = None,
        rate_weight: Positive = 5.0,
    ) -> SurvivalState:
        zero, certain = per_row(batch, 0.0, "zero"), per_row(batch, 1.0, "certain")
        verification = verification_per_row(batch, verification_times, positions)
        last = positions if verification_times is None else min(verification_times.shape[1] - 1, positions)
        rate = initial_rate
        if rate is None:  # that of the best fixed draft length where a draft is accepted with the chance USUAL
            drafts = np.arange(positions + 1, dtype=np.float32)[None, :]
            tokens = (1.0 - np.float32(USUAL) ** (drafts + 1.0)) / np.float32(1.0 - USUAL)
            rate = (tokens / (verification + drafts * drafter_cost[:, None])).max(axis=1)
        widest = per_row(batch, last, "widest", dtype=np.int32)
        settings = Settings(greedy, sampled, drafter_cost, verification, widest, prior_precision, rate, rate_weight)
        return SurvivalState(
            survival=certain,
            logit=zero,
            predicted=host(np.zeros((batch, positions), np.float32)),
            levels=host(np.full((batch, positions), -1, np.int32)),
            forecast=host(np.zeros((batch, LEVELS + 1, HORIZON), np.float32)),
            passes=zero,
            offset=zero,
            precision=settings.prior_precision,
            lapse=per_row(batch, LAPSE, "lapse"),
            trials=per_row(batch, LAPSE_WEIGHT, "trials"),
            moves=host(np.zeros((batch, LEVELS + 1, LEVELS), np.float32)),
            tokens=rate * rate_weight,
            time=rate_weight,
            settings=settings,
        )

    def begin(state: SurvivalState, context: RoundContext) -> tuple[Array, SurvivalState]:
        state = state._replace(
            survival=jnp.ones_like(state.survival),
            levels=jnp.full_like(state.levels, -1),
            forecast=forecast(state),
            passes=jnp.zeros_like(state.passes),
        )
        return gain(state, after_level(state, LEVELS, jnp.zeros_like(context.budget)), context) > 0, state

    def check(
        state: SurvivalState, distribution: Distribution, drafted: Array, context: RoundContext
    ) -> tuple[Array, SurvivalState]:
        logit = logit_of(distribution, prior_of(state, context), context)
        chance, level = chance_of(state, logit), level_of(logit)
        state = state._replace(
            logit=logit,
            predicted=remember(state.predicted, drafted, chance),
            levels=remember(state.levels, drafted, level),
            passes=state.passes + relative_drafter_cost(context) + jnp.where(drafted == 0, opening_cost(context), 0.0),
        )
        return gain(state, after_distribution(state, chance, level, drafted), context) > 0, state

    def proceed(
        state: SurvivalState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, SurvivalState]:
        drawn = log_prob_of(distribution, token).astype(jnp.float32)
        is_sampled = context.warp.temperature > 0
        weight = prior_of(state, context).surprise
        surprise = jnp.where(is_sampled, weight * (drawn + distribution.entropy.astype(jnp.float32)), 0.0)
        state = state._replace(survival=state.survival * chance_of(state, state.logit + surprise))
        return gain(state, after_level(state, level_of(state.logit), drafted), context) > 0, state

    def update(state: SurvivalState, draft: Draft, result: VerificationResult) -> SurvivalState:
        state = learn_moves(learn_chances(state, draft, result, positions), result)
        return learn_rate(state, draft.length, result.length)

    reads = frozenset({"rows"} if together else ())
    shown = in_unit("tokens per plain pass", rate_of)
    return StoppingPolicy(init, begin, check, proceed, update, shown, reads)


def verification_per_row(batch: int, times: Array | None, positions: int) -> Array:
    """V(k) [B, P+1] float32 of `times` [B, N], the last of which holds for longer drafts; 1 + 0.02 k without times."""
    drafts = np.arange(positions + 1)
    if times is None:
        return host(np.tile((1.0 + 0.02 * drafts).astype(np.float32), (batch, 1)))
    return times[:, np.minimum(drafts, times.shape[1] - 1)]
