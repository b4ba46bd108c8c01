"""Layout of a comb in one target pass: the token before the draft, the chain of drafts, their siblings, and children.

A row's siblings begin where its chain ends, so that rows of different shapes share a width. A sibling has the position
of the draft it replaces and attends to the same tokens and itself; a child follows its sibling. This is expressed by a
mask, and the cache slot of an accepted sibling is copied to that of the draft.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.contrib.trees.expansion import of_verified
from specdec_jax.contrib.trees.seams import Extras, TreeDraft
from specdec_jax.types import Array


class Comb(NamedTuple):
    """The inputs of a target pass of W places."""

    tokens: Array  # [B, W] int32
    positions: Array  # [B, W] int32
    mask: Array  # [B, W, S] bool, slots that a place attends to, up to its own


class Path(NamedTuple):
    """The accepted tokens after the accepted drafts: a sibling, and its child; at most N."""

    length: Array  # [B] int32, number of accepted tokens
    tokens: Array  # [B, N] int32
    place: Array  # [B, N] int32, place in the pass


def places(draft: TreeDraft) -> Array:
    """[B] int32, number of places of a draft, without the token before it."""
    siblings = 0 if draft.sibling_counts is None else jnp.sum(draft.sibling_counts, axis=1, dtype=jnp.int32)
    children = 0 if draft.children is None else jnp.sum(draft.children.count, axis=1, dtype=jnp.int32)
    return draft.length + siblings + children


def truncated(draft: TreeDraft, wanted: Extras, free: Array) -> TreeDraft:
    """The draft with the wanted numbers of siblings of its first N tokens and of children, at most `free` in total.

    Chosen tokens have no siblings, and siblings that are not verified no children.
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
    """Counts [B, N] truncated to a total of `free` [B]."""
    return jnp.clip(free[:, None] - (jnp.cumsum(count, axis=1) - count), 0, count)


class _Places(NamedTuple):
    """The owners of a pass's places after the chain; [B, W]."""

    inside: Array  # bool, whether it is such a place
    owner: Array  # int32, index of the draft, or of the expansion
    candidate: Array  # int32, from 0


def _places_after(count: Array, index: Array) -> _Places:
    """The places at `index` [B, W], with `count` [B, N] for each owner; not `inside` below 0 and beyond the last."""
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
    """The inputs of a pass of `width` (W) places from slot start [B], that of the token `before` [B] the draft."""
    assert draft.siblings is not None and draft.sibling_counts is not None
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    index = place - 1 - draft.length[:, None]  # index among the siblings, then the children
    sibling = _places_after(draft.sibling_counts, index)
    chain = jnp.pad(draft.tokens, ((0, 0), (1, max(width - 1 - draft.tokens.shape[1], 0))))[:, :width]
    tokens = jnp.where(place == 0, before[:, None], chain)
    tokens = jnp.where(sibling.inside, _tokens_at(draft.siblings, sibling), tokens)
    behind = jnp.where(sibling.inside, sibling.owner, place)  # a sibling at depth d attends to places 0 to d and itself
    position, above = jnp.where(sibling.inside, sibling.owner + 1, place), jnp.broadcast_to(place, tokens.shape)
    if draft.children is not None:  # a child attends to its sibling, too
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
    """The place in the pass of the sibling `candidate` (from 1) of the draft at `depth`; [B, N] int32 each."""
    assert draft.sibling_counts is not None
    before = jnp.cumsum(draft.sibling_counts, axis=1) - draft.sibling_counts
    before = jnp.take_along_axis(before, jnp.clip(depth, 0, before.shape[1] - 1), axis=1)
    return draft.length[:, None] + before + candidate


def place_of_child(draft: TreeDraft, expansion: Array, candidate: Array) -> Array:
    """The place [B] int32 in the pass of the child `candidate` [B] (from 1) of the `expansion` [B]."""
    assert draft.sibling_counts is not None and draft.children is not None
    count = draft.children.count
    before = jnp.cumsum(count, axis=1) - count
    before = jnp.take_along_axis(before, jnp.maximum(expansion, 0)[:, None], axis=1)[:, 0]
    return draft.length + jnp.sum(draft.sibling_counts, axis=1, dtype=jnp.int32) + before + candidate


def gather_path(tree: Any, accepted: Array, path: Path) -> Any:
    """Reorders leaves [B, W, ...] from places to positions: the accepted drafts, then the path."""

    def reordered(leaf: Array) -> Array:
        index = jnp.arange(leaf.shape[1], dtype=jnp.int32)[None, :]
        moved = index
        for step in range(path.place.shape[1]):
            here = (index == accepted[:, None] + 1 + step) & (step < path.length)[:, None]
            moved = jnp.where(here, path.place[:, step : step + 1], moved)
        moved = jnp.broadcast_to(moved, (leaf.shape[0], leaf.shape[1]))
        return jnp.take_along_axis(leaf, moved.reshape(*moved.shape, *[1] * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(reordered, tree)
