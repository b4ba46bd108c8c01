"""Siblings of a draft: further tokens of the same distribution, tried one after the other where the draft is rejected.

They are drawn without replacement, and recursive rejection sampling (arXiv 2402.14160, section 3.2; arXiv 2402.12374,
section 3) decides about them: the distribution r that the next token must have is speculated on once more, with q
without the tokens tried so far as what the sibling was drawn from. That is exact for any r and whatever the tokens
before were, so it follows any verifier: r is its `next_distribution`, and without siblings a token is drawn from it.
How many siblings are verified may depend on the draft, but not on which tokens they are. Greedily the candidates are
the drafter's most probable tokens, and a sibling is right if it is the target's.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.sampling import argmax, draw
from specdec_jax.types import Array, Distribution, Draft, SiblingOutcomes

BY_CANDIDATE = 4096
"""What a candidate adds to the index that its uniform is keyed by: more than any draft is long."""


def candidates(seen: Distribution, is_sampled: Array, count: int, uniform: Callable[[int], Array]) -> list[Array]:
    """A draft and its siblings, `count` tokens [B] int32 in all; meaningless where no token is left to draw.

    Args:
        seen: the distribution that they are drawn from, over whatever tokens a drafter has.
        is_sampled: [B] bool, the temperature is above 0.
        uniform: (candidate, from 0 on) -> [B] float32 in [0, 1).
    """

    def ranked() -> list[Array]:
        found = [seen.top_token]
        left = seen.raw_log_prob
        for _ in range(1, count):
            assert left is not None  # only a replay does without
            left = without(left, found[-1], -jnp.inf)
            found.append(argmax(left))
        return found

    def drawn() -> list[Array]:
        left = jnp.exp(seen.log_prob)
        found = [draw(left, uniform(0))]
        for candidate in range(1, count):
            left = without(left, found[-1], 0.0)
            found.append(draw(left, uniform(candidate)))
        return [jnp.where(is_sampled, token, other) for token, other in zip(found, ranked(), strict=True)]

    return lax.cond(jnp.any(is_sampled), drawn, ranked)


def sibling_outcomes(following: Array, draft: Draft, accepted: Array, is_sampled: Array) -> SiblingOutcomes:
    """What comes after `accepted` [B] drafts.

    Args:
        following: [B, V], the verifier's `next_distribution(accepted)`, at temperature 0 one-hot, else not necessarily
            normalised.
        draft: with siblings, and how many of them are beside each draft.
    """
    assert draft.siblings is not None and draft.beside is not None
    at = jnp.minimum(accepted, draft.tokens.shape[1] - 1)
    here = lambda leaf: jnp.take_along_axis(leaf, at.reshape(-1, *[1] * (leaf.ndim - 1)), axis=1)[:, 0]  # noqa: E731
    count = jnp.where(accepted < draft.length, here(draft.beside), 0)
    tokens = here(draft.siblings)
    tried = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < count[:, None]

    def greedy() -> tuple[Array, Array]:
        right = jnp.where(tried, jnp.take_along_axis(following, tokens, axis=1), 0.0)
        return jnp.concatenate([1.0 - jnp.sum(right, axis=1, keepdims=True), right], axis=1), following

    def sampled() -> tuple[Array, Array]:
        q = jnp.ones_like(following) if draft.log_q is None else jnp.exp(here(draft.log_q)).astype(following.dtype)
        return _tried_in_turn(normalised(following), without(q, here(draft.tokens), 0.0), tokens, tried, is_sampled)

    chance, rest = lax.cond(jnp.any(is_sampled), sampled, greedy)
    return SiblingOutcomes(chance, tokens, rest)


def _tried_in_turn(p: Array, q: Array, tokens: Array, tried: Array, is_sampled: Array) -> tuple[Array, Array]:
    """Chances [B, M+1] and the rest [B, V] of siblings for p [B, V]; q [B, V] need not be normalised."""
    q, reach, chances = normalised(q), jnp.ones_like(p[:, 0]), []
    for index in range(tokens.shape[1]):
        token = tokens[:, index]
        certain = without(jnp.zeros_like(p), token, 1.0)
        own = jnp.where(is_sampled[:, None], q, certain)
        p_token, q_token = (jnp.take_along_axis(values, token[:, None], axis=1)[:, 0] for values in (p, own))
        possible = tried[:, index] & (q_token > 0)
        accept = jnp.where(possible, jnp.minimum(1.0, p_token / jnp.where(possible, q_token, 1.0)), 0.0)
        chances.append(reach * accept)
        reach = reach * (1.0 - accept)
        rest = jnp.maximum(p - own, 0.0)
        p = jnp.where((possible & (jnp.sum(rest, axis=1) > 0))[:, None], normalised(rest), p)
        q = normalised(without(q, token, 0.0))
    return jnp.stack([reach, *chances], axis=1), p


def without(values: Array, token: Array, instead: float) -> Array:
    """[B, V] values with another one at `token` [B]."""
    here = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :] == token[:, None]
    return jnp.where(here, jnp.asarray(instead, values.dtype), values)


def normalised(weights: Array) -> Array:
    """[B, V] that sum to 1, or stay 0."""
    total = jnp.sum(weights, axis=1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)
