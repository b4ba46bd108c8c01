"""Helpers of verifiers: log-probabilities of drafts, residuals without 0/0, and the distribution of the next token."""

from collections.abc import Callable

import jax.numpy as jnp

from specdec_jax.types import Array, Draft


def no_hyperparameters(batch: int) -> tuple[()]:
    """A verifier without state or hyperparameters."""
    return ()


def positions(width: int) -> Array:
    """0 .. width-1 as int32."""
    return jnp.arange(width, dtype=jnp.int32)


def draft_log_probabilities(draft: Draft, log_p: Array) -> tuple[Array, Array, Array]:
    """(log_q [B, K, V], log p(token) [B, K], log q(token) [B, K]); q is one-hot for chosen tokens (`Draft.one_hot`).

    q(token) is 1 where p(token) is 0, so that p/q is 0 and not undefined for a token that neither has.
    """
    vocab = log_p.shape[-1]
    hit = jnp.arange(vocab, dtype=jnp.int32)[None, None, :] == draft.tokens[:, :, None]
    certain = jnp.where(hit, jnp.zeros((), log_p.dtype), jnp.array(-jnp.inf, log_p.dtype))
    log_q = certain if draft.log_q is None else jnp.where(draft.one_hot[:, :, None], certain, draft.log_q)
    token = draft.tokens[:, :, None]
    drafted_p = jnp.take_along_axis(log_p[:, :-1], token, axis=2)[:, :, 0]
    drafted_q = jnp.take_along_axis(log_q, token, axis=2)[:, :, 0]
    return log_q, drafted_p, jnp.where(drafted_p == -jnp.inf, 0.0, drafted_q)


def token_by_token(log_accept: Array, draft: Draft) -> Array:
    """log P(k accepted) [B, K+1] if drafts are accepted with log-probabilities log_accept [B, K] until one is rejected.

    Entries of `log_accept` at and beyond a draft's length are ignored.
    """
    width = log_accept.shape[1]
    drafted = positions(width)[None, :] < draft.length[:, None]
    accept = jnp.where(drafted, log_accept, 0.0)
    survived = jnp.pad(jnp.cumsum(accept, axis=1), ((0, 0), (1, 0)))  # [B, K+1]
    rejected = jnp.where(drafted, jnp.log1p(-jnp.exp(accept)), -jnp.inf)
    rejected = jnp.pad(rejected, ((0, 0), (0, 1)), constant_values=-jnp.inf)
    at_end = positions(width + 1)[None, :] == draft.length[:, None]
    return survived + jnp.where(at_end, 0.0, rejected)


def residual(log_p: Array, log_q: Array) -> Array:
    """max(0, p - q) of [B, V] distributions, or p in rows where that is zero (p = q, so nothing is rejected)."""
    rest = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0.0)
    empty = jnp.sum(rest, axis=-1, keepdims=True) <= 0
    return jnp.where(empty, jnp.exp(log_p), rest)


def at_position(values: Array, index: Array) -> Array:
    """values [B, T, ...] at index [B] as [B, ...]; the index is clamped to the last position."""
    safe = jnp.minimum(index, values.shape[1] - 1)
    return jnp.take_along_axis(values, jnp.expand_dims(safe, range(1, values.ndim)), axis=1)[:, 0]


def bonus_or(
    recovered: Callable[[Array, Array], Array], draft: Draft, log_p: Array, log_q: Array, accepted: Array
) -> Array:
    """The next distribution [B, V]: the target's if all drafts were accepted, else `recovered(log_p, log_q)`."""
    p = at_position(log_p, accepted)
    if draft.tokens.shape[1] == 0:
        return jnp.exp(p)
    whole = (accepted == draft.length)[:, None]
    return jnp.where(whole, jnp.exp(p), recovered(p, at_position(log_q, accepted)))
