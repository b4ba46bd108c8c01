"""What `survival` weighs: the tokens that further drafts may bring, less the worth of their time."""

from typing import Protocol

import jax.numpy as jnp

from specdec_jax.stopping._relative_cost import relative_drafter_cost
from specdec_jax.stopping._survival_state import SurvivalState, rate_of, time_of
from specdec_jax.types import Array, RoundContext


class Gain(Protocol):
    """The most that 1 to `horizon` further tokens bring beyond the worth of their time, [B] float32 in tokens.

    The next has the chance `first`, those after it `later` each; `paid` passes of them are paid for already. Rows
    without room get minus infinity.
    """

    def __call__(
        self,
        state: SurvivalState,
        first: Array,
        later: Array,
        drafted: Array,
        context: RoundContext,
        paid: float,
        horizon: int,
        /,
    ) -> Array: ...


def gain_by_row(
    state: SurvivalState,
    first: Array,
    later: Array,
    drafted: Array,
    context: RoundContext,
    paid: float,
    horizon: int,
) -> Array:
    """`Gain` of every row for itself."""
    return best_within(net_by_row(state, first, later, drafted, context, paid, horizon), drafted, context)


def net_by_row(
    state: SurvivalState,
    first: Array,
    later: Array,
    drafted: Array,
    context: RoundContext,
    paid: float,
    horizon: int,
) -> Array:
    """What 1, 2 ... `horizon` (N) further tokens bring less the worth of their time, [B, N] float32 in tokens."""
    count = jnp.arange(1, horizon + 1, dtype=jnp.int32)[None, :]
    share = jnp.minimum(later, 0.999)[:, None]
    series = (1.0 - share ** count.astype(jnp.float32)) / (1.0 - share)  # 1 + later + later^2 + ..., count terms
    wider = time_of(state, drafted[:, None] + count) - time_of(state, drafted[:, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    time = (count.astype(jnp.float32) - paid) * cost[:, None] + wider
    return (state.survival * first)[:, None] * series - rate_of(state)[:, None] * time


def best_within(net: Array, drafted: Array, context: RoundContext) -> Array:
    """The most [B] of what 1, 2 ... further tokens bring, `net` [B, N], within each row's budget."""
    count = jnp.arange(1, net.shape[1] + 1, dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(count <= (context.budget - drafted)[:, None], net, -jnp.inf), axis=1)


def gain_together(
    state: SurvivalState,
    first: Array,
    later: Array,
    drafted: Array,
    context: RoundContext,
    paid: float,
    horizon: int,
) -> Array:
    """As `gain_by_row` for the batch: what all rows with room may win by 1 to `horizon` more passes, less their time.

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
    wider = time_of(state, longest + count) - time_of(state, longest[None, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    each = (count.astype(jnp.float32) - paid) * cost[:, None] + wider
    time = jnp.max(jnp.where(context.alive[:, None], each, 0.0), axis=0, keepdims=True)
    rate = jnp.sum(jnp.where(context.alive, rate_of(state), 0.0))
    best = jnp.max(jnp.where(count <= jnp.max(room), won - rate * time, -jnp.inf))
    return jnp.where(room > 0, best, -jnp.inf)
