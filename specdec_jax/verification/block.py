"""Block verification: joint verification of the whole draft (Sun et al., arXiv 2403.10444, algorithm 2)."""

import jax.numpy as jnp
from jax import lax

from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, NextDistribution, RoundContext, Verifier
from specdec_jax.verification._common import bonus_or, draft_log_probabilities, no_hyperparameters, positions
from specdec_jax.verification._common import residual as plain_residual


@strategy
def block() -> Verifier:
    """Accept the longest accepted prefix, where each prefix is accepted independently by its joint probability ratio.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), prefix i < length is accepted with probability
    h_i = Z_i / (Z_i + 1 - w_i), Z_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0), and the whole draft with w_length; the
    longest accepted prefix counts. After k < length drafts the next token is drawn from max(w_k p - q, 0). Lossless; in
    expectation accepts at least as many tokens as `rejection`, and equals it for one-hot drafts and at temperature 0.
    """

    def verify(
        state: tuple[()], draft: Draft, distributions: Distribution, context: RoundContext
    ) -> tuple[Array, NextDistribution, tuple[()]]:
        log_p = distributions.log_prob
        log_q, log_p_token, log_q_token = draft_log_probabilities(draft, log_p)
        weight = prefix_weights(log_p_token - log_q_token)  # [B, K+1]
        width = log_q.shape[1]
        p, q = jnp.exp(log_p[:, :width]), jnp.exp(log_q)
        rest = jnp.sum(jnp.maximum(weight[:, :width, None] * p - q, 0.0), axis=-1)  # Z_0 .. Z_{K-1}
        # rest + 1 - w could be rounded below rest if w = 1, and log(1 - h) would be NaN.
        slack = rest + (1.0 - weight[:, :width])
        prefix = jnp.where(slack > 0, rest / jnp.where(slack > 0, slack, 1.0), 1.0)  # 0/0: w = 1 and p = q
        prefix = jnp.pad(prefix, ((0, 0), (0, 1)))
        index = positions(width + 1)[None, :]
        log_prob_accepted = longest_yes(jnp.where(index < draft.length[:, None], prefix, weight), draft.length)

        def next_distribution(accepted: Array) -> Array:
            scale = jnp.take_along_axis(weight, accepted[:, None], axis=1)

            def recovered(log_p: Array, log_q: Array) -> Array:
                rest = jnp.maximum(scale * jnp.exp(log_p) - jnp.exp(log_q), 0.0)
                empty = jnp.sum(rest, axis=-1, keepdims=True) <= 0
                return jnp.where(empty, plain_residual(log_p, log_q), rest)

            return bonus_or(recovered, draft, log_p, log_q, accepted)

        return log_prob_accepted, next_distribution, state

    return Verifier(no_hyperparameters, verify, lossless=True)


def longest_yes(yes: Array, length: Array) -> Array:
    """log P(k accepted) [B, K+1] if prefix k is accepted with probability `yes` [B, K+1] and the longest one counts.

    Entries beyond a draft's `length` [B] are ignored.
    """
    index = positions(yes.shape[1])[None, :]
    yes = jnp.where(index <= length[:, None], yes, 0.0)
    yes = jnp.where(index == 0, 1.0, yes)  # the empty prefix is always accepted
    no = jnp.cumsum(jnp.log1p(-yes[:, ::-1])[:, :-1], axis=1)[:, ::-1]  # every longer prefix is rejected
    return jnp.log(yes) + jnp.pad(no, ((0, 0), (0, 1)))


def prefix_weights(log_ratio: Array) -> Array:
    """The weights w_0 .. w_K as probabilities [B, K+1], from log ratios [B, K]."""

    def step(weight: Array, ratio: Array) -> tuple[Array, Array]:
        weight = jnp.minimum(0.0, weight + ratio)
        return weight, weight

    start = jnp.zeros_like(log_ratio[:, :1])[:, 0] if log_ratio.shape[1] else jnp.zeros(log_ratio.shape[:1])
    _, rest = lax.scan(step, start, log_ratio.T)
    return jnp.exp(jnp.concatenate([start[:, None], rest.T], axis=1))
