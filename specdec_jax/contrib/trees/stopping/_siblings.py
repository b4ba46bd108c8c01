"""What siblings of drafts are worth, by the chances that the drafts are accepted.

A draft at depth d is the first that is rejected with the chance S_d (1 - a_d). Its i-th sibling is right then, those
before it being wrong, with the chance h_i (measured: docs/combs.md). A sibling that is right brings one token, and its
children, what follows it, are drafts and siblings again.
"""

import jax.numpy as jnp

from specdec_jax.types import Array


def marginals(chance: Array, length: Array, right: Array) -> Array:
    """Worth in tokens of every sibling of the first `length` [B] drafts, [B, P, M]; it never rises along M.

    Args:
        chance: [B, P], a_d, that a draft is accepted if those before it are.
        right: [B, M], h of the second candidate, the third ...
    """
    depth = jnp.arange(chance.shape[1], dtype=jnp.int32)[None, :]
    survives = _of_earlier(chance)
    missed = jnp.where(depth < length[:, None], survives * (1.0 - chance), 0.0)
    return missed[:, :, None] * _falling(right)[:, None, :]


def worths_of_children(worth: Array, parent: Array, first: Array, right: Array) -> Array:
    """Worth in tokens of every child of expanded siblings, [B, E, M]; it never rises along M.

    Args:
        worth: [B, P, M], of siblings; parent: [B, E], as `Children` has it.
        first: [B], the chance that a first child is right if its sibling is; right: [B, M], as of siblings.
    """
    flat = worth.reshape(worth.shape[0], -1)
    of = jnp.where(parent >= 0, jnp.take_along_axis(flat, jnp.maximum(parent, 0), axis=1, mode="clip"), 0.0)
    candidates = jnp.concatenate([first[:, None], right[:, :-1]], axis=1)
    return of[:, :, None] * _falling(candidates)[:, None, :]


def _falling(right: Array) -> Array:
    """The chances that each candidate is the right one, [B, M], none above one before it."""
    chance = right * _of_earlier(1.0 - right)
    index = jnp.arange(chance.shape[1], dtype=jnp.int32)
    upto = (index[None, :] <= index[:, None])[None]
    return jnp.min(jnp.where(upto, chance[:, None, :], jnp.inf), axis=2)


def ranks(worth: Array) -> Array:
    """Where each of [B, ...] stands by falling worth, from 0 on, int32; of equals the first is first.

    Counted, not sorted: places stay.
    """
    flat = worth.reshape(worth.shape[0], -1)
    index = jnp.arange(flat.shape[1], dtype=jnp.int32)
    earlier = index[None, None, :] < index[None, :, None]
    mine, other = flat[:, :, None], flat[:, None, :]
    before = (other > mine) | ((other == mine) & earlier)
    return jnp.sum(before, axis=2, dtype=jnp.int32).reshape(worth.shape)


def sums(worth: Array, rank: Array, limit: int) -> Array:
    """What the best 0, 1, 2 ... N (`limit`) bring together, [B, N+1]."""
    flat, place = (leaf.reshape(leaf.shape[0], 1, -1) for leaf in (worth, rank))
    count = jnp.arange(limit + 1, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(place < count, flat, 0.0), axis=2)


def _of_earlier(values: Array) -> Array:
    """Exclusive cumulative product along N of [B, N], as one operation: a cumprod is a dozen on a CPU."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    earlier = (index[None, :] < index[:, None])[None]
    return jnp.prod(jnp.where(earlier, values[:, None, :], 1.0), axis=2)


def check_expanded(name: str, expanded: int, siblings: int) -> None:
    """Raises ValueError for expansions below 0, or of siblings that are not there."""
    if expanded < 0 or (expanded and not siblings):
        raise ValueError(f"{name} needs expanded of 0 or more, and siblings to expand, got {expanded} of {siblings}")
