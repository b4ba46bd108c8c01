"""Survival: run another drafter pass while its expected gain exceeds the price of its time (see docs/method.md).

Speculative decoding is a renewal process: rounds emit tokens and take time, and the long-run rate R is the price of
time in tokens. With S the probability that all drafts of the round so far are accepted, a that of the next one, c the
time of a drafter pass and V(k) of verifying k drafts, in passes of plain decoding, one more draft pays iff
S a > R (c + V(k+1) - V(k)).  V is a step function, and only the first token of a width costs:
n more pay iff  S (a + a^2 + ... + a^n) > R (n c + V(k+n) - V(k)),  and the best n within the budget decides.

A row learns its own numbers: a, of drafts that are not made yet, is the share of accepted drafts in its rounds so far
(of first drafts before a round's first, else of later ones); R is that of its tokens and their time; and the lapse rate
is the share of drafts that are rejected regardless of the drafter's confidence.

`signal` says how a distribution gives a. `odds`: greedily the token's probability; in sampling the odds of acceptance
are inversely proportional to the entropy, by a prior fitted to pairs of models (metrics/prior.py). `probability`: the
token's own probability in both. `bound`: AdaEDL's 1 - sqrt(entropy_factor H), so that its lambda becomes the price.

Sources: a threshold on survival, SpecDec++ (arXiv 2405.19715, theorem 3.1); AdaEDL (arXiv 2410.18351); the rest is new
here.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import full, host
from specdec_jax.ranges import Between, Positive
from specdec_jax.stopping._readings import (
    evaluated_positions,
    opening_cost,
    relative_drafter_cost,
    remember,
    token_probability,
)
from specdec_jax.stopping._thresholded import entropy_bound, in_unit
from specdec_jax.strategy import nearest, strategy
from specdec_jax.types import Array, Distribution, Draft, RoundContext, StoppingPolicy, VerificationResult


class Prior(NamedTuple):
    """Weights of the acceptance probability in sampling, in logits beside the negative log entropy."""

    bias: float
    log_temperature: float  # weight of log temperature


PRIOR = Prior(0.92, 2.1)  # fitted by `metrics.prior.fit_prior` to traces of four pairs (docs/limits.md)
Weights = Annotated[Any, Between(entries=len(Prior._fields))]
LEAST_ENTROPY = 0.02  # nats, added to every entropy: one-hot distributions are not always accepted
LAPSE, LATER_LAPSE = 0.1, 0.03  # prior lapse rate, for the first rounds and once they are forgotten
LAPSE_WEIGHT = 5.0  # weight of the prior lapse rate, in verified tokens
USUAL = 0.6  # prior acceptance rate, for the initial rate
HOPED, HOPED_WEIGHT = 0.8, 4.0  # prior shares of accepted first and later drafts, optimistic, and their weight
DECAY = 0.98  # per round, of what a row has learnt
HORIZON = 8  # maximum number of further drafts considered at once
SIGNALS = ("odds", "probability", "bound")


class SurvivalState(NamedTuple):
    """The state of a row; each [B] float32 unless noted otherwise. The last seven are constant."""

    survival: Array  # S, probability that this round's drafts so far are accepted
    chances: Array  # [B, P], of this round's drafts
    passes: Array  # drafter passes of this round, in units of drafter_cost
    accepted: Array  # [B, 2], decayed numbers of accepted drafts, the first of a round and later ones
    verified: Array  # [B, 2], decayed numbers of these drafts that were verified
    lapse: Array  # share of drafts that are rejected regardless of the drafter's confidence
    tokens: Array  # decayed sum of emitted tokens
    time: Array  # decayed sum of their time, in passes of plain decoding; R = tokens / time
    drafter_cost: Array  # c
    verification: Array  # [B, P+1], V(k)
    widest: Array  # [B] int32, the largest k for which V(k) was given
    initial_rate: Array
    rate_weight: Array
    prior: Array  # [B, 2], a Prior
    entropy_factor: Array


Gain = Callable[[SurvivalState, Array, RoundContext], Array]  # (state, drafted [B], context) -> [B] float32


@strategy
def survival(
    positions: Annotated[int, Between(1)] = 32, together: bool = False, signal: str = SIGNALS[0]
) -> StoppingPolicy:
    """Draft while it pays, by calibrated acceptance probabilities and measured costs.

    Args:
        positions: longest draft with a verification time of its own (P).
        together: one decision for all rows, by the gain of the whole batch, whose passes run for all rows or for none;
            costs are then those of the batch (`measure_costs(batch=)`). A sampled row's draws depend on the other rows,
            its distribution does not.
        signal: what a distribution says of acceptance: "odds", "probability" or "bound"; ValueError for others.

    Hyperparameters (`init`): drafter_cost (c, a drafter pass relative to a pass of plain decoding, default 0.1;
    `generate` passes the measured cost), verification_times ([P+1] or fewer, time of the pass that verifies k drafts
    relative to one of plain decoding, the last one also for longer drafts; default 1 + 0.02 k), prior (a Prior,
    of "odds" in sampling), entropy_factor (0.2, of "bound"), initial_rate (initial R, in tokens per pass of plain
    decoding; default: that of the best fixed length at these costs with an acceptance rate of 0.6), rate_weight (its
    weight, 5 passes). Times are >= 0; cost, factor, rate and weight > 0.
    """
    return survival_with(gain_together if together else gain_by_row, positions, together, signal)


def survival_with(gain: Gain, positions: int, together: bool = False, signal: str = SIGNALS[0]) -> StoppingPolicy:
    """`survival` with a `gain` in tokens: drafts while it is above 0. P (`positions`) and errors as in `survival`."""
    if signal not in SIGNALS:
        raise ValueError(f"no signal {signal!r}{nearest(signal, SIGNALS)}")

    def init(
        batch: int,
        drafter_cost: Positive = 0.1,
        verification_times: Annotated[Any, Between(0, entries=0)] = None,
        prior: Weights = PRIOR,
        entropy_factor: Positive = 0.2,
        initial_rate: Positive = None,
        rate_weight: Positive = 5.0,
    ) -> SurvivalState:
        verification = verification_per_row(batch, verification_times, positions)
        last = positions if verification_times is None else min(verification_times.shape[1] - 1, positions)
        rate = initial_rate
        if rate is None:  # that of the best fixed draft length where a draft is accepted with the chance USUAL
            drafts = np.arange(positions + 1, dtype=np.float32)[None, :]
            tokens = (1.0 - np.float32(USUAL) ** (drafts + 1.0)) / np.float32(1.0 - USUAL)
            rate = (tokens / (verification + drafts * drafter_cost[:, None])).max(axis=1)
        verified = host(np.full((batch, 2), HOPED_WEIGHT, np.float32))
        return SurvivalState(
            survival=full(batch, 1.0),
            chances=host(np.zeros((batch, positions), np.float32)),
            passes=full(batch, 0.0),
            accepted=verified * HOPED,
            verified=verified,
            lapse=full(batch, LAPSE),
            tokens=rate * rate_weight,
            time=rate_weight,
            drafter_cost=drafter_cost,
            verification=verification,
            widest=full(batch, last, dtype=np.int32),
            initial_rate=rate,
            rate_weight=rate_weight,
            prior=prior,
            entropy_factor=entropy_factor,
        )

    def begin(state: SurvivalState, context: RoundContext) -> tuple[Array, SurvivalState]:
        state = state._replace(survival=jnp.ones_like(state.time), passes=jnp.zeros_like(state.time))
        return gain(state, jnp.zeros_like(context.budget), context) > 0, state

    def proceed(
        state: SurvivalState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, SurvivalState]:
        temperature = context.warp.temperature.astype(jnp.float32)
        if signal == "odds":
            logit = log_odds(distribution.entropy.astype(jnp.float32), temperature, state.prior.T)
            largest = distribution.raw_max_prob.astype(jnp.float32)
            chance = jnp.where(temperature > 0, jax.nn.sigmoid(logit), largest)
        elif signal == "probability":
            chance = token_probability(distribution, token, context)
        else:
            entropy = jnp.where(temperature > 0, distribution.entropy, distribution.raw_entropy)
            chance = jnp.maximum(entropy_bound(state.entropy_factor, entropy), 0.0)
        more = relative_drafter_cost(context) + jnp.where(drafted == 1, opening_cost(context), 0.0)
        chance = chance * (1.0 - state.lapse)
        state = state._replace(
            survival=state.survival * chance,
            chances=remember(state.chances, drafted - 1, chance),
            passes=state.passes + more,
        )
        return gain(state, drafted, context) > 0, state

    def update(state: SurvivalState, draft: Draft, result: VerificationResult) -> SurvivalState:
        return learn(state, draft, result, draft.length, result.length)

    reads = frozenset({"rows"} if together else ())
    shown = in_unit("tokens per plain pass", rate_of)
    return StoppingPolicy(init, begin, proceed=proceed, update=update, threshold=shown, reads=reads)


def verification_per_row(batch: int, times: Array | None, positions: int) -> Array:
    """V(k) [B, P+1] float32 of `times` [B, N], the last of which holds for longer drafts; 1 + 0.02 k without times."""
    drafts = np.arange(positions + 1)
    if times is None:
        return host(np.tile((1.0 + 0.02 * drafts).astype(np.float32), (batch, 1)))
    return times[:, np.minimum(drafts, times.shape[1] - 1)]


def log_odds(entropy: Any, temperature: Any, prior: Any, array: Any = jnp) -> Any:
    """Logit of acceptance in sampling, by a `prior`'s two weights; `array` is jax.numpy or numpy."""
    bias, slope = prior
    warmth = array.log(array.where(temperature > 0, temperature, 1.0))
    return bias + slope * warmth - array.log(entropy + LEAST_ENTROPY)


def rate_of(state: SurvivalState) -> Array:
    """R [B] float32, tokens per plain pass; at least that without drafts, or a row that drafts at a loss continues."""
    return jnp.maximum(state.tokens / state.time, 1.0 / state.verification[:, 0]).astype(jnp.float32)


def time_of(state: SurvivalState, drafts: Array) -> Array:
    """V(k) [B, N] at draft lengths `drafts` [B, N]."""
    return jnp.take_along_axis(state.verification, jnp.clip(drafts, 0, state.verification.shape[1] - 1), axis=1)


FURTHER: Any = np.arange(1, HORIZON + 1, dtype=np.int32)[None, :]  # numbers of further drafts


def expected(state: SurvivalState, drafted: Array) -> Array:
    """Expected accepted tokens a, a + a^2 ... of 1 to N further drafts if all so far are accepted, [B, N] float32."""
    shares = state.accepted / state.verified
    chance = jnp.where(drafted == 0, shares[:, 0], shares[:, 1])
    return jnp.cumsum(chance[:, None] ** FURTHER.astype(np.float32), axis=1)


def time_ahead(state: SurvivalState, drafted: Array, context: RoundContext) -> Array:
    """Time of 1, 2 ... N further drafts, [B, N] float32 in passes of plain decoding."""
    wider = time_of(state, drafted[:, None] + FURTHER) - time_of(state, drafted[:, None])
    opening = jnp.where(drafted == 0, opening_cost(context), 0.0)
    passes = FURTHER.astype(np.float32) * relative_drafter_cost(context)[:, None] + opening[:, None]
    return passes * state.drafter_cost[:, None] + wider


def net_by_row(state: SurvivalState, drafted: Array, context: RoundContext) -> Array:
    """Expected accepted tokens of 1, 2 ... N further drafts minus the price of their time, [B, N] float32.

    -inf beyond each row's budget.
    """
    won = state.survival[:, None] * expected(state, drafted)
    net = won - rate_of(state)[:, None] * time_ahead(state, drafted, context)
    return jnp.where((context.budget - drafted)[:, None] >= FURTHER, net, -jnp.inf)


def gain_by_row(state: SurvivalState, drafted: Array, context: RoundContext) -> Array:
    """The largest net gain [B] float32, in tokens, of 1 to N further drafts of each row; -inf without budget."""
    return jnp.max(net_by_row(state, drafted, context), axis=1)


def gain_together(state: SurvivalState, drafted: Array, context: RoundContext) -> Array:
    """As `gain_by_row` for the batch: tokens of all rows with budget from 1 to N more passes, minus all rows' time.

    The same number for all rows, [B]; minus infinity for rows without budget. Rows stop together, at their budget or
    where a lookup finds nothing, so a row's own passes and drafts are nearly those of the batch.
    """
    longest = jnp.max(jnp.where(context.alive, drafted, 0))
    going = context.alive & (drafted == longest)
    free = jnp.where(going, jnp.maximum(context.budget - drafted, 0), 0)
    within = jnp.minimum(FURTHER, free[:, None])
    brought = jnp.take_along_axis(expected(state, drafted), jnp.maximum(within, 1) - 1, axis=1)
    won = jnp.sum(jnp.where(within > 0, state.survival[:, None] * brought, 0.0), axis=0, keepdims=True)
    by_row = time_ahead(state, jnp.broadcast_to(longest, drafted.shape), context)
    time = jnp.max(jnp.where(context.alive[:, None], by_row, 0.0), axis=0, keepdims=True)
    rate = jnp.sum(jnp.where(context.alive, rate_of(state), 0.0))
    best = jnp.max(jnp.where(jnp.max(free) >= FURTHER, won - rate * time, -jnp.inf))
    return jnp.where(free > 0, best, -jnp.inf)


def learn(state: SurvivalState, draft: Any, result: Any, verified: Array, emitted: Array) -> SurvivalState:
    """Adds a round to the decayed sums, of which the priors' shares do not decay.

    The lapse rate is learnt by expectation maximisation (Dempster et al. 1977): a rejected draft was a lapse with
    probability lapse rate / (1 - its acceptance probability).

    Args:
        draft, result: with `length` [B]: of the draft, and accepted drafts and one more token.
        verified: [B] int32, number of verified tokens beyond the first; emitted: [B] int32, number of emitted tokens.
    """
    evaluated, accepted = evaluated_positions(draft, result, state.chances.shape[1])
    lapsed = jnp.where(evaluated & ~accepted, state.lapse[:, None] / (1.0 - state.chances), 0.0)
    spent = time_of(state, verified[:, None])[:, 0] + state.drafter_cost * state.passes

    def by_place(drafts: Array) -> Array:  # numbers of first and of later drafts, [B, 2]
        return jnp.stack([jnp.sum(some, axis=1, dtype=jnp.int32) for some in (drafts[:, :1], drafts[:, 1:])], axis=1)

    def add(total: Array, new: Array, prior: Any) -> Array:
        return prior + DECAY * (total - prior) + new.astype(jnp.float32)

    now = add(state.verified, by_place(evaluated), HOPED_WEIGHT)
    before, after = (LAPSE_WEIGHT + jnp.sum(each - HOPED_WEIGHT, axis=1) for each in (state.verified, now))
    lapses = add(state.lapse * before, jnp.sum(lapsed, axis=1), LATER_LAPSE * LAPSE_WEIGHT)
    return state._replace(
        accepted=add(state.accepted, by_place(evaluated & accepted), HOPED * HOPED_WEIGHT),
        verified=now,
        lapse=lapses / after,
        tokens=add(state.tokens, emitted, state.initial_rate * state.rate_weight),
        time=add(state.time, spent, state.rate_weight),
    )
