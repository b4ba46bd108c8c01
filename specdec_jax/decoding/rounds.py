"""One round: draft, verify in the narrowest width that holds the batch's longest draft, emit, commit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.phase import phase_of
from specdec_jax.decoding.sampling import ACCEPT, DRAFT, NEXT, distributions, draw, pick, policy_seeds, round_uniforms
from specdec_jax.decoding.statistics import count_round, record_round
from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import (
    Array,
    Cache,
    DecodeState,
    Draft,
    Drafter,
    DrafterState,
    LanguageModel,
    LoopResult,
    Monitor,
    MonitorState,
    Params,
    RoundContext,
    RoundInfo,
    Seen,
    Source,
    StoppingPolicy,
    VerificationResult,
    Verifier,
    VerifierState,
)


class Parts(NamedTuple):
    """The static parts of a decoder."""

    target: LanguageModel
    drafter: Drafter
    policy: StoppingPolicy
    verifier: Verifier
    monitor: Monitor
    widths: tuple[int, ...]


class ModelParams(NamedTuple):
    """The weights of both models; `drafter` are the parameters for the drafter's functions (None if it has none)."""

    target: Params
    drafter: Params = None


class Verified(NamedTuple):
    result: VerificationResult
    cache: Cache
    verifier: VerifierState
    monitor: MonitorState
    features: Any  # result of the drafter's observer, leaves [B, K+1, ...]; () without one


class Run(NamedTuple):
    state: DecodeState
    log_q: Array | None  # [B, K, V] float32, buffer for the distributions of a round's drafts (`empty_log_q`)


class Start(NamedTuple):
    """The inputs of a draft loop."""

    context: RoundContext
    uniforms: Array  # `round_uniforms`
    source: Source


def decode_round(parts: Parts, params: ModelParams, run: Run) -> Run:
    """One round for all unfinished rows. Shapes stay constant; the cache is rolled back by setting its length."""
    state, log_q = run
    with jax.named_scope("draft"):
        context, uniforms, source = open_round(parts, params, state)
        uniform = lambda step: uniforms[:, step, DRAFT]  # noqa: E731
        longest = parts.drafter.max_draft_length
        loop = draft_loop.draft(source, parts.policy, state.policy, context, uniform, longest, log_q)
        drafter, to_verify = source.close(loop)
        draft = draft_of(to_verify)
    with jax.named_scope("verify"):
        choice = narrowest(parts.widths, draft.length)
        branches = [verification_in(parts, width) for width in parts.widths]
        verified = lax.switch(choice, branches, params, state, draft, context, uniforms)
    return Run(commit(parts, params, state, context, loop, drafter, draft, verified, choice), loop.log_q)


def open_round(parts: Parts, params: ModelParams, state: DecodeState) -> Start:
    alive = ~state.done
    budget = jnp.minimum(parts.drafter.max_draft_length, state.limit - state.length - 1)
    context = RoundContext(
        length=state.length,
        emitted=state.length - state.prompt_length,
        budget=jnp.where(alive, jnp.maximum(budget, 0), 0),
        alive=alive,
        policy_seed=policy_seeds(state.key),
        warp=state.warp,
        monitor=state.monitor,
    )
    source = parts.drafter.source(params.drafter, state.drafter, state.tokens, context)
    return Start(context, round_uniforms(state.key, context.emitted, parts.drafter.max_draft_length + 1), source)


def commit(
    parts: Parts,
    params: ModelParams,
    state: DecodeState,
    context: RoundContext,
    loop: LoopResult,
    drafter: DrafterState,
    draft: Any,
    verified: Verified,
    choice: Array,
    extra_tokens: Array | None = None,
) -> DecodeState:
    """The state after a round whose draft was verified in the width of index `choice` [].

    `extra_tokens` [B] int32 is the number of verified tokens after the first `verified.result.length`, for drafts that
    are not chains: the drafter has no entries of them. `draft` and the result are those that the policy learns from.
    """
    with jax.named_scope("commit"):
        result, threshold = verified.result, parts.policy.threshold(loop.policy)
        policy = select_rows(context.alive, parts.policy.update(loop.policy, draft, result), loop.policy)
        count = result.length if extra_tokens is None else result.length + extra_tokens
        emitted, stopped = cut(state, result.tokens, count, context)
        tokens, length = append(state.tokens, state.length, result.tokens, emitted), state.length + emitted
        if extra_tokens is not None:
            matching = jnp.minimum(length, state.length + result.length)
            drafter = parts.drafter.commit(params.drafter, drafter, tokens, matching)
        seen = () if parts.drafter.observe is None else (Seen(verified.features, state.length - 1, emitted),)
        width, phase = jnp.array(parts.widths, jnp.int32)[choice], phase_of(context)
        measured = RoundInfo(
            proposed=draft.tokens,
            drafted=draft.length,
            accepted=jnp.minimum(result.length - 1, emitted),
            emitted=emitted,
            drafter_passes=loop.passes,
            discarded=jnp.maximum(jnp.where(loop.passes > 0, loop.passes - loop.length, 0), 0),
            width=jnp.broadcast_to(width, emitted.shape),
            entropy=loop.entropy,
            max_prob=loop.max_prob,
            threshold=jnp.broadcast_to(threshold.astype(jnp.float32), emitted.shape),
            drafter_id=loop.drafter_id,
            phase=phase,
        )
        return state._replace(
            tokens=tokens,
            length=length,
            done=state.done | stopped | (length >= state.limit),
            target_cache=parts.target.with_length(verified.cache, jnp.maximum(length - 1, 0)),
            drafter=parts.drafter.commit(params.drafter, drafter, tokens, length, *seen),
            policy=policy,
            verifier=verified.verifier,
            monitor=verified.monitor,
            statistics=count_round(state.statistics, context.alive, measured),
            record=record_round(state.record, state.statistics.num_rounds, context.alive, measured),
        )


def with_buffer(parts: Parts, params: ModelParams, state: DecodeState) -> Run:
    """All rounds of a run write into one buffer, because to fill a new one takes as long as to draft."""
    source = open_round(parts, params, state).source
    sizes = len(state.done), parts.drafter.max_draft_length, parts.target.spec.vocab_size
    return Run(state, empty_log_q(source, *sizes, parts.verifier.needs_log_q))


def empty_log_q(source: Source, batch: int, max_draft_length: int, vocab_size: int, needs_log_q: bool) -> Array | None:
    """[B, K, V] float32 for the drafts' distributions; None if the verifier needs none or all tokens are chosen."""
    while source.chosen is True and source.otherwise is not None:
        source = source.otherwise(jnp.ones((batch,), bool))
    drawn = needs_log_q and source.chosen is not True
    return jnp.full((batch, max_draft_length, vocab_size), -jnp.inf, jnp.float32) if drawn else None


def draft_of(loop: LoopResult) -> Draft:
    """The draft that the target verifies."""
    one_hot = jnp.broadcast_to(loop.chosen[:, None], loop.tokens.shape)
    return Draft(loop.tokens, loop.log_q, one_hot, loop.length)


def narrowest(widths: tuple[int, ...], drafted: Array) -> Array:
    """Index of the narrowest width that holds the longest draft and the token before it; `drafted` are lengths [B]."""
    too_narrow = jnp.array(widths, jnp.int32) < jnp.max(drafted) + 1
    return jnp.minimum(jnp.sum(too_narrow.astype(jnp.int32)), len(widths) - 1)


def verification_in(parts: Parts, width: int) -> Callable[..., Verified]:
    """The branch for one verification width: target pass, distributions, acceptance and next token."""
    longest = parts.drafter.max_draft_length
    held = min(width - 1, longest)  # number of drafts that fit this width; no row has more

    def verify(
        params: ModelParams, state: DecodeState, draft: Draft, context: RoundContext, uniforms: Array
    ) -> Verified:
        draft = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf[:, :held], draft)
        start = context.length - 1
        last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
        missing = width - 1 - draft.tokens.shape[1]  # a width above K + 1 is padded with token 0
        fed = jnp.pad(jnp.concatenate([last, draft.tokens], axis=1), ((0, 0), (0, missing)))
        with jax.named_scope("target_pass"):
            cache = parts.target.with_length(state.target_cache, start)
            logits, hidden, cache = apply_observed(parts.target, parts.drafter.layers, params.target, fed, cache)
        logits, hidden = jax.tree.map(lambda leaf: leaf[:, : held + 1], (logits, hidden))
        target = distributions(logits, state.warp)
        log_prob_accepted, next_distribution, verifier = parts.verifier.verify(state.verifier, draft, target, context)
        accepted = draw(jnp.exp(log_prob_accepted), uniforms[:, 0, ACCEPT])
        token = draw(next_distribution(accepted), pick(uniforms[..., NEXT], accepted))
        index = jnp.arange(longest + 1, dtype=jnp.int32)[None, :]
        tokens = jnp.pad(draft.tokens, ((0, 0), (0, longest + 1 - held)))
        # The accepted drafts, then the new token up to position K; the first `length` tokens count.
        result = VerificationResult(jnp.where(index < accepted[:, None], tokens, token[:, None]), accepted + 1)
        monitor = parts.monitor.observe(state.monitor, logits, result, context)
        features = observed_features(parts.drafter, params.drafter, hidden)
        verifier, monitor = select_rows(context.alive, (verifier, monitor), (state.verifier, state.monitor))
        return Verified(result, cache, verifier, monitor, padded(features, longest + 1))

    return verify


def apply_observed(
    target: LanguageModel, layers: tuple[int, ...], params: Params, tokens: Array, cache: Cache, *where: Array
) -> tuple[Array, Array | None, Cache]:
    """A target pass: (logits [B, T, V], hidden states [B, T, N, D] of `layers` or None without layers, cache).

    `where`: positions and mask, for passes whose tokens do not form a chain.
    """
    if not layers:
        logits, cache = target.apply(params, tokens, cache, *where)
        return logits, None, cache
    assert target.hidden.streams is not None  # checked by build_decoder
    return target.hidden.streams(params, tokens, cache, layers, *where)


def observed_features(drafter: Drafter, params: Params, hidden: Array | None) -> Any:
    """The result of the drafter's observer on a target pass; () for a drafter without one."""
    return () if drafter.observe is None else drafter.observe.features(params, hidden)  # type: ignore[arg-type]


def padded(tree: Any, size: int) -> Any:
    """Leaves [B, T, ...] truncated or padded to [B, size, ...], so that the branches of all widths return one shape."""

    def pad(leaf: Array) -> Array:
        missing = max(size - leaf.shape[1], 0)
        return jnp.pad(leaf[:, :size], ((0, 0), (0, missing), *[(0, 0)] * (leaf.ndim - 2)))

    return jax.tree.map(pad, tree)


def cut(state: DecodeState, tokens: Array, length: Array, context: RoundContext) -> tuple[Array, Array]:
    """Number of emitted tokens [B] after the end-of-sequence cut and the limit, and whether a stop token is among them.

    The first `length` [B] of `tokens` [B, T] were verified.
    """
    size = tokens.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)[None, :]
    stops = jnp.any(tokens[:, :, None] == state.stop_ids[:, None, :], axis=-1)
    first = jnp.min(jnp.where(stops & (index < length[:, None]), index, size), axis=1)
    emitted = jnp.minimum(jnp.minimum(length, first + 1), state.limit - state.length)
    emitted = jnp.where(context.alive, jnp.maximum(emitted, 0), 0)
    return emitted, context.alive & (first < emitted)


def append(tokens: Array, length: Array, new: Array, count: Array) -> Array:
    """Tokens [B, S] with row b's first count[b] new tokens written at length[b] and after."""
    slot = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] - length[:, None]
    inside = (slot >= 0) & (slot < count[:, None])
    return jnp.where(inside, jnp.take_along_axis(new, jnp.clip(slot, 0, new.shape[1] - 1), axis=1), tokens)
