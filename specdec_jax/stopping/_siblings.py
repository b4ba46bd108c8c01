"""What siblings of drafts are worth, by the chances that the drafts are accepted.

A draft at depth d is the first that is rejected with the chance S_d (1 - a_d). Its i-th sibling is right then, those
before it being wrong, with the chance h_i (measured: docs/combs.md). A sibling that is right brings one token.
"""

import jax.numpy as jnp
from jax import lax

from specdec_jax.types import Array


def worths(chance: Array, length: Array, right: Array) -> Array:
    """Of every sibling of the first `length` [B] drafts its worth in tokens, [B, P, M]; it never rises along M.

    Args:
        chance: [B, P], a_d, that a draft is accepted if those before it are.
        right: [B, M], h of the second candidate, the third ...
    """
    depth = jnp.arange(chance.shape[1], dtype=jnp.int32)[None, :]
    survives = jnp.cumprod(_shifted(chance, 1.0), axis=1)
    missed = jnp.where(depth < length[:, None], survives * (1.0 - chance), 0.0)
    falling = lax.cummin(right * jnp.cumprod(_shifted(1.0 - right, 1.0), axis=1), axis=1)
    return missed[:, :, None] * falling[:, None, :]


def ranks(worth: Array) -> Array:
    """Where each stands by falling worth, from 0 on, [B, P, M] int32; of equals the first is first.

    Counted, not sorted: whose they are is not lost.
    """
    flat = worth.reshape(worth.shape[0], -1)
    index = jnp.arange(flat.shape[1], dtype=jnp.int32)
    earlier = index[None, None, :] < index[None, :, None]
    mine, other = flat[:, :, None], flat[:, None, :]
    before = (other > mine) | ((other == mine) & earlier)
    return jnp.sum(before, axis=2, dtype=jnp.int32).reshape(worth.shape)


def sums(worth: Array, rank: Array) -> Array:
    """What the best 0, 1, 2 ... P bring together, [B, P+1]."""
    flat, place = (leaf.reshape(leaf.shape[0], 1, -1) for leaf in (worth, rank))
    count = jnp.arange(worth.shape[1] + 1, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(place < count, flat, 0.0), axis=2)


def _shifted(values: Array, first: float) -> Array:
    """With another first entry along the last axis, and without the last one."""
    ahead = [(0, 0)] * (values.ndim - 1) + [(1, 0)]
    return jnp.pad(values[..., :-1], ahead, constant_values=first)
