"""Siblings in an enumeration: all orders in which they can be drawn, and all that may be accepted.

Drawing is reimplemented here, like the draft loop in enumeration.py; their number is decided by the policy, and their
acceptance by the verifier or `siblings.py`, as in the decoder. The same applies to the children of expanded
siblings.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.contrib.trees.expansion import child_of, to_expand
from specdec_jax.contrib.trees.layout import truncated
from specdec_jax.contrib.trees.seams import Children, SiblingOutcomes, TreeDraft, TreePolicy
from specdec_jax.contrib.trees.siblings import child_outcomes, outcomes
from specdec_jax.lossless.batched import in_batches, joined
from specdec_jax.lossless.enumeration import scaled
from specdec_jax.types import Distribution, RoundContext, Verifier

ROOM = 64  # number of places of the widest verification


class Leaf(NamedTuple):
    """Outcomes, [N] each; with (branch, accepted, token) they determine how a round ends."""

    sibling: np.ndarray  # int32, sibling accepted after the drafts; -1: none
    child: np.ndarray  # int32, child accepted after the sibling; -1: none
    chance: np.ndarray  # float64, probability of node, draft, siblings and outcome


class _Rows(NamedTuple):
    """Drafts whose siblings are being drawn; [N, ...]."""

    branch: np.ndarray
    chance: np.ndarray  # float64, probability of the siblings
    siblings: np.ndarray  # [N, K+E, M] int32, siblings of each draft, and children of each expanded sibling
    count: np.ndarray  # [N], number of candidates to draw
    left: np.ndarray  # [N, V], weights of the remaining candidates


@functools.lru_cache(maxsize=64)
def beside_of(policy: TreePolicy, batch: int) -> Callable[..., Any]:
    """(context, state, draft) -> the draft with the siblings that the policy, a bare one, wants."""

    def wanted(context: RoundContext, state: Any, draft: TreeDraft) -> TreeDraft:
        assert policy.beside is not None
        free, parent = ROOM - draft.length, None if draft.children is None else draft.children.parent
        return truncated(draft, policy.beside(state, draft.length, free, context, parent), free)

    return in_batches(wanted, batch, "the policy's beside", policy.joins_rows)


@functools.lru_cache(maxsize=64)
def to_expand_of(policy: TreePolicy, batch: int) -> Callable[..., Any]:
    """(context, state, drafted, parent) -> the siblings to expand in the next pass, as in the draft loop."""

    def chosen(context: RoundContext, state: Any, drafted: Any, parent: Any) -> Any:
        assert policy.expand is not None
        return to_expand(policy.expand(state, drafted, context), parent, drafted, policy.expanded)

    return in_batches(chosen, batch, "the policy's expand", policy.joins_rows)


def every_order(
    draft: TreeDraft, is_greedy: bool, weights_at: Callable[[np.ndarray, Any, Any], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All ways of drawing siblings and children: (branch [N], tokens [N, K+E, M] int32, chance [N]).

    Args:
        weights_at: (branch [N], depth, token [N] in place of the last, or None) -> weights [N, V] of candidates, which
            are ranked by them at temperature 0.
    """
    assert draft.siblings is not None
    tokens, length, sibling_counts = (np.asarray(leaf) for leaf in (draft.tokens, draft.length, draft.sibling_counts))
    branch, (depths, siblings) = np.arange(len(tokens)), draft.siblings.shape[1:]
    parent = np.zeros((len(tokens), 0), np.int32) if draft.children is None else np.asarray(draft.children.parent)
    drawn = np.zeros((len(tokens), depths + parent.shape[1], siblings), np.int32)
    rows = _Rows(branch, np.ones(len(tokens)), drawn, branch, np.zeros((0, 0)))
    for depth in range(depths):
        count = np.where(depth < length, sibling_counts[:, depth], 0)[rows.branch]
        left = weights_at(rows.branch, depth, None)
        left[np.arange(len(left)), tokens[rows.branch, depth]] = 0.0
        rows = _all_drawn(rows._replace(count=count, left=left), is_greedy, depth)
    for expansion in range(parent.shape[1]):
        assert draft.children is not None
        before, index = np.divmod(np.maximum(parent[rows.branch, expansion], 0), siblings)
        left = weights_at(rows.branch, before + 1, rows.siblings[np.arange(len(before)), before, index])
        count = np.asarray(draft.children.count)[rows.branch, expansion]
        rows = _all_drawn(rows._replace(count=count, left=left), is_greedy, depths + expansion)
    return rows.branch, rows.siblings, rows.chance


def _all_drawn(rows: _Rows, is_greedy: bool, depth: int) -> _Rows:
    for index in range(rows.siblings.shape[2]):
        rows = _drawn_next(rows, is_greedy, depth, index)
    return rows


def _drawn_next(rows: _Rows, is_greedy: bool, depth: int, index: int) -> _Rows:
    """Draws sibling `index`: one row per possible token; rows that draw none are unchanged."""
    total = rows.left.sum(axis=1, keepdims=True)
    draws = (index < rows.count) & (total[:, 0] > 0)
    chance = rows.left / np.where(total > 0, total, 1.0)
    if is_greedy:
        chance = np.eye(chance.shape[1])[np.argmax(rows.left, axis=1)]
    chance[~draws] = np.eye(chance.shape[1])[0]  # the one branch of a row that draws nothing
    row, token = np.nonzero(chance)
    rows = _Rows(*(column[row] for column in rows))
    rows.siblings[:, depth, index] = token
    rows.left[np.arange(len(row)), token] = np.where(draws[row], 0.0, rows.left[np.arange(len(row)), token])
    return rows._replace(chance=rows.chance * chance[row, token])


@functools.lru_cache(maxsize=64)
def decided(verifier: Verifier, batch: int, longest: int) -> Callable[..., Any]:
    """(context, state, draft, distributions) -> log_prob_accepted [M, K+1], `SiblingOutcomes` [M, K+1, ...], state."""

    def decide(context: RoundContext, state: Any, draft: TreeDraft, distributions: Distribution) -> Any:
        log_prob_accepted, next_distribution, state = verifier.verify(state, draft, distributions, context)  # type: ignore[arg-type]
        ends = []
        rows = len(context.length)
        for accepted in (jnp.full((rows,), k, jnp.int32) for k in range(longest + 1)):
            ends.append(outcomes(verifier, next_distribution, draft, distributions, accepted, context))
        chances, rests = (jnp.stack(leaves, axis=1) for leaves in ([o.chance for o in ends], [o.rest for o in ends]))
        return log_prob_accepted, chances, rests, state

    def as_used(answers: Any) -> Any:
        log_prob_accepted, chances, rests, state = answers
        reached = np.exp(log_prob_accepted)
        return log_prob_accepted, scaled(chances, reached), scaled(rests, reached * chances[..., 0]), state

    return in_batches(decide, batch, "the verifier's outcomes", as_used=as_used)


@functools.lru_cache(maxsize=64)
def children_decided(batch: int) -> Callable[..., Any]:
    """(context, following [N, V], children, sibling [N] numbered as `parent`) -> `SiblingOutcomes` [N, ...]."""

    def decide(context: RoundContext, following: Any, children: Children, sibling: Any) -> SiblingOutcomes:
        return child_outcomes(following, children, child_of(children, sibling), context.warp.temperature > 0)

    return in_batches(decide, batch, "the decision about children")


def leaves(
    reached: np.ndarray,
    several: np.ndarray,
    rest: np.ndarray,
    siblings: np.ndarray,
    after: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], np.ndarray],
    decided_children: Callable[[np.ndarray, np.ndarray, int, np.ndarray], SiblingOutcomes] | None,
) -> tuple[tuple[np.ndarray, ...], Leaf]:
    """All outcomes of M branches: (branch, accepted, token), and the accepted siblings and children.

    Args:
        reached: [M, K+1], probability of a branch and a number of accepted drafts.
        several: [M, K+1, S+1], then that of accepting no sibling, the first, the second ...
        rest: [M, K+1, V], the distribution of the next token if none is accepted.
        siblings: [M, K, S].
        after: (branch, accepted, sibling, child or None) -> [N, V], the target's distribution after all of them.
        decided_children: (branch, accepted, sibling's index, following [N, V]) -> its outcomes; None: no children.
    """
    branch, accepted = np.nonzero(reached > 0)
    at = np.minimum(accepted, siblings.shape[1] - 1)
    parts = []

    def ends(sibling: np.ndarray, child: np.ndarray, chance: np.ndarray, following: np.ndarray) -> None:
        each = chance[:, None] * following
        row, token = np.nonzero(each)
        parts.append((branch[row], accepted[row], token, sibling[row], child[row], each[row, token]))

    none = np.full(len(branch), -1, np.int32)
    for candidate in range(several.shape[2]):
        chance = (reached * several[:, :, candidate])[branch, accepted]
        if candidate == 0:
            ends(none, none, chance, rest[branch, accepted])
            continue
        sibling = siblings[branch, at, candidate - 1]
        following = after(branch, accepted, sibling, None)
        if decided_children is None:
            ends(sibling, none, chance, following)
            continue
        children = decided_children(branch, accepted, candidate - 1, following)
        ends(sibling, none, chance * children.chance[:, 0], np.asarray(children.rest))
        for index in range(children.tokens.shape[1]):
            child = np.asarray(children.tokens[:, index])
            ends(sibling, child, chance * children.chance[:, 1 + index], after(branch, accepted, sibling, child))
    branch, accepted, token, sibling, child, chance = joined([tuple(part) for part in parts])
    return (branch, accepted, token), Leaf(sibling, child, chance)
