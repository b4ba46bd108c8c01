"""Expanded siblings: fed to the drafter together with the chain's last tokens, to draft tokens after them.

The tokens after an expanded sibling are its children, candidates drawn without replacement like siblings. They are
leaves: nothing is drafted after a child (for deeper trees see docs/combs.md). Before verification only the drafter
reads an expanded sibling: the chain does not attend to it, and policies do not get the distribution after it.
Therefore the decision whether to verify it and its children does not depend on that distribution.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.contrib.trees.seams import Children
from specdec_jax.types import Array


class Expanded(NamedTuple):
    """The siblings that a drafter pass expands, at most W per row."""

    token: Array  # [B, W] int32
    depth: Array  # [B, W] int32, number of drafts before it


def no_children(batch: int, expansions: int, siblings: int, log_q: Array | None) -> Children:
    """Empty Children for `expansions` (E) per round, with a buffer of distributions if drafts have `log_q`."""
    zeros = jnp.zeros((batch, expansions), jnp.int32)
    no_log_q = None if log_q is None else jnp.full((*zeros.shape, log_q.shape[2]), -jnp.inf, log_q.dtype)
    return Children(zeros - 1, jnp.zeros((*zeros.shape, siblings), jnp.int32), no_log_q, zeros)


def to_expand(worth: Array, parent: Array, drafted: Array, count: int) -> Array:
    """The siblings to expand in the next pass, [B, W] int32 as `Children.parent`; -1: none.

    Args:
        worth: [B, N, M] float32, value of each sibling; above 0 if the policy wants to expand it.
        parent: [B, E], the siblings expanded so far, which are not expanded again.
        drafted: [B], number of drafts of the round so far.
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
    """The siblings at `chosen` [B, W] among [B, K, M]; meaningless where `chosen` is -1."""
    flat, index = siblings.reshape(siblings.shape[0], -1), jnp.maximum(chosen, 0)
    return Expanded(jnp.take_along_axis(flat, index, axis=1), index // siblings.shape[2])


def with_children(children: Children, at: Array, chosen: Array, tokens: Array, log_q: Array | None) -> Children:
    """The children with expansions from index `at` [] written: chosen [B, W], tokens [B, W, M], log_q [B, W, V]."""

    def put(buffer: Array, value: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(buffer, value.astype(buffer.dtype), at, axis=1)

    all_log_q = children.log_q
    if all_log_q is not None and log_q is not None:
        all_log_q = put(all_log_q, log_q)
    return Children(put(children.parent, chosen), put(children.tokens, tokens), all_log_q, children.count)


def child_of(children: Children, sibling: Array) -> Array:
    """Index [B] int32 of the expansion of a sibling [B] (numbered as in `parent`); -1: not expanded."""
    is_parent = (children.parent == sibling[:, None]) & (sibling >= 0)[:, None]
    return jnp.where(jnp.any(is_parent, axis=1), jnp.argmax(is_parent, axis=1).astype(jnp.int32), -1)


def of_verified(children: Children, sibling_counts: Array, siblings: int) -> Array:
    """[B, E] bool, whether an expanded sibling is verified: among the first `sibling_counts` [B, K] of its draft."""
    depth, index = jnp.maximum(children.parent, 0) // siblings, children.parent % siblings
    return (children.parent >= 0) & (index < jnp.take_along_axis(sibling_counts, depth, axis=1, mode="clip"))
