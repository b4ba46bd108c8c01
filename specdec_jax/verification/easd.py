"""Entropy-aware speculative decoding, lossy: redraws where both models are uncertain (EASD, arXiv 2512.23765)."""

from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.sampling import entropy, normalised, without
from specdec_jax.ranges import Between, NotNegative, Share
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, NextDistribution, RoundContext, Verifier
from specdec_jax.verification._common import at_position, draft_log_probabilities, residual, token_by_token


class EASDState(NamedTuple):
    drafter_entropy: Array  # [B] float32, nats
    target_entropy: Array  # [B] float32, nats
    overlap: Array  # [B] float32


@strategy
def easd(top_n: Annotated[int, Between(1)] = 8) -> Verifier:
    """Rejection sampling that redraws accepted drafts at positions where both models are uncertain.

    A position is uncertain if the entropy of the drafter's distribution exceeds `drafter_entropy`, that of the target's
    exceeds `target_entropy` (nats, of the sampled distributions), and their `top_n` most probable tokens have at least
    the share `overlap` in common (`shared_share`). This depends on the distributions only, not on the token. With
    a_i = min(1, p(x_i) / q(x_i)) and d_i = 1 at uncertain positions, else 0, draft i is kept with probability
    a_i (1 - d_i), so

        P(k accepted | draft) = (1 - a_{k+1} (1 - d_{k+1})) prod_{i<=k} a_i (1 - d_i)      (k < length)
        distribution after k  = (1 - a) max(0, p - q) / Z + a d p without x / (1 - p(x))    (a, d, x, p, q of k + 1)

    up to a constant, where Z is the sum of the residual; after the whole draft it is the target's distribution, because
    nothing was drafted at the bonus position. A redrawn token is not checked again.

    Chosen tokens have one-hot distributions of entropy 0: for drafters without a model, and at temperature 0, this is
    exactly `rejection`. Policies that stop where the drafter is uncertain, such as AdaEDL, leave few tokens to redraw.
    The top sets contain only tokens of positive probability; in case of ties the smaller token.

    The paper's N, percentiles and overlap are not public. Defaults here: N = 8 (`top_n`, static because it is a size),
    and hyperparameters (`init`): drafter_entropy and target_entropy 1.0 nats (0 or more; `experiments.calibrate`
    computes percentiles of a pair), overlap 0.6 (in [0, 1]). Lossy.
    """

    def init(
        batch: int, drafter_entropy: NotNegative = 1.0, target_entropy: NotNegative = 1.0, overlap: Share = 0.6
    ) -> EASDState:
        return EASDState(drafter_entropy, target_entropy, overlap)

    def verify(
        state: EASDState, draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, NextDistribution, EASDState]:
        log_p = distributions.log_prob
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
        accept = jnp.minimum(0.0, log_p_token - log_q_token)  # [B, K]
        high_entropy = entropy(log_q) > jnp.asarray(state.drafter_entropy)[:, None]
        high_entropy = high_entropy & (distributions.entropy[:, :-1] > jnp.asarray(state.target_entropy)[:, None])
        uncertain = high_entropy & (shared_share(log_p[:, :-1], log_q, top_n) >= jnp.asarray(state.overlap)[:, None])
        log_prob_accepted = token_by_token(jnp.where(uncertain, -jnp.inf, accept), draft)

        def next_distribution(accepted: Array) -> Array:
            p = at_position(log_p, accepted)
            if draft.tokens.shape[1] == 0:
                return jnp.exp(p)
            passed = jnp.exp(at_position(accept, accepted))
            again = passed * at_position(uncertain.astype(passed.dtype), accepted)
            rest = residual(p, at_position(log_q, accepted))
            prob = jnp.exp(p)  # conditional on another token; `prob` itself where the token has all the mass
            others = without(prob, at_position(draft.tokens, accepted), 0.0)
            other = normalised(jnp.where(jnp.sum(others, axis=-1, keepdims=True) > 0, others, prob))
            mixed = (1.0 - passed)[:, None] * normalised(rest) + again[:, None] * other
            return jnp.where((accepted == draft.length)[:, None], jnp.exp(p), mixed)

        return log_prob_accepted, next_distribution, state

    return Verifier(init, verify, lossless=False)


def shared_share(log_p: Array, log_q: Array, top_n: int) -> Array:
    """Share [...] of the larger of two [..., V] distributions' top sets (at most `top_n` tokens) that is in both."""
    size = min(top_n, log_p.shape[-1])
    (high_p, top_p), (high_q, top_q) = lax.top_k(log_p, size), lax.top_k(log_q, size)
    in_p, in_q = high_p > -jnp.inf, high_q > -jnp.inf
    same = (top_p[..., :, None] == top_q[..., None, :]) & in_p[..., :, None] & in_q[..., None, :]
    both = jnp.sum(same.astype(jnp.int32), axis=(-2, -1))
    larger = jnp.maximum(jnp.sum(in_p.astype(jnp.int32), axis=-1), jnp.sum(in_q.astype(jnp.int32), axis=-1))
    return both.astype(log_p.dtype) / jnp.maximum(larger, 1).astype(log_p.dtype)
