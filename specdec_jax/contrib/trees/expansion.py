"""Siblings that are drafted on: fed to the drafter beside the chain's last tokens, so that it says what follows them.

What follows an expanded sibling are its children, candidates drawn without replacement as siblings are. They are
leaves: what follows a child is not drafted (docs/combs.md says what deeper trees would add). The drafter reads an
expanded sibling, and nobody else does before it is verified: the chain does not see it, and no rule is told what the
drafter says after it. So whether it is verified, and its children, is decided as if nothing had been read.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.contrib.trees.seams import Children
from specdec_jax.types import Array


class Expanded(NamedTuple):
    """Siblings that a drafter pass is fed with beside the chain's last tokens; W of them, a row's first ones."""

    token: Array  # [B, W] int32
    depth: Array  # [B, W] int32, drafts before it


def no_children(batch: int, expansions: int, siblings: int, log_q: Array | None) -> Children:
    """None yet of so many expansions (E) of a round; with room for their distributions where drafts have `log_q`."""
    zeros = jnp.zeros((batch, expansions), jnp.int32)
    no_log_q = None if log_q is None else jnp.full((*zeros.shape, log_q.shape[2]), -jnp.inf, log_q.dtype)
    return Children(zeros - 1, jnp.zeros((*zeros.shape, siblings), jnp.int32), no_log_q, zeros)


def to_expand(worth: Array, parent: Array, drafted: Array, count: int) -> Array:
    """The siblings that the next pass is fed with, [B, W] int32 as `Children.parent`; -1: no further one.

    Args:
        worth: [B, N, M] float32, of each sibling; above 0 for those that the policy wants.
        parent: [B, E], the expanded ones so far, of which none is expanded again.
        drafted: [B], drafts of the round so far.
        count: W.
    """
    flat = worth.reshape(worth.shape[0], -1)
    index = jnp.arange(flat.shape[1], dtype=jnp.int32)[None, :]
    drawn = (index // worth.shape[2] < drafted[:, None]) & (flat > 0)
    fresh = ~jnp.any(parent[:, :, None] == index[:, None, :], axis=1)
    value, chosen = jnp.where(drawn & fresh, flat, 0.0), []
    for _ in range(count):
        best = jnp.argmax(value, axis=1).astype(jnp.int32)
        chosen.append(jnp.where(jnp.max(value, axis=1) > 0, best, -1))
        value = jnp.where(index == best[:, None], 0.0, value)
    return jnp.stack(chosen, axis=1)


def expanded_tokens(chosen: Array, siblings: Array) -> Expanded:
    """The chosen [B, W] of siblings [B, K, M] drawn so far; meaningless where none is chosen."""
    flat, index = siblings.reshape(siblings.shape[0], -1), jnp.maximum(chosen, 0)
    return Expanded(jnp.take_along_axis(flat, index, axis=1), index // siblings.shape[2])


def with_children(children: Children, at: Array, chosen: Array, tokens: Array, log_q: Array | None) -> Children:
    """With expansions at [] and after it: chosen [B, W], tokens [B, W, M], log_q [B, W, V]."""

    def put(buffer: Array, value: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(buffer, value.astype(buffer.dtype), at, axis=1)

    all_log_q = children.log_q
    if all_log_q is not None and log_q is not None:
        all_log_q = put(all_log_q, log_q)
    return Children(put(children.parent, chosen), put(children.tokens, tokens), all_log_q, children.count)


def child_of(children: Children, sibling: Array) -> Array:
    """Which expansion is of that sibling [B] int32, as `parent` counts, [B] int32; -1: it was not expanded."""
    is_parent = (children.parent == sibling[:, None]) & (sibling >= 0)[:, None]
    return jnp.where(jnp.any(is_parent, axis=1), jnp.argmax(is_parent, axis=1).astype(jnp.int32), -1)


def of_verified(children: Children, sibling_counts: Array, siblings: int) -> Array:
    """[B, E] bool, expansions of siblings that are verified: the first `sibling_counts` [B, K] of each draft's M."""
    depth, index = jnp.maximum(children.parent, 0) // siblings, children.parent % siblings
    return (children.parent >= 0) & (index < jnp.take_along_axis(sibling_counts, depth, axis=1, mode="clip"))
