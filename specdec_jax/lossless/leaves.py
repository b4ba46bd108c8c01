"""What siblings add to an enumeration: every order in which they can be drawn, and every one that may be accepted.

Drawing has a twin here, as the draft loop has in enumeration.py; how many are drawn is asked of the policy, and what
becomes of them of `decoding.siblings`, as the decoder asks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.decoding.combs import fitted
from specdec_jax.decoding.siblings import sibling_outcomes
from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import in_batches, joined, take
from specdec_jax.types import Draft, RoundContext, StoppingPolicy

ROOM = 64  # places of the widest verification


class Leaf(NamedTuple):
    """Outcomes one by one, [N] each; with (branch, accepted, token) they say how a round ends."""

    sibling: np.ndarray  # int32, accepted after the drafts; -1: none
    chance: np.ndarray  # float64, of the node, the draft, the siblings and the outcome


class _Rows(NamedTuple):
    """Rounds whose siblings are being drawn, where the draft is rejected; [N, ...]."""

    branch: np.ndarray
    accepted: np.ndarray
    chance: np.ndarray  # float64
    siblings: np.ndarray  # [N, M] int32
    left: np.ndarray  # [N, V], weights of what may still be drawn


def beside_of(policy: StoppingPolicy, batch: int) -> Callable[..., Any]:
    """(context, state, draft) -> the draft with as many siblings beside it as the policy wants."""
    return _beside(policy.bare, batch)


@functools.lru_cache(maxsize=64)
def _beside(policy: StoppingPolicy, batch: int) -> Callable[..., Any]:
    def wanted(context: RoundContext, state: Any, draft: Draft) -> Draft:
        assert policy.beside is not None
        room = ROOM - draft.length
        return fitted(draft, policy.beside(state, draft.length, room, context), room)

    return in_batches(wanted, batch)


@functools.lru_cache(maxsize=8)
def _decided(batch: int) -> Callable[..., Any]:
    """(context, weights of the next token, draft, accepted) -> (chances of siblings, the rest)."""

    def decide(context: RoundContext, following: Any, draft: Draft, accepted: Any) -> Any:
        found = sibling_outcomes(following, draft, accepted, context.warp.temperature > 0)
        return found.chance, found.rest

    return in_batches(decide, batch)


def leaves(
    context: RoundContext,
    batch: int,
    draft: Draft,
    shares: tuple[np.ndarray, np.ndarray, np.ndarray],
    own: Callable[[np.ndarray, np.ndarray], np.ndarray],
    target: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    drawn: Callable[[np.ndarray], np.ndarray],
) -> tuple[tuple[np.ndarray, ...], Leaf]:
    """Every outcome of M branches: (branch, accepted, token), and which sibling was accepted between them.

    Args:
        context: of the branches, [M, ...].
        draft: with siblings beside, of all branches.
        shares: the chances of the branches [M], of every number of accepted drafts [M, K+1], and the weights of the
            token after so many [M, K+1, V].
        own: (branch, accepted) -> [N, V], what candidates are drawn from, at temperature 0 what they are ranked by.
        target: (branch, accepted, sibling) -> [N, V], the target's distribution after the sibling.
        drawn: weights [..., V] to the distribution that is drawn.
    """
    chance, lengths, weights = shares
    branch, accepted = np.nonzero(np.broadcast_to(lengths > 0, lengths.shape))
    most = draft.siblings.shape[2]  # type: ignore[union-attr]
    reached = chance[branch] * lengths[branch, accepted]
    rows = _Rows(branch, accepted, reached, np.zeros((len(branch), most), np.int32), own(branch, accepted))
    at = np.minimum(accepted, draft.tokens.shape[1] - 1)
    count = np.where(accepted < np.asarray(draft.length)[branch], np.asarray(draft.beside)[branch, at], 0)
    rows.left[np.arange(len(branch)), np.asarray(draft.tokens)[branch, at]] = 0.0
    greedy = np.asarray(context.warp.temperature)[branch] <= 0
    for index in range(most):
        rows, count, greedy = _drawn_next(rows, count, greedy, index)
    siblings = np.zeros((len(rows.branch), *draft.siblings.shape[1:]), np.int32)  # type: ignore[union-attr]
    at = np.minimum(rows.accepted, siblings.shape[1] - 1)
    siblings[np.arange(len(at)), at] = rows.siblings
    its = take(draft, rows.branch)._replace(siblings=host(siblings))
    following = weights[rows.branch, rows.accepted]
    several, rest = _decided(batch)(take(context, rows.branch), following, its, host(rows.accepted.astype(np.int32)))
    several = drawn(several)
    parts = []
    for candidate in range(most + 1):
        sibling = np.full(len(rows.branch), -1, np.int32) if candidate == 0 else rows.siblings[:, candidate - 1]
        after = drawn(rest) if candidate == 0 else target(rows.branch, rows.accepted, sibling)
        each = (rows.chance * several[:, candidate])[:, None] * after
        row, token = np.nonzero(each)
        parts.append((rows.branch[row], rows.accepted[row], token, sibling[row], each[row, token]))
    branch, accepted, token, sibling, chance = joined([tuple(part) for part in parts])
    return (branch, accepted, token), Leaf(sibling, chance)


def _drawn_next(rows: _Rows, count: np.ndarray, greedy: np.ndarray, index: int) -> tuple[_Rows, np.ndarray, np.ndarray]:
    """Rows that draw their sibling `index`, one each a token that may come; the others as they are."""
    total = rows.left.sum(axis=1, keepdims=True)
    draws = (index < count) & (total[:, 0] > 0)
    chance = rows.left / np.where(total > 0, total, 1.0)
    chance = np.where(greedy[:, None], np.eye(chance.shape[1])[np.argmax(rows.left, axis=1)], chance)
    chance[~draws] = np.eye(chance.shape[1])[0]  # the one branch of a row that draws nothing
    row, token = np.nonzero(chance)
    rows = _Rows(*(column[row] for column in rows))
    rows.siblings[:, index] = token
    rows.left[np.arange(len(row)), token] = np.where(draws[row], 0.0, rows.left[np.arange(len(row)), token])
    return rows._replace(chance=rows.chance * chance[row, token]), count[row], greedy[row]
