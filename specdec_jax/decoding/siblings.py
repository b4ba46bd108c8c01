"""Siblings of a draft: further tokens of the same distribution, tried one after the other where the draft is rejected.

They are drawn without replacement, and recursive rejection sampling (arXiv 2402.14160, section 3.2; arXiv 2402.12374,
section 3) decides about them: the distribution r that the next token must have is speculated on once more, with q
without the tokens tried so far as what the sibling was drawn from. That is exact for any r and whatever the tokens
before were, so it follows any verifier: r is its `next_distribution`, and without siblings a token is drawn from it.
How many siblings are verified may depend on the draft, but not on which tokens they are. Greedily the candidates are
the drafter's most probable tokens, and a sibling is right if it is the target's.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.sampling import argmax, draw
from specdec_jax.types import Array, Distribution, Draft

BY_CANDIDATE = 4096
"""What a candidate adds to the index that its uniform is keyed by: more than any draft is long."""


class Outcomes(NamedTuple):
    """What may follow the accepted drafts: one of M siblings, or a token of `rest`."""

    chance: Array  # [B, M+1], of none of them, the first, the second ...
    tokens: Array  # [B, M] int32
    rest: Array  # [B, V], the next token's distribution where none is accepted


def drawn_beside(
    seen: Distribution, token: Array, is_sampled: Array, count: int, uniform: Callable[[int], Array]
) -> Array:
    """The siblings [B, count] int32 of a drafted token [B]; meaningless where no token is left to draw.

    Args:
        seen: the distribution that it was drawn from.
        is_sampled: [B] bool, the temperature is above 0.
        uniform: (candidate, from 1 on) -> [B] float32 in [0, 1).
    """
    assert seen.raw_log_prob is not None  # only a replay does without
    left, found = jnp.where(is_sampled[:, None], seen.log_prob, seen.raw_log_prob), [token]
    for candidate in range(1, count + 1):
        left = without(left, found[-1], -jnp.inf)
        top = argmax(left)
        sampled = lambda left=left, top=top, u=candidate: jnp.where(is_sampled, draw(jnp.exp(left), uniform(u)), top)  # noqa: E731
        found.append(lax.cond(jnp.any(is_sampled), sampled, lambda top=top: top))
    return jnp.stack(found[1:], axis=1)


def sibling_outcomes(following: Array, draft: Draft, accepted: Array, is_sampled: Array) -> Outcomes:
    """What comes after `accepted` [B] drafts.

    Args:
        following: [B, V], the verifier's `next_distribution(accepted)`, not necessarily normalised.
        draft: with siblings, and how many of them are beside each draft.
    """
    assert draft.siblings is not None and draft.beside is not None
    at = jnp.minimum(accepted, draft.tokens.shape[1] - 1)
    here = lambda leaf: jnp.take_along_axis(leaf, at.reshape(-1, *[1] * (leaf.ndim - 1)), axis=1)[:, 0]  # noqa: E731
    count = jnp.where(accepted < draft.length, here(draft.beside), 0)
    tokens, p = here(draft.siblings), normalised(following)
    q = jnp.ones_like(p) if draft.log_q is None else jnp.exp(here(draft.log_q)).astype(p.dtype)
    q = normalised(without(q, here(draft.tokens), 0.0))
    reach, chances = jnp.ones_like(p[:, 0]), []
    for index in range(tokens.shape[1]):
        token = tokens[:, index]
        certain = without(jnp.zeros_like(p), token, 1.0)
        own = jnp.where(is_sampled[:, None], q, certain)
        p_token, q_token = (jnp.take_along_axis(values, token[:, None], axis=1)[:, 0] for values in (p, own))
        tried = (index < count) & (q_token > 0)
        accept = jnp.where(tried, jnp.minimum(1.0, p_token / jnp.where(tried, q_token, 1.0)), 0.0)
        chances.append(reach * accept)
        reach = reach * (1.0 - accept)
        rest = jnp.maximum(p - own, 0.0)
        p = jnp.where((tried & (jnp.sum(rest, axis=1) > 0))[:, None], normalised(rest), p)
        q = normalised(without(q, token, 0.0))
    return Outcomes(jnp.stack([reach, *chances], axis=1), tokens, p)


def without(values: Array, token: Array, instead: float) -> Array:
    """[B, V] values with another one at `token` [B]."""
    here = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :] == token[:, None]
    return jnp.where(here, jnp.asarray(instead, values.dtype), values)


def normalised(weights: Array) -> Array:
    """[B, V] that sum to 1, or stay 0."""
    total = jnp.sum(weights, axis=1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)
