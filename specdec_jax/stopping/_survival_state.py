"""What `survival` knows of a row: its settings, what rounds taught it, and the chances and times that follow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.stopping._readings import evaluated_positions
from specdec_jax.types import Array, Distribution, Draft, RoundContext, VerificationResult

STEEPEST = 4.0  # the offset's limit, in logits
PRECISION = 4.0  # of the offset before anything is seen
LAPSE, LATER_LAPSE = 0.05, 0.01  # the prior's lapse rate, at first and once many rounds were seen ...
LAPSE_WEIGHT = 5.0  # ... and the number of verified tokens that it counts for
OFFSET_DECAY, RATE_DECAY = 0.95, 0.98  # of what was learnt, per round; RATE_DECAY of moves and lapses, too
# Levels of confidence by the chance before the offset: their bounds, and the chance that stands for each.
BOUNDS, CHANCES = np.array([0.5, 0.8, 0.95]), np.array([0.3, 0.65, 0.88, 0.98])
EDGES, CENTRES = (np.log(chance / (1 - chance)).astype(np.float32)[None, :] for chance in (BOUNDS, CHANCES))
LEVELS = len(CHANCES)
FIRST_MOVES = np.array([[[1.0, 1.0, 1.0, 3.0]]], np.float32)  # to each level, before any is seen: a row tries to draft
HORIZON = 8  # most further tokens that are weighed at once
LEAST_ENTROPY = 0.02  # nats, added to every entropy: a distribution of one token is not certain to be right


class Prior(NamedTuple):
    """The chance that a drafted token is accepted, in logits beyond the evidence of its distribution (`logit_of`)."""

    bias: float
    log_temperature: float  # of log temperature; unused at temperature 0, as the next
    surprise: float  # of log q(token) + entropy, once the token is drawn


class Settings(NamedTuple):
    """Hyperparameters as the rule reads them: nothing changes them."""

    greedy: Array  # [B, 3] float32, a Prior
    sampled: Array  # [B, 3]
    drafter_cost: Array  # [B] float32, c
    verification: Array  # [B, P+1] float32, V(k)
    widest: Array  # [B] int32, the last k whose time is told
    prior_precision: Array  # [B]
    initial_rate: Array  # [B]
    rate_weight: Array  # [B]


class SurvivalState(NamedTuple):
    """What a round and its verification change; each [B] float32 unless said otherwise."""

    survival: Array  # S, of this round's draft
    logit: Array  # of the last distribution, without the offset
    predicted: Array  # [B, P], chances before the draws of this round
    levels: Array  # [B, P] int32, of this round's distributions; -1 where there was none
    forecast: Array  # [B, LEVELS + 1, HORIZON], expected tokens of 1, 2 ... further drafts after each level, or anew
    passes: Array  # of this round, in units of drafter_cost
    offset: Array  # logits, learnt
    precision: Array  # of the offset
    lapse: Array  # the share of drafts that are rejected however confident the drafter is, learnt ...
    trials: Array  # ... from so many verified drafts, with what the prior counts for; a decayed sum
    moves: Array  # [B, LEVELS + 1, LEVELS], how often a level followed each; those that begin a round are the last row
    tokens: Array  # decayed sums: tokens emitted ...
    time: Array  # ... and their time in passes of plain decoding; R is their ratio
    settings: Settings


def prior_of(state: SurvivalState, context: RoundContext) -> Prior:
    """Each row's weights, by whether it is sampled; fields are [B]."""
    is_sampled = (context.warp.temperature > 0)[:, None]
    weights = jnp.where(is_sampled, state.settings.sampled, state.settings.greedy)
    return Prior(*(weights[:, index] for index in range(weights.shape[1])))  # type: ignore[arg-type]


def logit_of(distribution: Distribution, prior: Prior, context: RoundContext) -> Array:
    """Of the chance that the token drawn from this distribution is accepted, without the offset; [B] float32.

    The odds of acceptance are proportional to those of the most probable token where decoding is greedy, and inversely
    proportional to the entropy where it is sampled. On every pair that was recorded, fitted powers of either lie near 1
    (docs/survival.md).
    """
    temperature = context.warp.temperature.astype(jnp.float32)
    entropy, largest = (values.astype(jnp.float32) for values in (distribution.entropy, distribution.max_prob))
    logit, log_temperature = evidence(entropy, largest, temperature)
    return prior.bias + prior.log_temperature * log_temperature + logit


def evidence(entropy: Any, largest: Any, temperature: Any, array: Any = jnp) -> tuple[Any, Any]:
    """The logit of a distribution without a prior, and log temperature, 0 where greedy; `array`: jax.numpy or numpy."""
    is_sampled, largest = temperature > 0, array.clip(largest, 1e-4, 1 - 1e-4)
    by_confidence = array.log(largest) - array.log1p(-largest)
    logit = array.where(is_sampled, -array.log(entropy + LEAST_ENTROPY), by_confidence)
    return logit, array.log(array.where(is_sampled, temperature, 1.0))


def level_of(logit: Array) -> Array:
    """The level of confidence of each logit without offset, [B] int32."""
    return jnp.sum(logit[:, None] > EDGES, axis=1, dtype=jnp.int32)


def forecast(state: SurvivalState) -> Array:
    """Expected accepted tokens of 1, 2 ... further drafts, [B, LEVELS + 1, HORIZON]: after each level, and anew.

    With T the chances of moves between levels (their counts and FIRST_MOVES) and A the chances of acceptance, n drafts
    after level z bring f_n(z) = sum over z' of T(z, z') A(z') (1 + f_(n-1)(z')). Those of all n up to 2 m follow from
    those up to m: f_(m+n) = f_m + (T A)^m f_n.
    """
    counts = state.moves + FIRST_MOVES
    share = counts / jnp.sum(counts, axis=2, keepdims=True)
    reach = share * ((1.0 - state.lapse)[:, None] * jax.nn.sigmoid(CENTRES + state.offset[:, None]))[:, None, :]
    power = reach[:, :LEVELS]
    expected = jnp.sum(power, axis=2, keepdims=True)
    while expected.shape[2] < HORIZON - 1:
        expected = jnp.concatenate([expected, expected[:, :, -1:] + _product(power, expected)], axis=2)
        power = _product(power, power)
    after = jnp.pad(expected[:, :, : HORIZON - 1], ((0, 0), (0, 0), (1, 0)))  # nothing comes after the last one
    return _product(reach, 1.0 + after)


def _product(left: Array, right: Array) -> Array:
    """Small matrices multiplied in float32 on every platform."""
    return jnp.sum(left[:, :, :, None] * right[:, None, :, :], axis=2)


def chance_of(state: SurvivalState, logit: Any) -> Array:
    """The chance of a logit under what was learnt, [B]."""
    return (1.0 - state.lapse) * jax.nn.sigmoid(logit + state.offset)


def rate_of(state: SurvivalState) -> Array:
    """R [B] float32, tokens per pass of plain decoding; never below what decoding without drafts gives.

    Without that floor a row that drafts at a loss would take its time to be worth little, and go on.
    """
    return jnp.maximum(state.tokens / state.time, 1.0 / state.settings.verification[:, 0]).astype(jnp.float32)


def time_of(state: SurvivalState, drafts: Array) -> Array:
    """V at [B, N] draft lengths."""
    times = state.settings.verification
    return jnp.take_along_axis(times, jnp.clip(drafts, 0, times.shape[1] - 1), axis=1)


def learn_moves(state: SurvivalState, result: VerificationResult) -> SurvivalState:
    """Counts the levels that followed accepted drafts, and that a round began with."""
    levels = state.levels
    reached = jnp.arange(levels.shape[1], dtype=jnp.int32)[None, :] < result.length[:, None]
    after = jax.nn.one_hot(jnp.where(reached, levels, -1), LEVELS)
    before = jnp.pad(levels[:, :-1], ((0, 0), (1, 0)), constant_values=LEVELS)
    seen = jnp.sum(jax.nn.one_hot(before, LEVELS + 1)[:, :, :, None] * after[:, :, None, :], axis=1)
    return state._replace(moves=RATE_DECAY * state.moves + seen)


def learn_chances(state: SurvivalState, draft: Draft, result: VerificationResult, positions: int) -> SurvivalState:
    """One step of the filter for the offset, and of expectation maximisation (Dempster et al. 1977) for the lapse rate.

    Lapses are many where the target's token is often one that the drafter does not have, or cannot know. A rejected
    draft was a lapse with the chance lapse rate / (1 - predicted chance). What is left of it, and accepted drafts, move
    the offset by what was accepted beyond what was predicted, over the precision.
    """
    evaluated, accepted = evaluated_positions(draft, result, positions)
    lapse = state.lapse[:, None]
    lapsed = jnp.where(evaluated & ~accepted, lapse / (1.0 - state.predicted), 0.0)
    weight, chance = evaluated.astype(jnp.float32) - lapsed, state.predicted / (1.0 - lapse)
    excess = jnp.sum(weight * (accepted.astype(jnp.float32) - chance), axis=1)
    information = jnp.sum(weight * chance * (1.0 - chance), axis=1)
    prior = state.settings.prior_precision
    precision = prior + OFFSET_DECAY * (state.precision - prior) + information
    forgotten = (1.0 - OFFSET_DECAY) * prior / precision  # what was learnt long ago gives way to the prior
    offset = state.offset * (1.0 - forgotten) + excess / precision
    prior_lapses = LATER_LAPSE * LAPSE_WEIGHT
    lapses = prior_lapses + RATE_DECAY * (state.lapse * state.trials - prior_lapses) + jnp.sum(lapsed, axis=1)
    trials = LAPSE_WEIGHT + RATE_DECAY * (state.trials - LAPSE_WEIGHT) + jnp.sum(evaluated, axis=1, dtype=jnp.float32)
    offset = jnp.clip(offset, -STEEPEST, STEEPEST)
    return state._replace(offset=offset, precision=precision, lapse=lapses / trials, trials=trials)


def learn_rate(state: SurvivalState, verified: Array, emitted: Array) -> SurvivalState:
    """Tokens and time of the round join the decayed sums; what the prior counts for does not decay.

    Args:
        verified: [B] int32, drafted tokens that were verified; emitted: [B] int32, tokens of the round.
    """
    settings = state.settings
    spent = time_of(state, verified[:, None])[:, 0] + settings.drafter_cost * state.passes
    prior = settings.rate_weight * settings.initial_rate
    tokens = prior + RATE_DECAY * (state.tokens - prior) + emitted.astype(jnp.float32)
    time = settings.rate_weight + RATE_DECAY * (state.time - settings.rate_weight) + spent
    return state._replace(tokens=tokens, time=time)
