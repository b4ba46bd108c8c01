"""Survival: pay for another drafter pass while what it may bring is worth its time. Ours; docs/survival.md derives it.

Speculative decoding is a renewal process: rounds bring tokens and take time, and the long-run rate R is what every
second is worth elsewhere. With S the probability that all drafts of the round survive so far, a_1, a_2, ... the chances
of the next ones, c a drafter pass and V(k) the verification of k drafts, in passes of plain decoding:

- a distribution that is paid for gives its token unless the wider verification costs more than it and its successors
  bring;
- n more passes pay iff  S (a_1 + a_1 a_2 + ... n terms)  >  R (n c + V(k + n) - V(k));  they are bought one at a time,
  and the best n within the budget decides, because V is a staircase: the first token of a wider width alone is costly.

The chance of a token is a logistic function of the distribution's entropy and largest probability before it is drawn
(and of the temperature, which changes what an entropy means), and of the drawn token's surprise after; the chance of
tokens whose distribution is not known yet is their mean, moved a little by the last distribution. The few weights are a
prior, learnt once per pair of models (metrics/prior.py) for greedy and for sampled decoding. One number a row,
an offset of all logits, follows the acceptance seen: an extended Kalman filter, so that a few rounds suffice and
positions that are rarely evaluated need no estimate of their own.

With siblings, further tokens of a draft's distribution that are verified beside it and cost no drafter pass, the rule
also fills what a width has room for, and buys a wider one where that pays: the draft at depth d is the first that is
rejected with the chance S_d (1 - a_d), and its i-th sibling is right then with (1 - h_1) ... (1 - h_(i-1)) h_i, each
worth one token. The n siblings of most worth are verified where that exceeds R (V(k + n) - V(k)) by most.

In a batch a pass is made for all rows or for none, and the longest draft sets the width of the verification. `together`
weighs that: n more passes pay iff what all rows may win by them exceeds the worth of their time to all rows, and then
every row drafts. Rows are as independent as ever in distribution, but no longer in their draws.

Sources: the optimality of a threshold on survival, SpecDec++ (arXiv 2405.19715, theorem 3.1); the rest is ours.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.sampling import log_prob_of
from specdec_jax.hyperparameters import per_row, vector_per_row
from specdec_jax.stopping._evaluated import evaluated_positions, remember
from specdec_jax.stopping._relative_cost import relative_drafter_cost
from specdec_jax.stopping._siblings import ranks, sums, worths
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, RoundContext, StoppingPolicy, VerificationResult

STEEPEST = 4.0  # the offset's limit, in logits


class Prior(NamedTuple):
    """Weights of the chance that a drafted token is accepted, in logits."""

    bias: float
    entropy: float  # of sqrt(entropy), entropy in nats
    confidence: float  # of the logit of the largest probability
    surprise: float  # of log q(token) + entropy, once it is drawn; unused at temperature 0
    log_temperature: float  # of log temperature; unused at temperature 0, as the next
    entropy_log_temperature: float
    # of sqrt(entropy) log temperature: a high one makes distributions uncertain that are not
    next_bias: float  # the mean of tokens whose distribution is not known yet
    next_slope: float  # how much of the last distribution's logit they inherit


# Of smollm2 and smollm2-drafter on configs/prompts, greedy and at 0.7 and 1: `metrics.prior.fit_prior` of its traces.
GREEDY = Prior(0.55, 0.0, 1.0, 0.0, 0.0, 0.0, 0.33, 0.25)
SAMPLED = Prior(2.02, -1.23, 0.1, 0.18, 0.72, 1.17, -0.05, 0.3)


# h of smollm2 and smollm2-drafter-reading: of the second, third and fourth candidate (docs/combs.md).
GREEDY_SIBLINGS, SAMPLED_SIBLINGS = (0.28, 0.2, 0.17), (0.23, 0.13, 0.1)


class Settings(NamedTuple):
    """Hyperparameters as the rule reads them: nothing changes them."""

    greedy: Array  # [B, 8] float32, a Prior
    sampled: Array  # [B, 8]
    drafter_cost: Array  # [B] float32, c
    verification: Array  # [B, P+1] float32, V(k)
    widest: Array  # [B] int32, the last k whose time is told
    prior_precision: Array  # [B]
    decay: Array  # [B]
    initial_rate: Array  # [B]
    rate_weight: Array  # [B]
    rate_decay: Array  # [B]
    greedy_siblings: Array  # [B, M] float32, h
    sampled_siblings: Array  # [B, M]


class SurvivalState(NamedTuple):
    """What a round and its verification change; each [B] float32 unless said otherwise."""

    survival: Array  # S, of this round's draft
    logit: Array  # of the last distribution, without the offset
    predicted: Array  # [B, P], chances told before the draws of this round
    passes: Array  # of this round, in units of drafter_cost
    offset: Array  # logits, learnt
    precision: Array  # of the offset
    tokens: Array  # decayed sums: tokens emitted ...
    time: Array  # ... and their time in passes of plain decoding; R is their ratio
    settings: Settings


@strategy
def survival(look_ahead: bool = True, positions: int = 32, together: bool = False, siblings: int = 0) -> StoppingPolicy:
    """Draft while it pays, by calibrated chances of survival and measured costs.

    Args:
        look_ahead: weigh any number of further tokens at once; without it the next one alone.
        positions: drafts a round that are weighed and learnt from (P); with siblings, places of a pass that are filled.
        together: one decision for all rows, by what the whole batch gains; costs are then those of the batch
            (`build_pair(batch=)`). A sampled row's draws depend on its neighbours, its distribution does not.
        siblings: most siblings verified beside a draft (M), up to 3; 0 drafts chains alone.

    Hyperparameters (`init`): drafter_cost (c, a drafter pass over a pass of plain decoding, default 0.1; `generate`
    gives what is measured of the pair), verification_times ([P+1] or
    fewer, the pass that verifies k drafts over one of plain decoding, the last holding for longer drafts; 1 + 0.02 k
    unless given), greedy and sampled (a Prior each), prior_precision (6: how many verified tokens' worth the prior is,
    roughly times four), decay (0.95, of what was learnt, per round), initial_rate (1.5 tokens per pass of plain
    decoding, R before anything is seen), rate_weight (5 passes that it counts for), rate_decay (0.98 per round),
    greedy_siblings and sampled_siblings (h of the second, third and fourth candidate).

    Raises:
        ValueError: positions below 1, or siblings out of range.
    """
    if positions < 1:
        raise ValueError(f"survival needs positions of 1 or more, got {positions}")
    if not 0 <= siblings <= len(GREEDY_SIBLINGS):
        raise ValueError(f"survival needs siblings of 0 to {len(GREEDY_SIBLINGS)}, got {siblings}")

    def init(
        batch: int,
        drafter_cost: Any = 0.1,
        verification_times: Any = None,
        greedy: Any = GREEDY,
        sampled: Any = SAMPLED,
        prior_precision: Any = 6.0,
        decay: Any = 0.95,
        initial_rate: Any = 1.5,
        rate_weight: Any = 5.0,
        rate_decay: Any = 0.98,
        greedy_siblings: Any = GREEDY_SIBLINGS,
        sampled_siblings: Any = SAMPLED_SIBLINGS,
    ) -> SurvivalState:
        zero, one = per_row(batch, 0.0, "zero"), per_row(batch, 1.0, "one")
        rate = per_row(batch, initial_rate, "initial_rate", low=0.0, open_low=True)
        weight = per_row(batch, rate_weight, "rate_weight", low=0.0, open_low=True)
        settings = Settings(
            greedy=vector_per_row(batch, greedy, "greedy", len(Prior._fields)),
            sampled=vector_per_row(batch, sampled, "sampled", len(Prior._fields)),
            drafter_cost=per_row(batch, drafter_cost, "drafter_cost", low=0.0, open_low=True),
            verification=_verification(batch, verification_times, positions),
            widest=per_row(batch, _last(verification_times, positions), "widest", dtype=np.int32),
            prior_precision=per_row(batch, prior_precision, "prior_precision", low=0.0, open_low=True),
            decay=per_row(batch, decay, "decay", low=0.0, high=1.0),
            initial_rate=rate,
            rate_weight=weight,
            rate_decay=per_row(batch, rate_decay, "rate_decay", low=0.0, high=1.0),
            greedy_siblings=_chances_of_siblings(batch, greedy_siblings, "greedy_siblings"),
            sampled_siblings=_chances_of_siblings(batch, sampled_siblings, "sampled_siblings"),
        )
        return SurvivalState(
            survival=one,
            logit=zero,
            predicted=vector_per_row(batch, [0.0] * positions, "predicted", positions),
            passes=zero,
            offset=zero,
            precision=settings.prior_precision,
            tokens=rate * weight,
            time=weight,
            settings=settings,
        )

    horizon = positions if look_ahead else 1
    gain = _gain_together if together else partial(_gain, siblings=siblings)

    def begin(state: SurvivalState, context: RoundContext) -> tuple[Array, SurvivalState]:
        state = state._replace(survival=jnp.ones_like(state.survival), passes=jnp.zeros_like(state.passes))
        mean = _chance(state, _prior(state, context).next_bias)
        return gain(state, mean, mean, jnp.zeros_like(context.budget), context, 0.0, horizon) > 0, state

    def check(
        state: SurvivalState, distribution: Distribution, drafted: Array, context: RoundContext
    ) -> tuple[Array, SurvivalState]:
        prior = _prior(state, context)
        confidence = jnp.clip(distribution.max_prob.astype(jnp.float32), 1e-4, 1 - 1e-4)
        log_temperature = jnp.log(
            jnp.where(context.warp.temperature > 0, context.warp.temperature, 1.0).astype(jnp.float32)
        )
        # uncertainty never speaks for a token
        slope = jnp.minimum(prior.entropy + prior.entropy_log_temperature * log_temperature, 0.0)
        logit = (
            prior.bias
            + prior.log_temperature * log_temperature
            + slope * jnp.sqrt(distribution.entropy.astype(jnp.float32))
        )
        logit = logit + prior.confidence * (jnp.log(confidence) - jnp.log1p(-confidence))
        chance = _chance(state, logit)
        state = state._replace(
            logit=logit,
            predicted=remember(state.predicted, drafted, chance),
            passes=state.passes + relative_drafter_cost(context),
        )
        later = _chance(state, prior.next_bias)
        return gain(state, chance, later, drafted, context, 1.0, horizon) > 0, state

    def proceed(
        state: SurvivalState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, SurvivalState]:
        prior = _prior(state, context)
        drawn = log_prob_of(distribution, token).astype(jnp.float32)
        is_sampled = context.warp.temperature > 0
        surprise = jnp.where(is_sampled, prior.surprise * (drawn + distribution.entropy.astype(jnp.float32)), 0.0)
        state = state._replace(survival=state.survival * _chance(state, state.logit + surprise))
        first = _chance(state, prior.next_bias + prior.next_slope * state.logit)
        later = _chance(state, prior.next_bias)
        return gain(state, first, later, drafted, context, 0.0, horizon) > 0, state

    def update(state: SurvivalState, draft: Draft, result: VerificationResult) -> SurvivalState:
        return _learn_rate(_learn_offset(state, draft, result, positions), draft, result)

    def beside(state: SurvivalState, length: Array, room: Array, context: RoundContext) -> Array:
        return _beside(state, length, room, context, siblings)

    more = {"siblings": siblings, "beside": beside} if siblings else {}
    return StoppingPolicy(init, begin, check, proceed, update, _rate, joins_rows=together, **more)


def _chances_of_siblings(batch: int, chances: Any, name: str) -> Array:
    return vector_per_row(batch, chances, name, len(GREEDY_SIBLINGS), low=0.0, high=1.0)


def _verification(batch: int, times: Any, positions: int) -> Array:
    """V(k) [B, P+1] float32; the last time given holds for longer drafts."""
    if times is None:
        times = [1.0 + 0.02 * drafts for drafts in range(positions + 1)]
    if np.ndim(times) < 1:
        raise ValueError(f"verification_times must be a list of times by draft length, got {times!r}")
    given = vector_per_row(batch, times, "verification_times", np.shape(times)[-1], low=0.0)[:, : positions + 1]
    return jnp.pad(given, ((0, 0), (0, positions + 1 - given.shape[1])), mode="edge")


def _last(times: Any, positions: int) -> int:
    """The last of V(0), V(1) ... that is told."""
    return positions if times is None else min(np.shape(times)[-1] - 1, positions)


def _prior(state: SurvivalState, context: RoundContext) -> Prior:
    """Each row's weights, by whether it is sampled; fields are [B]."""
    is_sampled = (context.warp.temperature > 0)[:, None]
    weights = jnp.where(is_sampled, state.settings.sampled, state.settings.greedy)
    return Prior(*(weights[:, index] for index in range(weights.shape[1])))  # type: ignore[arg-type]


def _chance(state: SurvivalState, logit: Any) -> Array:
    return jax.nn.sigmoid(logit + state.offset)


def _rate(state: SurvivalState) -> Array:
    """R [B] float32, tokens per pass of plain decoding; never below what decoding without drafts gives.

    Without that floor a row that drafts at a loss would take its time to be worth little, and go on.
    """
    return jnp.maximum(state.tokens / state.time, 1.0 / state.settings.verification[:, 0]).astype(jnp.float32)


def _time_of(state: SurvivalState, drafts: Array) -> Array:
    """V at [B, N] draft lengths."""
    times = state.settings.verification
    return jnp.take_along_axis(times, jnp.clip(drafts, 0, times.shape[1] - 1), axis=1)


def _gain(
    state: SurvivalState,
    first: Array,
    later: Array,
    drafted: Array,
    context: RoundContext,
    paid: float,
    horizon: int,
    siblings: int,
) -> Array:
    """The most that 1 to `horizon` further tokens bring beyond the worth of their time, [B] float32 in tokens.

    The next has the chance `first`, those after it `later` each; `paid` passes of them are paid for already. Rows
    without room get minus infinity.
    """
    count = jnp.arange(1, horizon + 1, dtype=jnp.int32)[None, :]
    share = jnp.minimum(later, 0.999)[:, None]
    series = (1.0 - share ** count.astype(jnp.float32)) / (1.0 - share)  # 1 + later + later^2 + ..., count terms
    wider = _time_of(state, drafted[:, None] + count) - _time_of(state, drafted[:, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    time = (count.astype(jnp.float32) - paid) * cost[:, None] + wider
    net = (state.survival * first)[:, None] * series - _rate(state)[:, None] * time
    if siblings:
        net = net + _gain_beside(state, first, drafted, count, context, siblings)
    return jnp.max(jnp.where(count <= (context.budget - drafted)[:, None], net, -jnp.inf), axis=1)


def _gain_together(
    state: SurvivalState,
    first: Array,
    later: Array,
    drafted: Array,
    context: RoundContext,
    paid: float,
    horizon: int,
) -> Array:
    """As `_gain` for the batch: what all rows with room may win by 1 to `horizon` further passes, less their time.

    One number, [B]; rows without room, which win nothing, get minus infinity. Rows stop together, at their budget or
    where a lookup finds nothing, so a row's own passes and drafts are nearly the batch's.
    """
    longest = jnp.max(jnp.where(context.alive, drafted, 0))
    going = context.alive & (drafted == longest)
    room = jnp.where(going, jnp.maximum(context.budget - drafted, 0), 0)
    count = jnp.arange(1, horizon + 1, dtype=jnp.int32)[None, :]
    share = jnp.minimum(later, 0.999)[:, None]
    terms = jnp.minimum(count, room[:, None]).astype(jnp.float32)
    won = jnp.sum((state.survival * first)[:, None] * (1.0 - share**terms) / (1.0 - share), axis=0, keepdims=True)
    wider = _time_of(state, longest + count) - _time_of(state, longest[None, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    each = (count.astype(jnp.float32) - paid) * cost[:, None] + wider
    time = jnp.max(jnp.where(context.alive[:, None], each, 0.0), axis=0, keepdims=True)
    rate = jnp.sum(jnp.where(context.alive, _rate(state), 0.0))
    best = jnp.max(jnp.where(count <= jnp.max(room), won - rate * time, -jnp.inf))
    return jnp.where(room > 0, best, -jnp.inf)


def _right(state: SurvivalState, context: RoundContext, most: int) -> Array:
    """h [B, M], by whether a row is sampled."""
    is_sampled = (context.warp.temperature > 0)[:, None]
    return jnp.where(is_sampled, state.settings.sampled_siblings, state.settings.greedy_siblings)[:, :most]


def _gain_beside(
    state: SurvivalState, first: Array, drafted: Array, count: Array, context: RoundContext, most: int
) -> Array:
    """What siblings bring beside `count` [1, N] further drafts, less what they bring without, [B, N] in tokens.

    Of further drafts those of the next are counted, of chance `first`; those of later ones are worth less.
    """
    next_one = jnp.arange(state.predicted.shape[1], dtype=jnp.int32)[None, :] == drafted[:, None]
    chance = jnp.where(next_one, first[:, None], state.predicted)
    right = _right(state, context, most)
    now, then = (worths(chance, drafted + more, right) for more in (0, 1))
    return _brought(state, then, drafted[:, None] + count) - _brought(state, now, drafted[:, None])


def _brought(state: SurvivalState, worth: Array, drafts: Array) -> Array:
    """What siblings of `worth` [B, P, M] bring beside so many drafts [B, N], less the worth of their time."""
    count = jnp.arange(worth.shape[1] + 1, dtype=jnp.int32)[None, None, :]
    filled = drafts[:, :, None] + count
    flat = filled.reshape(filled.shape[0], -1)
    time = _time_of(state, flat).reshape(filled.shape) - _time_of(state, drafts)[:, :, None]
    net = sums(worth, ranks(worth))[:, None, :] - _rate(state)[:, None, None] * time
    return jnp.max(jnp.where(filled <= state.settings.widest[:, None, None], net, 0.0), axis=2)


def _beside(state: SurvivalState, length: Array, room: Array, context: RoundContext, most: int) -> Array:
    """How many siblings of each draft are worth their places, [B, P] int32 of at most `most`."""
    worth = worths(state.predicted, length, _right(state, context, most))
    rank, count = ranks(worth), jnp.arange(worth.shape[1] + 1, dtype=jnp.int32)[None, :]
    time = _time_of(state, length[:, None] + count) - _time_of(state, length[:, None])
    net = jnp.where(count <= room[:, None], sums(worth, rank) - _rate(state)[:, None] * time, -jnp.inf)
    chosen = (rank < jnp.argmax(net, axis=1)[:, None, None]) & (worth > 0)
    return jnp.sum(chosen, axis=2, dtype=jnp.int32)


def _learn_offset(state: SurvivalState, draft: Draft, result: VerificationResult, positions: int) -> SurvivalState:
    """One step of the filter: the offset moves by what was accepted beyond what was predicted, over its precision."""
    evaluated, accepted = evaluated_positions(draft, result, positions)
    weight, chance = evaluated.astype(jnp.float32), state.predicted
    excess = jnp.sum(weight * (accepted.astype(jnp.float32) - chance), axis=1)
    information = jnp.sum(weight * chance * (1.0 - chance), axis=1)
    decay, prior = state.settings.decay, state.settings.prior_precision
    precision = prior + decay * (state.precision - prior) + information
    forgotten = (1.0 - decay) * prior / precision  # what was learnt long ago gives way to the prior
    offset = state.offset * (1.0 - forgotten) + excess / precision
    return state._replace(offset=jnp.clip(offset, -STEEPEST, STEEPEST), precision=precision)


def _learn_rate(state: SurvivalState, draft: Draft, result: VerificationResult) -> SurvivalState:
    """Tokens and time of the round join the decayed sums; what the prior counts for does not decay."""
    settings = state.settings
    beside = 0 if draft.beside is None else jnp.sum(draft.beside, axis=1, dtype=jnp.int32)
    spent = _time_of(state, (draft.length + beside)[:, None])[:, 0] + settings.drafter_cost * state.passes
    prior = settings.rate_weight * settings.initial_rate
    tokens = prior + settings.rate_decay * (state.tokens - prior) + result.emitted.astype(jnp.float32)
    time = settings.rate_weight + settings.rate_decay * (state.time - settings.rate_weight) + spent
    return state._replace(tokens=tokens, time=time)
