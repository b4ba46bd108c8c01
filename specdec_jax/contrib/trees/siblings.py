"""Siblings of a draft: further tokens from the same distribution, tested in turn if the draft is rejected.

They are drawn without replacement and accepted by recursive rejection sampling (arXiv 2402.14160, section 3.2; arXiv
2402.12374, section 3): the required distribution r of the next token is the target of another speculation step, in
which the sibling was drawn from q without the tokens tested before. This is exact for any r and any earlier tokens, so
it can follow any verifier: r is its `next_distribution`, from which a token is drawn without siblings. The number of
verified siblings may depend on the draft, but not on the siblings' tokens. In greedy decoding the candidates are the
drafter's most probable tokens, and a sibling is accepted if it is the target's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.contrib.trees.seams import SiblingOutcomes, TreeDraft, TreeVerifier
from specdec_jax.decoding.sampling import argmax, draw, normalised, pick, without
from specdec_jax.types import Array, Distribution, RoundContext, Verifier


def further_candidates(
    seen: Distribution, token: Array, is_sampled: Array, count: int, uniform: Callable[[int], Array]
) -> Array:
    """`count` siblings [B, count] int32 of a `token` [B] drawn from `seen`; meaningless if no token is left.

    `uniform`: (candidate, from 1) -> [B] float32 in [0, 1).
    """

    def each(left: Any, instead: float, choice: Callable[[Array, int], Array]) -> list[Array]:
        last, candidates = token, []
        for candidate in range(1, count + 1):
            left = without(left, last, instead)
            last = choice(left, candidate)
            candidates.append(last)
        return candidates

    def ranked() -> list[Array]:
        return each(seen.raw_log_prob, -jnp.inf, lambda left, _: argmax(left))

    def drawn() -> list[Array]:
        draws = each(jnp.exp(seen.log_prob), 0.0, lambda left, candidate: draw(left, uniform(candidate)))
        return [jnp.where(is_sampled, sampled, other) for sampled, other in zip(draws, ranked(), strict=True)]

    return jnp.stack(lax.cond(jnp.any(is_sampled), drawn, ranked), axis=1)


def outcomes(
    verifier: Verifier,
    next_distribution: Callable[[Array], Array],
    draft: TreeDraft,
    distributions: Distribution,
    accepted: Array,
    context: RoundContext,
) -> SiblingOutcomes:
    """The outcomes after `accepted` [B] drafts, by the verifier or from its `next_distribution` [B, V]."""
    if isinstance(verifier, TreeVerifier) and verifier.outcomes is not None:
        return verifier.outcomes(draft, distributions, accepted, context)
    return sibling_outcomes(next_distribution(accepted), draft, accepted, context.warp.temperature > 0)


def sibling_outcomes(following: Array, draft: TreeDraft, accepted: Array, is_sampled: Array) -> SiblingOutcomes:
    """The outcomes after `accepted` [B] drafts, from the verifier's `next_distribution(accepted)`, `following` [B, V].

    It is one-hot at temperature 0, else not necessarily normalised.
    """
    token, tokens, sibling_count = at_depth((draft.tokens, draft.siblings, draft.sibling_counts), accepted)
    count = jnp.where(accepted < draft.length, sibling_count, 0)
    tried = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < count[:, None]

    def greedy() -> tuple[Array, Array]:
        right = jnp.where(tried, jnp.take_along_axis(following, tokens, axis=1), 0.0)
        return jnp.concatenate([1.0 - jnp.sum(right, axis=1, keepdims=True), right], axis=1), following

    def sampled() -> tuple[Array, Array]:  # gathers distributions here, because greedy rounds need none
        p, weight = normalised(following), jnp.ones_like(following[:, 0])
        left = jnp.ones_like(following)  # for verifiers that need no distributions
        if draft.log_q is not None:
            left = without(jnp.exp(at_depth(draft.log_q, accepted)).astype(following.dtype), token, 0.0)
        accepts, _, rest = accept_in_order(p, weight, left, tokens, tried, is_sampled)
        return by_candidate(accepts), rest

    chance, rest = lax.cond(jnp.any(is_sampled & (count > 0)), sampled, greedy)
    return SiblingOutcomes(chance, tokens, rest)


def accept_in_order(
    p: Array, weight: Array, left: Array, tokens: Array, tried: Array, is_sampled: Array
) -> tuple[Array, Array, Array]:
    """Siblings tested in turn against p [B, V]; `weight` [B] is w of block verification, or 1.

    Args:
        left: [B, V], weights from which the first of the `tokens` [B, M] was drawn.
        tried: [B, M] bool, the verified ones.
        is_sampled: [B] bool; in other rows the tokens were chosen.

    Returns:
        Probabilities [B, M] that a sibling is accepted if the earlier ones are not; weight [B] and p [B, V] after all.
    """
    accepts = []
    for index in range(tokens.shape[1]):
        token = tokens[:, index]
        certain = without(jnp.zeros_like(p), token, 1.0)
        q = jnp.where(is_sampled[:, None], normalised(left), certain)
        p_token, q_token = pick(p, token), pick(q, token)
        possible = tried[:, index] & (q_token > 0)
        ratio = weight * p_token / jnp.where(possible, q_token, 1.0)
        accepts.append(jnp.where(possible, jnp.minimum(1.0, ratio), 0.0))
        rest, lighter = after_rejection(p, q, weight)
        p, weight = jnp.where(possible[:, None], rest, p), jnp.where(possible, lighter, weight)
        left = without(left, token, 0.0)
    return jnp.stack(accepts, axis=1), weight, p


def after_rejection(p: Array, q: Array, weight: Array) -> tuple[Array, Array]:
    """p [B, V] and its weight [B] after the rejection of a token drawn from q; weight 1 stays 1."""
    rest = jnp.maximum(weight[:, None] * p - q, 0.0)
    total = jnp.sum(rest, axis=1)
    slack = total + (1.0 - weight)  # 0: w = 1 and p = q, so nothing is rejected
    lighter = jnp.where(slack > 0, total / jnp.where(slack > 0, slack, 1.0), 1.0)
    return jnp.where((total > 0)[:, None], normalised(rest), p), lighter


def by_candidate(accepts: Array, last: Array | float = 1.0) -> Array:
    """Probabilities [B, M+1] of none, the first ... if each is accepted with `accepts` [B, M], and none with `last`."""
    reach = jnp.cumprod(jnp.pad(1.0 - accepts, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    return jnp.concatenate([reach[:, -1:] * jnp.reshape(last, (-1, 1)), reach[:, :-1] * accepts], axis=1)


def at_depth(tree: Any, depth: Array) -> Any:
    """Leaves [B, K, ...] at depth [B], which is clamped to the last."""
    return jax.tree.map(lambda leaf: entries_at(leaf, jnp.minimum(depth, leaf.shape[1] - 1)[:, None])[:, 0], tree)


def entries_at(leaf: Array, index: Array) -> Array:
    """The entries [B, W, ...] of a leaf [B, T, ...] at index [B, W]."""
    return jnp.take_along_axis(leaf, index.reshape(*index.shape, *[1] * (leaf.ndim - 2)), axis=1)
