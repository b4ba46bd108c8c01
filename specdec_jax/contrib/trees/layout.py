"""A comb in one target pass: the token before the draft, the chain of drafts, their siblings, and children of these.

A row's siblings begin where its own chain ends, so that rows of different shapes share a width. A sibling stands at the
position of the draft it replaces and sees what that draft sees, and itself; a child stands after its sibling. A mask
says so, and the cache slot of one that is accepted is copied to where the draft's was.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.contrib.trees.expansion import of_verified
from specdec_jax.contrib.trees.seams import Extras, TreeDraft
from specdec_jax.types import Array


class Comb(NamedTuple):
    """What a target pass of W places is given."""

    tokens: Array  # [B, W] int32
    positions: Array  # [B, W] int32
    mask: Array  # [B, W, S] bool, slots that a place may see, of those up to its own


class Path(NamedTuple):
    """How a round goes on after its accepted drafts: a sibling, and its child; N of them at most."""

    length: Array  # [B] int32, how many were accepted
    tokens: Array  # [B, N] int32
    place: Array  # [B, N] int32, of the pass


def places(draft: TreeDraft) -> Array:
    """[B] int32, places that a draft takes beside the token before it."""
    siblings = 0 if draft.sibling_counts is None else jnp.sum(draft.sibling_counts, axis=1, dtype=jnp.int32)
    children = 0 if draft.children is None else jnp.sum(draft.children.count, axis=1, dtype=jnp.int32)
    return draft.length + siblings + children


def truncated(draft: TreeDraft, wanted: Extras, free: Array) -> TreeDraft:
    """The draft with siblings beside its first N tokens, as many as are wanted, and children, `free` at most.

    A token that was chosen, and not drawn, has no siblings, and a sibling that is not verified no children.
    """
    assert draft.siblings is not None
    depth, siblings = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :], draft.siblings.shape[2]
    count = jnp.pad(wanted.siblings, ((0, 0), (0, max(depth.shape[1] - wanted.siblings.shape[1], 0))))
    drawn = (depth < draft.length[:, None]) & ~draft.one_hot
    sibling_counts = _first(jnp.where(drawn, jnp.clip(count[:, : depth.shape[1]], 0, siblings), 0), free)
    draft, children = draft._replace(sibling_counts=sibling_counts), draft.children
    if children is None:
        return draft
    assert wanted.children is not None
    count = jnp.where(of_verified(children, sibling_counts, siblings), jnp.clip(wanted.children, 0, siblings), 0)
    return draft._replace(children=children._replace(count=_first(count, free - jnp.sum(sibling_counts, axis=1))))


def _first(count: Array, free: Array) -> Array:
    """Counts [B, N] of which the first `free` [B] are kept."""
    return jnp.clip(free[:, None] - (jnp.cumsum(count, axis=1) - count), 0, count)


class _Places(NamedTuple):
    """Where the places of a pass behind the chain belong; [B, W]."""

    inside: Array  # bool, such a place
    owner: Array  # int32, of the draft that it is beside, or of the expansion
    candidate: Array  # int32, from 0 on


def _places_after(count: Array, index: Array) -> _Places:
    """Places by their index [B, W], `count` [B, N] for each owner; below 0 and beyond the last there are none."""
    ends = jnp.cumsum(count, axis=1)
    owner = jnp.sum((ends[:, None, :] <= index[:, :, None]).astype(jnp.int32), axis=2)
    inside = (index >= 0) & (owner < ends.shape[1])
    owner = jnp.minimum(owner, ends.shape[1] - 1)
    return _Places(inside, owner, index - jnp.take_along_axis(ends - count, owner, axis=1))


def _tokens_at(tokens: Array, places: _Places) -> Array:
    """The tokens [B, W] of places, from tokens [B, N, M]."""
    index = jnp.maximum(places.owner * tokens.shape[2] + places.candidate, 0)
    return jnp.take_along_axis(tokens.reshape(tokens.shape[0], -1), index, axis=1, mode="clip")


def tree_inputs(before: Array, draft: TreeDraft, start: Array, width: int, slots: int) -> Comb:
    """The pass of `width` (W) places from slot start [B] on, where the token `before` [B] the draft goes."""
    assert draft.siblings is not None and draft.sibling_counts is not None
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    index = place - 1 - draft.length[:, None]  # of the siblings, and then of the children
    sibling = _places_after(draft.sibling_counts, index)
    chain = jnp.pad(draft.tokens, ((0, 0), (1, max(width - 1 - draft.tokens.shape[1], 0))))[:, :width]
    tokens = jnp.where(place == 0, before[:, None], chain)
    tokens = jnp.where(sibling.inside, _tokens_at(draft.siblings, sibling), tokens)
    behind = jnp.where(sibling.inside, sibling.owner, place)  # a sibling at depth d sees places 0 to d, and its own
    position, above = jnp.where(sibling.inside, sibling.owner + 1, place), jnp.broadcast_to(place, tokens.shape)
    if draft.children is not None:  # a child sees its sibling too
        child = _places_after(draft.children.count, index - jnp.sum(draft.sibling_counts, axis=1, keepdims=True))
        parent = jnp.take_along_axis(draft.children.parent, child.owner, axis=1)
        depth, candidate = parent // draft.siblings.shape[2], parent % draft.siblings.shape[2]
        tokens = jnp.where(child.inside, _tokens_at(draft.children.tokens, child), tokens)
        behind, position = jnp.where(child.inside, depth, behind), jnp.where(child.inside, depth + 2, position)
        above = jnp.where(child.inside, place_of(draft, depth, candidate + 1), above)
    seen = jnp.arange(slots, dtype=jnp.int32)[None, None, :] - start[:, None, None]
    ancestors = (seen == place[:, :, None]) | (seen == above[:, :, None])
    return Comb(tokens, start[:, None] + position, (seen <= behind[:, :, None]) | ancestors)


def place_of(draft: TreeDraft, depth: Array, candidate: Array) -> Array:
    """Where the sibling `candidate`, from 1 on, of the draft at `depth` stands in the pass; [B, N] int32 each."""
    assert draft.sibling_counts is not None
    before = jnp.cumsum(draft.sibling_counts, axis=1) - draft.sibling_counts
    before = jnp.take_along_axis(before, jnp.clip(depth, 0, before.shape[1] - 1), axis=1)
    return draft.length[:, None] + before + candidate


def place_of_child(draft: TreeDraft, expansion: Array, candidate: Array) -> Array:
    """Where the child `candidate` [B], from 1 on, of the `expansion` [B] stands in the pass, [B] int32."""
    assert draft.sibling_counts is not None and draft.children is not None
    count = draft.children.count
    before = jnp.cumsum(count, axis=1) - count
    before = jnp.take_along_axis(before, jnp.maximum(expansion, 0)[:, None], axis=1)[:, 0]
    return draft.length + jnp.sum(draft.sibling_counts, axis=1, dtype=jnp.int32) + before + candidate


def gather_path(tree: Any, accepted: Array, path: Path) -> Any:
    """Leaves [B, W, ...] by place as leaves by position: after the accepted drafts those of the path."""

    def reordered(leaf: Array) -> Array:
        index = jnp.arange(leaf.shape[1], dtype=jnp.int32)[None, :]
        moved = index
        for step in range(path.place.shape[1]):
            here = (index == accepted[:, None] + 1 + step) & (step < path.length)[:, None]
            moved = jnp.where(here, path.place[:, step : step + 1], moved)
        moved = jnp.broadcast_to(moved, (leaf.shape[0], leaf.shape[1]))
        return jnp.take_along_axis(leaf, moved.reshape(*moved.shape, *[1] * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(reordered, tree)
