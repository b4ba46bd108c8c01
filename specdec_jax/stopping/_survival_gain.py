"""What `survival` weighs: the tokens that further drafts may bring, less the worth of their time."""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.stopping._readings import relative_drafter_cost
from specdec_jax.stopping._survival_state import SurvivalState, rate_of, time_of
from specdec_jax.types import Array, RoundContext


class Ahead(NamedTuple):
    """The tokens that may be drafted next."""

    first: Array  # [B] float32, the chance of the next one
    later: Array  # [B] float32, of each of those after it
    drafted: Array  # [B] int32, drafts of the round so far
    paid: float  # passes of them that are paid for already
    horizon: int  # N, the most that are weighed


def further(ahead: Ahead) -> Array:
    """1, 2 ... N further tokens, [1, N] int32."""
    return jnp.arange(1, ahead.horizon + 1, dtype=jnp.int32)[None, :]


def gain_by_row(state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """The most that 1 to N further tokens bring beyond the worth of their time, [B] float32 in tokens, of every row for
    itself; rows without room get minus infinity.
    """
    return best_within(net_by_row(state, ahead, context), ahead, context)


def net_by_row(state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """What 1, 2 ... N further tokens bring less the worth of their time, [B, N] float32 in tokens."""
    first, later, drafted, paid, _ = ahead
    count = further(ahead)
    share = jnp.minimum(later, 0.999)[:, None]
    series = (1.0 - share ** count.astype(jnp.float32)) / (1.0 - share)  # 1 + later + later^2 + ..., count terms
    wider = time_of(state, drafted[:, None] + count) - time_of(state, drafted[:, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    time = (count.astype(jnp.float32) - paid) * cost[:, None] + wider
    return (state.survival * first)[:, None] * series - rate_of(state)[:, None] * time


def best_within(net: Array, ahead: Ahead, context: RoundContext) -> Array:
    """The most [B] of what 1, 2 ... N further tokens bring, `net` [B, N], within each row's budget."""
    return jnp.max(jnp.where(further(ahead) <= (context.budget - ahead.drafted)[:, None], net, -jnp.inf), axis=1)


def gain_together(state: SurvivalState, ahead: Ahead, context: RoundContext) -> Array:
    """As `gain_by_row` for the batch: what all rows with room may win by 1 to N more passes, less their time.

    One number, [B]; rows without room, which win nothing, get minus infinity. Rows stop together, at their budget or
    where a lookup finds nothing, so a row's own passes and drafts are nearly the batch's.
    """
    first, later, drafted, paid, _ = ahead
    longest = jnp.max(jnp.where(context.alive, drafted, 0))
    going = context.alive & (drafted == longest)
    room = jnp.where(going, jnp.maximum(context.budget - drafted, 0), 0)
    count = further(ahead)
    share = jnp.minimum(later, 0.999)[:, None]
    terms = jnp.minimum(count, room[:, None]).astype(jnp.float32)
    won = jnp.sum((state.survival * first)[:, None] * (1.0 - share**terms) / (1.0 - share), axis=0, keepdims=True)
    wider = time_of(state, longest + count) - time_of(state, longest[None, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    each = (count.astype(jnp.float32) - paid) * cost[:, None] + wider
    time = jnp.max(jnp.where(context.alive[:, None], each, 0.0), axis=0, keepdims=True)
    rate = jnp.sum(jnp.where(context.alive, rate_of(state), 0.0))
    best = jnp.max(jnp.where(count <= jnp.max(room), won - rate * time, -jnp.inf))
    return jnp.where(room > 0, best, -jnp.inf)
