"""What siblings add to an enumeration: every order in which they can be drawn, and every one that may be accepted.

Drawing has a twin here, as the draft loop has in enumeration.py; how many are drawn is asked of the policy, and what
becomes of them of the verifier or of `decoding/siblings.py`, as the decoder asks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.combs import fitted
from specdec_jax.decoding.siblings import outcomes
from specdec_jax.lossless.batched import in_batches, joined
from specdec_jax.types import Distribution, Draft, RoundContext, StoppingPolicy, Verifier

ROOM = 64  # places of the widest verification


class Leaf(NamedTuple):
    """Outcomes one by one, [N] each; with (branch, accepted, token) they say how a round ends."""

    sibling: np.ndarray  # int32, accepted after the drafts; -1: none
    chance: np.ndarray  # float64, of the node, the draft, the siblings and the outcome


class _Rows(NamedTuple):
    """Drafts whose siblings are being drawn; [N, ...]."""

    branch: np.ndarray
    chance: np.ndarray  # float64, of the siblings
    siblings: np.ndarray  # [N, K, M] int32
    count: np.ndarray  # [N], to be drawn of the draft at hand
    left: np.ndarray  # [N, V], weights of what may still be drawn beside it


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


def every_order(
    draft: Draft, is_greedy: bool, own: Callable[[np.ndarray, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every way in which the siblings of drafts can be drawn: (whose [N], siblings [N, K, M] int32, chance [N]).

    Args:
        own: (branch [N], depth) -> weights [N, V] that candidates are drawn from, at temperature 0 ranked by.
    """
    assert draft.siblings is not None
    tokens, length, beside = (np.asarray(leaf) for leaf in (draft.tokens, draft.length, draft.beside))
    branch = np.arange(len(tokens))
    rows = _Rows(branch, np.ones(len(tokens)), np.zeros(draft.siblings.shape, np.int32), branch, np.zeros((0, 0)))
    for depth in range(tokens.shape[1]):
        count = np.where(depth < length, beside[:, depth], 0)[rows.branch]
        left = own(rows.branch, depth)
        left[np.arange(len(left)), tokens[rows.branch, depth]] = 0.0
        rows = rows._replace(count=count, left=left)
        for index in range(draft.siblings.shape[2]):
            rows = _drawn_next(rows, is_greedy, depth, index)
    return rows.branch, rows.siblings, rows.chance


def _drawn_next(rows: _Rows, is_greedy: bool, depth: int, index: int) -> _Rows:
    """Rows that draw their sibling `index`, one each a token that may come; the others as they are."""
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


def decided(verifier: Verifier, batch: int, most: int) -> Callable[..., Any]:
    """(context, state, draft, distributions) -> log_prob_accepted [M, K+1], `SiblingOutcomes` [M, K+1, ...], state."""
    return _decided(verifier.bare, batch, most)


@functools.lru_cache(maxsize=64)
def _decided(verifier: Verifier, batch: int, most: int) -> Callable[..., Any]:
    def decide(context: RoundContext, state: Any, draft: Draft, distributions: Distribution) -> Any:
        log_prob_accepted, next_distribution, state = verifier.verify(state, draft, distributions, context)
        found = []
        for accepted in (jnp.full((batch,), k, jnp.int32) for k in range(most + 1)):
            found.append(outcomes(verifier, next_distribution, draft, distributions, accepted, context))
        chances, rests = (jnp.stack(leaves, axis=1) for leaves in ([o.chance for o in found], [o.rest for o in found]))
        return log_prob_accepted, chances, rests, state

    return in_batches(decide, batch)


def leaves(
    reached: np.ndarray,
    several: np.ndarray,
    rest: np.ndarray,
    siblings: np.ndarray,
    target: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
) -> tuple[tuple[np.ndarray, ...], Leaf]:
    """Every outcome of M branches: (branch, accepted, token), and which sibling was accepted between them.

    Args:
        reached: [M, K+1], the chance of a branch and of so many accepted drafts.
        several: [M, K+1, S+1], then of none of the siblings, the first, the second ...
        rest: [M, K+1, V], the distribution of the next token where it is none.
        siblings: [M, K, S].
        target: (branch, accepted, sibling) -> [N, V], the target's distribution after the sibling.
    """
    branch, accepted = np.nonzero(reached > 0)
    at = np.minimum(accepted, siblings.shape[1] - 1)
    parts = []
    for candidate in range(several.shape[2]):
        sibling = siblings[branch, at, candidate - 1] if candidate else np.full(len(branch), -1, np.int32)
        after = target(branch, accepted, sibling) if candidate else rest[branch, accepted]
        each = (reached * several[:, :, candidate])[branch, accepted][:, None] * after
        row, token = np.nonzero(each)
        parts.append((branch[row], accepted[row], token, sibling[row], each[row, token]))
    branch, accepted, token, sibling, chance = joined([tuple(part) for part in parts])
    return (branch, accepted, token), Leaf(sibling, chance)
