"""The state of `survival`: settings, learnt quantities, and the probabilities and times derived from them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.stopping._readings import evaluated_positions
from specdec_jax.types import Array, Distribution, Draft, RoundContext, VerificationResult

STEEPEST = 4.0  # bound on the offset's absolute value, in logits
PRECISION = 4.0  # prior precision of a text's offset
LAPSE, LATER_LAPSE = 0.05, 0.01  # prior lapse rate, for the first rounds and once they are forgotten
LAPSE_WEIGHT = 5.0  # weight of the prior lapse rate, in verified tokens
OFFSET_DECAY, RATE_DECAY = 0.95, 0.98  # decay per round of the offset's evidence, and of the rate, moves and lapses
# Confidence levels: bounds on the acceptance probability without the offset, and a representative of each level.
BOUNDS, CHANCES = np.array([0.5, 0.8, 0.95]), np.array([0.3, 0.65, 0.88, 0.98])
EDGES, CENTRES = (np.log(chance / (1 - chance)).astype(np.float32)[None, :] for chance in (BOUNDS, CHANCES))
LEVELS = len(CHANCES)
FIRST_MOVES = np.array([[[1.0, 1.0, 1.0, 3.0]]], np.float32)  # prior counts of moves to each level, optimistic
HORIZON = 8  # maximum number of further tokens considered at once
LEAST_ENTROPY = 0.02  # nats, added to every entropy: one-hot distributions are not always accepted


class Prior(NamedTuple):
    """Weights of the acceptance probability in logits, added to the evidence of the distribution (`logit_of`)."""

    bias: float
    log_temperature: float  # weight of log temperature; unused at temperature 0, like `surprise`
    surprise: float  # weight of log q(token) + entropy, once the token is drawn


class Settings(NamedTuple):
    """The hyperparameters, constant during a generation."""

    greedy: Array  # [B, 3] float32, a Prior
    sampled: Array  # [B, 3]
    drafter_cost: Array  # [B] float32, c
    verification: Array  # [B, P+1] float32, V(k)
    widest: Array  # [B] int32, the largest k for which V(k) was given
    prior_precision: Array  # [B]
    initial_rate: Array  # [B]
    rate_weight: Array  # [B]


class SurvivalState(NamedTuple):
    """The state of a row; each [B] float32 unless noted otherwise."""

    survival: Array  # S, probability that this round's draft so far is accepted
    logit: Array  # logit of the last distribution, without the offset
    predicted: Array  # [B, P], predicted acceptance probabilities of this round's positions, before the draws
    levels: Array  # [B, P] int32, confidence levels of this round's distributions; -1: none
    forecast: Array  # [B, LEVELS + 1, HORIZON], expected tokens of 1, 2 ... further drafts, after each level or anew
    passes: Array  # drafter passes of this round, in units of drafter_cost
    offset: Array  # learnt offset in logits
    precision: Array  # precision of the offset
    lapse: Array  # learnt share of drafts that are rejected regardless of the drafter's confidence
    trials: Array  # decayed number of verified drafts behind `lapse`, including the prior's weight
    moves: Array  # [B, LEVELS + 1, LEVELS], counts of transitions between levels; the last row: from a round's start
    tokens: Array  # decayed sum of emitted tokens
    time: Array  # decayed sum of their time, in passes of plain decoding; R = tokens / time
    settings: Settings


def prior_of(state: SurvivalState, context: RoundContext) -> Prior:
    """Each row's prior, for sampling or greedy decoding; fields are [B]."""
    is_sampled = (context.warp.temperature > 0)[:, None]
    weights = jnp.where(is_sampled, state.settings.sampled, state.settings.greedy)
    return Prior(*(weights[:, index] for index in range(weights.shape[1])))  # type: ignore[arg-type]


def logit_of(distribution: Distribution, prior: Prior, context: RoundContext) -> Array:
    """Logit [B] float32 of the probability that a token drawn from this distribution is accepted, without the offset.

    The odds of acceptance are proportional to the odds of the most probable token in greedy decoding, and inversely
    proportional to the entropy in sampling. The fitted exponents of both are close to 1 on all recorded pairs
    (docs/survival.md).
    """
    temperature = context.warp.temperature.astype(jnp.float32)
    entropy, largest = (values.astype(jnp.float32) for values in (distribution.entropy, distribution.max_prob))
    logit, log_temperature = evidence(entropy, largest, temperature)
    return prior.bias + prior.log_temperature * log_temperature + logit


def evidence(entropy: Any, largest: Any, temperature: Any, array: Any = jnp) -> tuple[Any, Any]:
    """The logit without the prior, and log temperature (0 for greedy decoding); `array` is jax.numpy or numpy."""
    is_sampled, largest = temperature > 0, array.clip(largest, 1e-4, 1 - 1e-4)
    by_confidence = array.log(largest) - array.log1p(-largest)
    logit = array.where(is_sampled, -array.log(entropy + LEAST_ENTROPY), by_confidence)
    return logit, array.log(array.where(is_sampled, temperature, 1.0))


def level_of(logit: Array) -> Array:
    """The confidence level of each logit (without offset), [B] int32."""
    return jnp.sum(logit[:, None] > EDGES, axis=1, dtype=jnp.int32)


def forecast(state: SurvivalState) -> Array:
    """Expected accepted tokens of 1, 2 ... further drafts after each level and at the start, [B, LEVELS + 1, HORIZON].

    With T the transition probabilities between levels (from counts and FIRST_MOVES) and A the acceptance probabilities,
    n drafts after level z have the expectation f_n(z) = sum over z' of T(z, z') A(z') (1 + f_(n-1)(z')). All f_n with
    n <= 2 m follow from those with n <= m: f_(m+n) = f_m + (T A)^m f_n.
    """
    counts = state.moves + FIRST_MOVES
    share = counts / jnp.sum(counts, axis=2, keepdims=True)
    reach = share * ((1.0 - state.lapse)[:, None] * jax.nn.sigmoid(CENTRES + state.offset[:, None]))[:, None, :]
    power = reach[:, :LEVELS]
    expected = jnp.sum(power, axis=2, keepdims=True)
    while expected.shape[2] < HORIZON - 1:
        expected = jnp.concatenate([expected, expected[:, :, -1:] + _product(power, expected)], axis=2)
        power = _product(power, power)
    after = jnp.pad(expected[:, :, : HORIZON - 1], ((0, 0), (0, 0), (1, 0)))  # f_0 = 0
    return _product(reach, 1.0 + after)


def _product(left: Array, right: Array) -> Array:
    """Product of small matrices, in float32 on every platform."""
    return jnp.sum(left[:, :, :, None] * right[:, None, :, :], axis=2)


def chance_of(state: SurvivalState, logit: Any) -> Array:
    """The acceptance probability [B] of a logit, with the learnt offset and lapse rate."""
    return (1.0 - state.lapse) * jax.nn.sigmoid(logit + state.offset)


def rate_of(state: SurvivalState) -> Array:
    """R [B] float32, tokens per pass of plain decoding; at least the rate without drafts.

    Without this lower bound a row that drafts at a loss would undervalue its time and continue.
    """
    return jnp.maximum(state.tokens / state.time, 1.0 / state.settings.verification[:, 0]).astype(jnp.float32)


def time_of(state: SurvivalState, drafts: Array) -> Array:
    """V(k) [B, N] at draft lengths `drafts` [B, N]."""
    times = state.settings.verification
    return jnp.take_along_axis(times, jnp.clip(drafts, 0, times.shape[1] - 1), axis=1)


def learn_moves(state: SurvivalState, result: VerificationResult) -> SurvivalState:
    """Counts the level transitions of this round, up to the first rejected draft."""
    levels = state.levels
    reached = jnp.arange(levels.shape[1], dtype=jnp.int32)[None, :] < result.length[:, None]
    after = jax.nn.one_hot(jnp.where(reached, levels, -1), LEVELS)
    before = jnp.pad(levels[:, :-1], ((0, 0), (1, 0)), constant_values=LEVELS)
    seen = jnp.sum(jax.nn.one_hot(before, LEVELS + 1)[:, :, :, None] * after[:, :, None, :], axis=1)
    return state._replace(moves=RATE_DECAY * state.moves + seen)


def learn_chances(state: SurvivalState, draft: Draft, result: VerificationResult, positions: int) -> SurvivalState:
    """One step of the filter for the offset, and of expectation maximisation (Dempster et al. 1977) for the lapse rate.

    The lapse rate is high if the target often emits tokens that the drafter lacks or cannot predict. A rejected draft
    was a lapse with probability lapse rate / (1 - predicted probability). The remaining weight of rejected drafts, and
    accepted drafts, move the offset by (accepted - predicted) / precision.
    """
    evaluated, accepted = evaluated_positions(draft, result, positions)
    lapse = state.lapse[:, None]
    lapsed = jnp.where(evaluated & ~accepted, lapse / (1.0 - state.predicted), 0.0)
    weight, chance = evaluated.astype(jnp.float32) - lapsed, state.predicted / (1.0 - lapse)
    excess = jnp.sum(weight * (accepted.astype(jnp.float32) - chance), axis=1)
    information = jnp.sum(weight * chance * (1.0 - chance), axis=1)
    prior = state.settings.prior_precision
    precision = prior + OFFSET_DECAY * (state.precision - prior) + information
    forgotten = (1.0 - OFFSET_DECAY) * prior / precision  # old evidence decays towards the prior
    offset = state.offset * (1.0 - forgotten) + excess / precision
    prior_lapses = LATER_LAPSE * LAPSE_WEIGHT
    lapses = prior_lapses + RATE_DECAY * (state.lapse * state.trials - prior_lapses) + jnp.sum(lapsed, axis=1)
    trials = LAPSE_WEIGHT + RATE_DECAY * (state.trials - LAPSE_WEIGHT) + jnp.sum(evaluated, axis=1, dtype=jnp.float32)
    offset = jnp.clip(offset, -STEEPEST, STEEPEST)
    return state._replace(offset=offset, precision=precision, lapse=lapses / trials, trials=trials)


def learn_rate(state: SurvivalState, verified: Array, emitted: Array) -> SurvivalState:
    """Adds the round's tokens and time to the decayed sums; the prior's share does not decay.

    Args:
        verified: [B] int32, number of verified drafts; emitted: [B] int32, number of emitted tokens.
    """
    settings = state.settings
    spent = time_of(state, verified[:, None])[:, 0] + settings.drafter_cost * state.passes
    prior = settings.rate_weight * settings.initial_rate
    tokens = prior + RATE_DECAY * (state.tokens - prior) + emitted.astype(jnp.float32)
    time = settings.rate_weight + RATE_DECAY * (state.time - settings.rate_weight) + spent
    return state._replace(tokens=tokens, time=time)
