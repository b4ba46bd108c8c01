"""Tracing a drafter that reads its target, whose drafts depend on where the round began.

Therefore a round is traced from every position of a text, a chain: along the text while the drafter's tokens would be
accepted, and its own continuation after the first rejected one. Chains are drafted from the last position of a text to
the first, like tails (tracing.py): each overwrites cache entries that only later positions needed.

`right_candidate` says which of the drafter's candidates becomes the text's token if the first one is rejected. Further
candidates are drawn without replacement and tested in turn (recursive rejection sampling without replacement:
arXiv 2402.14160, section 3.2; arXiv 2402.12374, section 3): after a rejected candidate x the target's distribution p
becomes max(p - q, 0), x is removed from the drafter's q, both are normalised, and the next candidate is tested with
them. Conditional on the final token y, it was accepted at stage i with probability min(1, q_i(y) / p_i(y)) if not
earlier, and rejected candidates are distributed as max(q_i - p_i, 0). In greedy decoding the candidate is the rank of y
among the drafter's tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding import sampling
from specdec_jax.decoding.cache_feed import window
from specdec_jax.decoding.teacher_forcing import PairCache
from specdec_jax.drafters.model import FED, first_pass, with_token
from specdec_jax.drafters.reading import last_pass
from specdec_jax.replay.trace import FEATURES
from specdec_jax.types import Array, Cache, Distribution, DraftModel, LanguageModel, Params, Warp

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

    def sampled() -> Array:
        p, q, last = jnp.exp(rejected.log_p), jnp.exp(rejected.log_q), rejected.first
        right = jnp.zeros(last.shape, jnp.int32)
        for candidate in range(1, CANDIDATES):
            p, q = sampling.normalised(jnp.maximum(p - q, 0.0)), sampling.normalised(sampling.without(q, last, 0.0))
            p_token, q_token = sampling.pick(p, rejected.token), sampling.pick(q, rejected.token)
            hit = (right == 0) & (uniform(candidate, sampling.ACCEPT) * p_token < q_token)
            right = jnp.where(hit, candidate, right)
            last = sampling.draw(jnp.maximum(q - p, 0.0), uniform(candidate, sampling.DRAFT))
        return jnp.where(is_sampled, right, greedy)

    # the token's rank among the drafter's, with ties in order of the index; 0 beyond the last candidate
    logit = jnp.take_along_axis(rejected.logits, rejected.token[:, None], axis=1)
    earlier = jnp.arange(rejected.logits.shape[1], dtype=jnp.int32)[None, :] < rejected.token[:, None]
    rank = jnp.sum((rejected.logits > logit) | ((rejected.logits == logit) & earlier), axis=1, dtype=jnp.int32)
    greedy = jnp.where(rank < CANDIDATES, rank, 0)
    return lax.cond(jnp.any(is_sampled), sampled, lambda: greedy)


class Written(NamedTuple):
    """The texts on the device."""

    tokens: Array  # [B, S] int32, prompts and answers
    prompt: Array  # [B] int32, number of tokens of the prompt
    answer: Array  # [B] int32, number of tokens of the answer


class Chains(NamedTuple):
    """The chains from every position; position t of an answer is before its token t."""

    features: Array  # [B, T+1, K, F] float32, features of each draft of the round that begins there
    run: Array  # [B, T+1] int32, number of drafts accepted before the first rejected one
    candidate: Array  # [B, T+1] int32, index of the candidate that is the text's token there; 0: none


class _Pass(NamedTuple):
    """The loop's carry for a chain."""

    cache: Cache
    last: Array  # [B, FED] int32
    reads: Array  # [B, FED, P] float32
    run: Array  # [B] int32
    diverged: Array  # [B] bool
    candidate: Array  # [B] int32
    features: Array  # [B, K, F]


def features(distribution: Distribution, log_q: Array) -> Array:
    """[..., F] float32 in the order of FEATURES, from a Distribution and log q of a token."""
    fields = [getattr(distribution, name) for name in FEATURES[:-1]] + [log_q]
    return jnp.stack([field.astype(jnp.float32) for field in fields], axis=-1)


def chains(
    drafter: LanguageModel,
    max_draft_length: int,
    params: Params,
    texts: Written,
    target_log_prob: Array,
    caches: PairCache,
    warp: Warp,
    seeds: Array,
) -> Chains:
    """Chains of K drafts from every position.

    Args:
        target_log_prob: [B, T+1, V] float32, the target's sampled distributions; the last is after an answer's end.
        caches: those of a teacher-forced pass over the texts; the drafter's is overwritten.
    """
    draft_model, reads = DraftModel.of(drafter), caches.reads
    assert reads is not None
    batch, positions = target_log_prob.shape[:2]
    is_sampled = warp.temperature > 0

    def coin(emitted: Array, position: Any, role: int) -> Array:
        return sampling.uniforms(seeds, jnp.broadcast_to(emitted, seeds.shape), jnp.asarray(position, jnp.int32), role)

    def candidate_coin(at: Array, step: Array, candidate: int, role: int) -> Array:
        """Uniforms of acceptance belong to the position, those of draws to the chain, as for first candidates."""
        more = candidate * sampling.BY_CANDIDATE
        return coin(*((at + step, more) if role == sampling.ACCEPT else (at, more + step + 1)), role)

    def one_pass(at: Array, step: Array, now: _Pass) -> _Pass:
        end = texts.prompt + at + step  # number of tokens of prompt, text and draft
        logits, read, cache = last_pass(draft_model, params, now.cache, now.last, now.reads, end)
        if draft_model.head is not None:
            logits = draft_model.head.spread(params, cache, logits)
        seen = sampling.distribution(logits, warp)
        place = jnp.minimum(at + step, positions - 1)
        log_p = lax.dynamic_index_in_dim(target_log_prob, place, axis=1, keepdims=False)
        follows = sampling.pick(texts.tokens, jnp.minimum(end, texts.tokens.shape[1] - 1))
        within = (at + step < texts.answer) & ~now.diverged
        # the drafter's token would have been the text's with probability min(1, q / p) of the latter
        p, q = (jnp.exp(sampling.pick(log, follows)) for log in (log_p, seen.log_prob))
        accepts = jnp.where(is_sampled, coin(at + step, 0, sampling.ACCEPT) * p < q, seen.top_token == follows)
        hit = within & accepts
        # The draft: at the first rejected position a token that is rejected, after it any drawn token.
        excess = jnp.maximum(jnp.exp(seen.log_prob) - jnp.exp(log_p), 0.0)
        rejected = within & is_sampled & (jnp.sum(excess, axis=-1) > 0)
        weights = jnp.where(rejected[:, None], excess, jnp.exp(seen.log_prob))
        drawn = jnp.where(is_sampled, sampling.draw(weights, coin(at, step + 1, sampling.DRAFT)), seen.top_token)
        token = jnp.where(hit, follows, drawn)
        missed = within & ~hit
        at_hand = Rejected(log_p, seen.log_prob, logits, drawn, follows)
        candidate = lax.cond(
            jnp.any(missed),
            lambda: right_candidate(at_hand, is_sampled, lambda *named: candidate_coin(at, step, *named)),
            lambda: jnp.zeros_like(now.candidate),
        )
        line = features(seen, sampling.log_prob_of(seen, token))[:, None]
        return _Pass(
            cache=cache,
            last=with_token(now.last, token, end),
            reads=with_token(now.reads, read, end),
            run=now.run + hit.astype(jnp.int32),
            diverged=now.diverged | ~hit,
            candidate=jnp.where(missed, candidate, now.candidate),
            features=lax.dynamic_update_slice_in_dim(now.features, line, step, axis=1),
        )

    def one_chain(index: Array, carry: tuple[Cache, Chains]) -> tuple[Cache, Chains]:
        cache, before = carry
        at = positions - 1 - index
        cache, last = first_pass(drafter, params, cache, texts.tokens, texts.prompt + at)
        none = jnp.zeros((batch,), jnp.int32)
        no_features = jnp.zeros((batch, max_draft_length, len(FEATURES)), jnp.float32)
        here = window(reads, cache.length, FED).astype(jnp.float32)
        first = _Pass(cache, last, here, none, none > 0, none, no_features)
        end = lax.fori_loop(0, max_draft_length, functools.partial(one_pass, at), first)
        chain = Chains(end.features, end.run, end.candidate)
        put = lambda whole, column: lax.dynamic_update_slice_in_dim(whole, column[:, None], at, axis=1)  # noqa: E731
        return end.cache, jax.tree.map(put, before, chain)

    none = jnp.zeros((batch, positions), jnp.int32)
    nothing = Chains(jnp.zeros((batch, positions, max_draft_length, len(FEATURES)), jnp.float32), none, none)
    return lax.fori_loop(0, positions, one_chain, (caches.drafter, nothing))[1]
