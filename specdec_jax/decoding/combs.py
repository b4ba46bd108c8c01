"""A comb in one target pass: the token before the draft, the chain of drafts, and then the siblings of all drafts.

A row's siblings begin where its own chain ends, so that rows of different shapes share a width. A sibling stands at the
position of the draft it replaces and sees what that draft sees, and itself; a mask says so, and the cache slot of one
that is accepted is copied to where the draft's was.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.types import Array, Draft


class Comb(NamedTuple):
    """What a target pass of W places is given."""

    tokens: Array  # [B, W] int32
    positions: Array  # [B, W] int32
    mask: Array  # [B, W, S] bool, slots that a place may see, of those up to its own


def places(draft: Draft) -> Array:
    """[B] int32, places that a draft takes beside the token before it."""
    return draft.length if draft.beside is None else draft.length + jnp.sum(draft.beside, axis=1, dtype=jnp.int32)


def fitted(draft: Draft, wanted: Array, room: Array) -> Draft:
    """The draft with siblings beside its first N tokens, as many as are wanted [B, N]; of all the first `room` [B].

    A token that was chosen, and not drawn, has none.
    """
    assert draft.siblings is not None
    depth, most = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :], draft.siblings.shape[2]
    wanted = jnp.pad(wanted, ((0, 0), (0, max(depth.shape[1] - wanted.shape[1], 0))))[:, : depth.shape[1]]
    drawn = (depth < draft.length[:, None]) & ~draft.one_hot
    count = jnp.where(drawn, jnp.clip(wanted, 0, most), 0)
    before = jnp.cumsum(count, axis=1) - count
    return draft._replace(beside=jnp.clip(room[:, None] - before, 0, count))


def laid_out(before: Array, draft: Draft, start: Array, width: int, slots: int) -> Comb:
    """The pass of `width` (W) places from slot start [B] on, where the token `before` [B] the draft goes."""
    assert draft.siblings is not None and draft.beside is not None
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    index = place - 1 - draft.length[:, None]  # of the siblings
    ends = jnp.cumsum(draft.beside, axis=1)  # [B, K]
    depth = jnp.sum((ends[:, None, :] <= index[:, :, None]).astype(jnp.int32), axis=2)  # [B, W], of siblings
    is_sibling = (index >= 0) & (depth < ends.shape[1])
    depth = jnp.minimum(depth, ends.shape[1] - 1)
    candidate = index - jnp.take_along_axis(ends - draft.beside, depth, axis=1)
    flat = draft.siblings.reshape(draft.siblings.shape[0], -1)
    sibling = jnp.take_along_axis(
        flat, jnp.maximum(depth * draft.siblings.shape[2] + candidate, 0), axis=1, mode="clip"
    )
    chain = jnp.pad(draft.tokens, ((0, 0), (1, max(width - 1 - draft.tokens.shape[1], 0))))[:, :width]
    chain = jnp.where(place == 0, before[:, None], chain)
    tokens = jnp.where(is_sibling, sibling, chain)
    behind = jnp.where(is_sibling, depth, place)  # a sibling of the draft at depth d sees places 0 to d, and its own
    positions = start[:, None] + jnp.where(is_sibling, depth + 1, place)
    seen = jnp.arange(slots, dtype=jnp.int32)[None, None, :] - start[:, None, None]
    return Comb(tokens, positions, (seen <= behind[:, :, None]) | (seen == place[:, :, None]))


def place_of(draft: Draft, depth: Array, candidate: Array) -> Array:
    """[B] int32, where the sibling `candidate` [B], from 1 on, of the draft at `depth` [B] stands in the pass."""
    assert draft.beside is not None
    ends = jnp.cumsum(draft.beside, axis=1) - draft.beside
    before = jnp.take_along_axis(ends, jnp.minimum(depth, ends.shape[1] - 1)[:, None], axis=1)[:, 0]
    return draft.length + before + candidate


def along_path(tree: Any, accepted: Array, taken: Array, place: Array) -> Any:
    """Leaves [B, W, ...] by place as leaves by position: where a sibling was `taken`, its own after accepted drafts."""

    def one(leaf: Array) -> Array:
        index = jnp.arange(leaf.shape[1], dtype=jnp.int32)[None, :]
        moved = jnp.where(taken[:, None] & (index == accepted[:, None] + 1), place[:, None], index)
        return jnp.take_along_axis(leaf, moved.reshape(*moved.shape, *[1] * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(one, tree)
