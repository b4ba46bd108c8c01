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


def of_most_worth(worth: Array) -> tuple[Array, Array]:
    """The P siblings of most worth, best first: (worth [B, P], whose they are [B, P] int32)."""
    best, where = lax.top_k(worth.reshape(worth.shape[0], -1), worth.shape[1])
    return best, where // worth.shape[2]


def sums(best: Array) -> Array:
    """What the first 0, 1, 2 ... bring together, [B, P+1]."""
    return jnp.pad(jnp.cumsum(best, axis=1), ((0, 0), (1, 0)))


def _shifted(values: Array, first: float) -> Array:
    """With another first entry along the last axis, and without the last one."""
    ahead = [(0, 0)] * (values.ndim - 1) + [(1, 0)]
    return jnp.pad(values[..., :-1], ahead, constant_values=first)
