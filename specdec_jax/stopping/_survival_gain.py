"""What `survival` weighs: the tokens that further drafts and siblings may bring, less the worth of their time."""

import jax.numpy as jnp

from specdec_jax.stopping._relative_cost import relative_drafter_cost
from specdec_jax.stopping._siblings import ranks, sums, worths, worths_of_children
from specdec_jax.stopping._survival_state import SurvivalState, chance_of, prior_of, rate_of, time_of
from specdec_jax.types import Array, RoundContext, Wanted


def gain_by_row(
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
    wider = time_of(state, drafted[:, None] + count) - time_of(state, drafted[:, None])
    cost = state.settings.drafter_cost * relative_drafter_cost(context)
    time = (count.astype(jnp.float32) - paid) * cost[:, None] + wider
    net = (state.survival * first)[:, None] * series - rate_of(state)[:, None] * time
    if siblings:
        net = net + _gain_beside(state, first, drafted, count, context, siblings)
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
    time = time_of(state, flat).reshape(filled.shape) - time_of(state, drafts)[:, :, None]
    net = sums(worth, ranks(worth), worth.shape[1])[:, None, :] - rate_of(state)[:, None, None] * time
    return jnp.max(jnp.where(filled <= state.settings.widest[:, None, None], net, 0.0), axis=2)


def wanted_beside(
    state: SurvivalState, length: Array, room: Array, context: RoundContext, most: int, parent: Array | None
) -> Wanted:
    """How many siblings of each draft are worth their places, [B, P] int32 of at most `most`, and how many children.

    A child is never worth more than its sibling, nor that more than those before it, so the best are a tree.
    """
    worth = worths(state.predicted, length, _right(state, context, most))
    flat = worth.reshape(worth.shape[0], -1)
    if parent is not None:
        later = chance_of(state, prior_of(state, context).next_bias)
        children = worths_of_children(worth, parent, later, _right(state, context, most))
        flat = jnp.concatenate([flat, children.reshape(worth.shape[0], -1)], axis=1)
    rank, places, siblings = ranks(flat), state.predicted.shape[1], worth[0].size
    count = jnp.arange(places + 1, dtype=jnp.int32)[None, :]
    time = time_of(state, length[:, None] + count) - time_of(state, length[:, None])
    net = jnp.where(count <= room[:, None], sums(flat, rank, places) - rate_of(state)[:, None] * time, -jnp.inf)
    chosen = (rank < jnp.argmax(net, axis=1)[:, None]) & (flat > 0)
    own = jnp.sum(chosen[:, :siblings].reshape(worth.shape), axis=2, dtype=jnp.int32)
    if parent is None:
        return Wanted(own)
    return Wanted(own, jnp.sum(chosen[:, siblings:].reshape(*parent.shape, most), axis=2, dtype=jnp.int32))


def worth_expanding(state: SurvivalState, drafted: Array, context: RoundContext, most: int) -> Array:
    """What siblings of the drafts so far are worth, [B, P, M]; as much more their children are worth."""
    return worths(state.predicted, drafted, _right(state, context, most))
