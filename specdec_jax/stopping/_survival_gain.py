"""The gain of `survival`: expected accepted tokens of further drafts minus the value of their time."""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.stopping._readings import opening_cost, relative_drafter_cost
from specdec_jax.stopping._survival_state import SurvivalState, rate_of, time_of
from specdec_jax.types import Array, RoundContext


class Ahead(NamedTuple):
    """The prospects of further drafts in this round."""

    tokens: Array  # [B, N] float32, expected accepted tokens of 1, 2 ... N further drafts if all so far are accepted
    drafted: Array  # [B] int32, tokens drafted in this round so far
    paid: float  # number of their drafter passes that were already run


def after_level(state: SurvivalState, level: Array | int, drafted: Array) -> Ahead:
    """Further drafts with unknown distributions, after a distribution of this confidence level."""
    at = jnp.broadcast_to(jnp.asarray(level, jnp.int32), drafted.shape)[:, None, None]
    return Ahead(jnp.take_along_axis(state.forecast, at, axis=1)[:, 0], drafted, 0.0)


def after_distribution(state: SurvivalState, chance: Array, level: Array, drafted: Array) -> Ahead:
    """A token of a known distribution, accepted with probability `chance` [B], and unknown ones after it."""
    after = after_level(state, level, drafted).tokens[:, :-1]
    return Ahead(chance[:, None] * (1.0 + jnp.pad(after, ((0, 0), (1, 0)))), drafted, 1.0)


def further(ahead: Ahead) -> Array:
    """Numbers of further tokens 1, 2 ... N, [1, N] int32."""
    return jnp.arange(1, ahead.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]


def gain_by_row(state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """The largest net gain [B] float32, in tokens, of 1 to N further tokens of each row; -inf without budget."""
    return best_within(net_by_row(state, ahead, context), ahead, context)


def net_by_row(state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """Net gain of 1, 2 ... N further tokens: expected accepted tokens minus the value of their time, [B, N] float32."""
    return state.survival[:, None] * ahead.tokens - rate_of(state)[:, None] * _time(state, ahead, context)


def _time(state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """Time of 1, 2 ... N further tokens, [B, N] float32 in passes of plain decoding."""
    count = further(ahead)
    wider = time_of(state, ahead.drafted[:, None] + count) - time_of(state, ahead.drafted[:, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    opens = (ahead.drafted == 0) & (ahead.paid == 0)
    opening = state.settings.drafter_cost * jnp.where(opens, opening_cost(context), 0.0)
    return (count.astype(jnp.float32) - ahead.paid) * cost[:, None] + opening[:, None] + wider


def best_within(net: Array, ahead: Ahead, context: RoundContext) -> Array:
    """The maximum [B] of the net gains `net` [B, N] within each row's budget."""
    return jnp.max(jnp.where(further(ahead) <= (context.budget - ahead.drafted)[:, None], net, -jnp.inf), axis=1)


def gain_together(state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """As `gain_by_row` for the batch: tokens of all rows with budget from 1 to N more passes, minus all rows' time.

    The same number for all rows, [B]; minus infinity for rows without budget. Rows stop together, at their budget or
    where a lookup finds nothing, so a row's own passes and drafts are nearly those of the batch.
    """
    longest = jnp.max(jnp.where(context.alive, ahead.drafted, 0))
    going = context.alive & (ahead.drafted == longest)
    free = jnp.where(going, jnp.maximum(context.budget - ahead.drafted, 0), 0)
    count = further(ahead)
    within = jnp.minimum(count, free[:, None])
    brought = jnp.take_along_axis(ahead.tokens, jnp.maximum(within, 1) - 1, axis=1)
    won = jnp.sum(jnp.where(within > 0, state.survival[:, None] * brought, 0.0), axis=0, keepdims=True)
    by_row = _time(state, ahead._replace(drafted=longest[None]), context)
    time = jnp.max(jnp.where(context.alive[:, None], by_row, 0.0), axis=0, keepdims=True)
    rate = jnp.sum(jnp.where(context.alive, rate_of(state), 0.0))
    best = jnp.max(jnp.where(count <= jnp.max(free), won - rate * time, -jnp.inf))
    return jnp.where(free > 0, best, -jnp.inf)
