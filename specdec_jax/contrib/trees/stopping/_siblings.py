"""The value of siblings, from the acceptance probabilities of the drafts.

A draft at depth d is the first rejected one with probability S_d (1 - a_d). Then its i-th sibling is accepted, if
the earlier ones are not, with probability h_i (measured, see docs/combs.md). An accepted sibling emits one token, and
its children are candidates again.
"""

import jax.numpy as jnp

from specdec_jax.types import Array


def marginals(chance: Array, length: Array, right: Array) -> Array:
    """Value in tokens of every sibling of the first `length` [B] drafts, [B, P, M]; non-increasing along M.

    Args:
        chance: [B, P], a_d, conditional acceptance probability of each draft.
        right: [B, M], h of the second candidate, the third ...
    """
    depth = jnp.arange(chance.shape[1], dtype=jnp.int32)[None, :]
    survives = _of_earlier(chance)
    missed = jnp.where(depth < length[:, None], survives * (1.0 - chance), 0.0)
    return missed[:, :, None] * _falling(right)[:, None, :]


def worths_of_children(worth: Array, parent: Array, first: Array, right: Array) -> Array:
    """Value in tokens of every child of expanded siblings, [B, E, M]; non-increasing along M.

    Args:
        worth: [B, P, M], value of siblings; parent: [B, E], as in `Children`.
        first: [B], acceptance probability of a first child if its sibling is accepted; right: [B, M], as for siblings.
    """
    flat = worth.reshape(worth.shape[0], -1)
    of = jnp.where(parent >= 0, jnp.take_along_axis(flat, jnp.maximum(parent, 0), axis=1, mode="clip"), 0.0)
    candidates = jnp.concatenate([first[:, None], right[:, :-1]], axis=1)
    return of[:, :, None] * _falling(candidates)[:, None, :]


def _falling(right: Array) -> Array:
    """The probabilities that each candidate is accepted, [B, M], made non-increasing."""
    chance = right * _of_earlier(1.0 - right)
    index = jnp.arange(chance.shape[1], dtype=jnp.int32)
    upto = (index[None, :] <= index[:, None])[None]
    return jnp.min(jnp.where(upto, chance[:, None, :], jnp.inf), axis=2)


def ranks(worth: Array) -> Array:
    """Ranks [B, ...] int32 from 0 by decreasing worth; ties in order of the index.

    By counting, not sorting.
    """
    flat = worth.reshape(worth.shape[0], -1)
    index = jnp.arange(flat.shape[1], dtype=jnp.int32)
    earlier = index[None, None, :] < index[None, :, None]
    mine, other = flat[:, :, None], flat[:, None, :]
    before = (other > mine) | ((other == mine) & earlier)
    return jnp.sum(before, axis=2, dtype=jnp.int32).reshape(worth.shape)


def sums(worth: Array, rank: Array, limit: int) -> Array:
    """Total worth of the best 0, 1, 2 ... N (`limit`), [B, N+1]."""
    flat, place = (leaf.reshape(leaf.shape[0], 1, -1) for leaf in (worth, rank))
    count = jnp.arange(limit + 1, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(place < count, flat, 0.0), axis=2)


def _of_earlier(values: Array) -> Array:
    """Exclusive cumulative product along N of [B, N], as one operation: a cumprod is a dozen on a CPU."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    earlier = (index[None, :] < index[:, None])[None]
    return jnp.prod(jnp.where(earlier, values[:, None, :], 1.0), axis=2)
