"""What `survival` knows of a row: its settings, what rounds taught it, and the chances and times that follow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.stopping._readings import evaluated_positions
from specdec_jax.types import Array, Distribution, Draft, RoundContext, VerificationResult

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


def prior_of(state: SurvivalState, context: RoundContext) -> Prior:
    """Each row's weights, by whether it is sampled; fields are [B]."""
    is_sampled = (context.warp.temperature > 0)[:, None]
    weights = jnp.where(is_sampled, state.settings.sampled, state.settings.greedy)
    return Prior(*(weights[:, index] for index in range(weights.shape[1])))  # type: ignore[arg-type]


def logit_of(distribution: Distribution, prior: Prior, context: RoundContext) -> Array:
    """Of the chance that the token drawn from this distribution is accepted, without the offset; [B] float32."""
    temperature = context.warp.temperature.astype(jnp.float32)
    log_temperature = jnp.log(jnp.where(temperature > 0, temperature, 1.0))
    confidence = jnp.clip(distribution.max_prob.astype(jnp.float32), 1e-4, 1 - 1e-4)
    # uncertainty never speaks for a token
    slope = jnp.minimum(prior.entropy + prior.entropy_log_temperature * log_temperature, 0.0)
    by_entropy = slope * jnp.sqrt(distribution.entropy.astype(jnp.float32))
    by_confidence = prior.confidence * (jnp.log(confidence) - jnp.log1p(-confidence))
    return prior.bias + prior.log_temperature * log_temperature + by_entropy + by_confidence


def chance_of(state: SurvivalState, logit: Any) -> Array:
    """The chance of a logit under what was learnt, [B]."""
    return jax.nn.sigmoid(logit + state.offset)


def rate_of(state: SurvivalState) -> Array:
    """R [B] float32, tokens per pass of plain decoding; never below what decoding without drafts gives.

    Without that floor a row that drafts at a loss would take its time to be worth little, and go on.
    """
    return jnp.maximum(state.tokens / state.time, 1.0 / state.settings.verification[:, 0]).astype(jnp.float32)


def time_of(state: SurvivalState, drafts: Array) -> Array:
    """V at [B, N] draft lengths."""
    times = state.settings.verification
    return jnp.take_along_axis(times, jnp.clip(drafts, 0, times.shape[1] - 1), axis=1)


def learn_offset(state: SurvivalState, draft: Draft, result: VerificationResult, positions: int) -> SurvivalState:
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


def learn_rate(state: SurvivalState, verified: Array, emitted: Array) -> SurvivalState:
    """Tokens and time of the round join the decayed sums; what the prior counts for does not decay.

    Args:
        verified: [B] int32, drafted tokens that were verified; emitted: [B] int32, tokens of the round.
    """
    settings = state.settings
    spent = time_of(state, verified[:, None])[:, 0] + settings.drafter_cost * state.passes
    prior = settings.rate_weight * settings.initial_rate
    tokens = prior + settings.rate_decay * (state.tokens - prior) + emitted.astype(jnp.float32)
    time = settings.rate_weight + settings.rate_decay * (state.time - settings.rate_weight) + spent
    return state._replace(tokens=tokens, time=time)
