"""Which of the drafter's candidates becomes the text's token if the first one is rejected.

Further candidates are drawn without replacement and tested in turn (recursive rejection sampling without replacement:
arXiv 2402.14160, section 3.2; arXiv 2402.12374, section 3): after a rejected candidate x the target's distribution p
becomes max(p - q, 0), x is removed from the drafter's q, both are normalised, and the next candidate is tested with
them. Conditional on the final token y, it was accepted at stage i with probability min(1, q_i(y) / p_i(y)) if not
earlier, and rejected candidates are distributed as max(q_i - p_i, 0). In greedy decoding the candidate is the rank of y
among the drafter's tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.sampling import ACCEPT, DRAFT, draw, normalised, without
from specdec_jax.types import Array

CANDIDATES = 4
"""Number of candidates that a trace distinguishes: the draft and three others."""


class Rejected(NamedTuple):
    """R positions whose first candidate is not the text's token."""

    log_p: Array  # [R, V] float32, the target's sampled distribution
    log_q: Array  # [R, V], the drafter's
    logits: Array  # [R, V], the drafter's: greedy candidates are ranked by them
    first: Array  # [R] int32, the candidate that was rejected
    token: Array  # [R] int32, the text's


def right_candidate(rejected: Rejected, is_sampled: Array, uniform: Callable[[int, int], Array]) -> Array:
    """The index of the candidate that is the text's token: 1 the second, 2 the third ..., 0 none; [R] int32.

    Args:
        is_sampled: [R] bool, True for temperatures above 0.
        uniform: (candidate, role) -> [R] float32 in [0, 1).
    """
    greedy = _rank(rejected)
    return lax.cond(
        jnp.any(is_sampled), lambda: jnp.where(is_sampled, _sampled(rejected, uniform), greedy), lambda: greedy
    )


def _rank(rejected: Rejected) -> Array:
    """The token's rank among the drafter's, with ties in order of the index; 0 beyond the last candidate."""
    logit = jnp.take_along_axis(rejected.logits, rejected.token[:, None], axis=1)
    earlier = jnp.arange(rejected.logits.shape[1], dtype=jnp.int32)[None, :] < rejected.token[:, None]
    rank = jnp.sum((rejected.logits > logit) | ((rejected.logits == logit) & earlier), axis=1, dtype=jnp.int32)
    return jnp.where(rank < CANDIDATES, rank, 0)


def _sampled(rejected: Rejected, uniform: Callable[[int, int], Array]) -> Array:
    p, q, last = jnp.exp(rejected.log_p), jnp.exp(rejected.log_q), rejected.first
    right = jnp.zeros(last.shape, jnp.int32)
    for candidate in range(1, CANDIDATES):
        p, q = normalised(jnp.maximum(p - q, 0.0)), normalised(without(q, last, 0.0))
        p_token, q_token = (jnp.take_along_axis(values, rejected.token[:, None], axis=1)[:, 0] for values in (p, q))
        hit = (right == 0) & (uniform(candidate, ACCEPT) * p_token < q_token)
        right = jnp.where(hit, candidate, right)
        last = draw(jnp.maximum(q - p, 0.0), uniform(candidate, DRAFT))
    return right
