"""One round: draft, verify in the narrowest width that holds the longest draft, emit, commit."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.combs import Path, along_path, fitted, laid_out, place_of, place_of_child, places
from specdec_jax.decoding.expansion import child_of
from specdec_jax.decoding.phase import recorded_phase
from specdec_jax.decoding.sampling import ACCEPT, DRAFT, NEXT, distributions, draw, policy_seeds, uniforms
from specdec_jax.decoding.siblings import BY_CANDIDATE, child_outcomes, outcomes
from specdec_jax.decoding.statistics import count_round, record_round
from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import (
    Array,
    Cache,
    DecodeState,
    Distribution,
    Draft,
    Drafter,
    DraftInfo,
    LanguageModel,
    Monitor,
    MonitorState,
    Params,
    PolicyState,
    RoundContext,
    RoundInfo,
    SiblingOutcomes,
    StoppingPolicy,
    VerificationResult,
    Verifier,
    VerifierState,
)


class Parts(NamedTuple):
    """The static pieces a decoder is built of."""

    target: LanguageModel
    drafter: Drafter
    policy: StoppingPolicy
    verifier: Verifier
    monitor: Monitor
    widths: tuple[int, ...]  # verification widths, ascending; the last holds max_draft_length + 1 tokens


class ModelParams(NamedTuple):
    """The weights of both models; `drafter` is whatever the drafter's `init` wants (None for none)."""

    target: Params
    drafter: Params = None


class _Chance(NamedTuple):
    """A round's uniforms of the verification, made before the switch: in it every width would compile its own."""

    accepted: Array  # [B] float32
    beside: Array  # [B, N] float32, of a sibling, and of its child; N: 0, 1 or 2, as the rule wants them
    following: Array  # [B, K+1] float32, by how many drafts were accepted


class _Verified(NamedTuple):
    result: VerificationResult
    cache: Cache
    verifier: VerifierState
    monitor: MonitorState
    seen: Any  # what the drafter's observer read, leaves [B, K+1, ...]; () without one
    kept: Any  # what it kept of the target's hidden states, leaves [B, K+1, ...]; () without


def apply_keeping(
    target: LanguageModel, drafter: Drafter, params: ModelParams, tokens: Array, cache: Cache, *comb: Array
) -> tuple[Array, Any, Cache]:
    """The target's pass: (logits [B, T, V], what the drafter keeps of its hidden states [B, T, ...], cache).

    A comb's has positions and a mask.
    """
    features = drafter.observer.features
    if features is None:
        logits, cache = target.apply(params.target, tokens, cache, *comb)
        return logits, (), cache
    assert target.tap is not None  # build_decoder looked
    logits, hidden, cache = target.tap.apply(params.target, tokens, cache, features.layers, *comb)
    return logits, features.keep(params.drafter, hidden), cache


def decode_round(parts: Parts, params: ModelParams, state: DecodeState) -> DecodeState:
    """One round for every row that is not done. Shapes do not change; the cache is rolled back by its length."""
    context = _context(parts, state)
    with jax.named_scope("draft"):
        draft, info, drafter, policy = parts.drafter.propose(
            params.drafter,
            state.drafter,
            state.tokens,
            context,
            drafting_uniforms(state.key, context),
            parts.policy,
            state.policy,
            parts.verifier.needs_log_q,
        )
        draft = _with_siblings(parts, policy, draft, context)
    with jax.named_scope("verify"):
        choice = _narrowest(parts.widths, places(draft))
        branches = [_verification(parts, width) for width in parts.widths]
        chance = _chance(state.key, context, parts)
        verified = lax.switch(choice, branches, params, state, draft, context, chance)
    with jax.named_scope("commit"):
        threshold = parts.policy.threshold(policy)
        policy = select_rows(context.alive, parts.policy.update(policy, draft, verified.result), policy)
        emitted, stopped = _cut(state, verified.result, context)
        tokens = _append(state.tokens, state.length, verified.result.tokens, emitted)
        length = state.length + emitted
        observer = parts.drafter.observer
        if observer.features is not None:  # of the token before the draft, and of the drafts accepted
            begun = context.length - 1
            drafter = observer.features.learn(params.drafter, drafter, verified.kept, begun, emitted)
        if verified.result.beside is not None:  # what was fed in its place is no longer the text's
            before = jnp.minimum(length, state.length + verified.result.length)
            drafter = parts.drafter.commit(params.drafter, drafter, tokens, before)
        drafter = parts.drafter.commit(params.drafter, drafter, tokens, length)
        if observer.learn is not None:
            drafter = observer.learn(params.drafter, drafter, verified.seen, draft, state.tokens, context)
        width, phase = jnp.array(parts.widths, jnp.int32)[choice], recorded_phase(state.monitor, length)
        measured = _measured(draft, info, verified.result, emitted, width, threshold, phase)
        return state._replace(
            tokens=tokens,
            length=length,
            done=state.done | stopped | (length >= state.limit),
            target_cache=parts.target.with_length(verified.cache, jnp.maximum(length - 1, 0)),
            drafter=drafter,
            policy=policy,
            verifier=verified.verifier,
            monitor=verified.monitor,
            statistics=count_round(state.statistics, context.alive, measured),
            record=record_round(state.record, state.statistics.num_rounds, context.alive, measured),
        )


def _context(parts: Parts, state: DecodeState) -> RoundContext:
    alive = ~state.done
    room = jnp.minimum(parts.drafter.max_draft_length, state.limit - state.length - 1)
    return RoundContext(
        length=state.length,
        emitted=state.length - state.prompt_length,
        budget=jnp.where(alive, jnp.maximum(room, 0), 0),
        alive=alive,
        policy_seed=policy_seeds(state.key),
        warp=state.warp,
        monitor=state.monitor,
    )


def _with_siblings(parts: Parts, policy: PolicyState, draft: Draft, context: RoundContext) -> Draft:
    """The draft with what the policy wants beside it, as far as the widest verification has room."""
    if parts.policy.beside is None:
        return draft
    room = parts.widths[-1] - 1 - draft.length
    parent = None if draft.children is None else draft.children.parent
    return fitted(draft, parts.policy.beside(policy, draft.length, room, context, parent), room)


def _narrowest(widths: tuple[int, ...], drafted: Array) -> Array:
    """Index of the narrowest width that holds the longest draft and the token before it."""
    too_narrow = jnp.array(widths, jnp.int32) < jnp.max(drafted) + 1
    return jnp.minimum(jnp.sum(too_narrow.astype(jnp.int32)), len(widths) - 1)


def _verification(parts: Parts, width: int) -> Callable[..., _Verified]:
    """The branch of one width: target pass, distributions, acceptance and next token, all at that width."""
    most = parts.drafter.max_draft_length
    held = min(width - 1, most)  # drafts this width can hold

    def verify(
        params: ModelParams, state: DecodeState, draft: Draft, context: RoundContext, chance: _Chance
    ) -> _Verified:
        draft = _first(draft, held)
        logits, kept, cache = _target_pass(parts, params, state, draft, context, width)
        shown = held + 1 if draft.beside is None else width
        target = distributions(logits[:, :shown], state.warp)
        chain = jax.tree.map(lambda leaf: leaf[:, : held + 1], target)
        log_prob_accepted, next_distribution, verifier = parts.verifier.verify(state.verifier, draft, chain, context)
        accepted = draw(jnp.exp(log_prob_accepted), chance.accepted)
        following = jnp.take_along_axis(chance.following, accepted[:, None], axis=1)[:, 0]
        after, path = next_distribution(accepted), None
        if draft.beside is not None:
            ends = outcomes(parts.verifier, next_distribution, draft, chain, accepted, context)
            is_sampled = context.warp.temperature > 0
            path, after = _path(draft, target.log_prob, ends, accepted, is_sampled, chance.beside)
            logits, target, kept = along_path((logits, target, kept), accepted, path)
            cache = _moved(parts.target, cache, context.length - 1, accepted, path)
        elif parts.policy.beside is not None:  # a width without room for a draft
            path = Path(jnp.zeros_like(accepted), *[jnp.zeros((accepted.shape[0], 0), jnp.int32)] * 2)
        result = _result(draft.tokens, accepted, path, draw(after, following), most)
        verifier = select_rows(context.alive, verifier, state.verifier)
        emitted = VerificationResult(result.tokens, result.emitted)
        monitor = parts.monitor.observe(state.monitor, logits, emitted, context)
        seen = _observed(parts.drafter, target, draft, emitted, context)
        monitor = select_rows(context.alive, monitor, state.monitor)
        return _Verified(result, cache, verifier, monitor, seen, _padded(kept, most + 1))

    return verify


def _first(draft: Draft, held: int) -> Draft:
    """The first `held` drafts, which no row exceeds, with their siblings."""
    few = Draft(draft.tokens[:, :held], None, draft.one_hot[:, :held], draft.length)
    few = few._replace(log_q=None if draft.log_q is None else draft.log_q[:, :held])
    if draft.siblings is None or draft.beside is None or held == 0:
        return few
    return few._replace(siblings=draft.siblings[:, :held], beside=draft.beside[:, :held], children=draft.children)


def _target_pass(
    parts: Parts, params: ModelParams, state: DecodeState, draft: Draft, context: RoundContext, width: int
) -> tuple[Array, Any, Cache]:
    """As `apply_keeping`, over the last token, the draft and what is beside it, at that width."""
    start = context.length - 1
    last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
    cache = parts.target.with_length(state.target_cache, start)
    missing = width - 1 - draft.tokens.shape[1]
    fed, comb = jnp.pad(jnp.concatenate([last, draft.tokens], axis=1), ((0, 0), (0, missing))), ()
    if draft.beside is not None:
        fed, *comb = laid_out(last[:, 0], draft, start, width, state.tokens.shape[1])
    with jax.named_scope("target_pass"):
        return apply_keeping(parts.target, parts.drafter, params, fed, cache, *comb)


def _path(
    draft: Draft, log_p: Array, ends: SiblingOutcomes, accepted: Array, is_sampled: Array, uniform: Array
) -> tuple[Path, Array]:
    """What of the tokens beside the draft follows the accepted ones, and the distribution [B, V] of the token after."""
    assert draft.siblings is not None
    candidate, token, place, after = _step(
        ends, log_p, uniform[:, 0], lambda candidate: place_of(draft, accepted[:, None], candidate[:, None])[:, 0]
    )
    steps = [(candidate > 0, token, place)]
    if draft.children is not None:
        sibling = jnp.where(candidate > 0, accepted * draft.siblings.shape[2] + candidate - 1, -1)
        expansion = child_of(draft.children, sibling)
        ends = child_outcomes(after, draft.children, expansion, is_sampled)
        candidate, token, place, after = _step(ends, log_p, uniform[:, 1], partial(place_of_child, draft, expansion))
        steps.append((candidate > 0, token, place))
    taken, tokens, places = (jnp.stack(each, axis=1) for each in zip(*steps, strict=True))
    return Path(jnp.sum(taken, axis=1, dtype=jnp.int32), tokens, places), after


def _step(
    ends: SiblingOutcomes, log_p: Array, uniform: Array, place_of_candidate: Callable[[Array], Array]
) -> tuple[Array, Array, Array, Array]:
    """Which candidate is accepted [B], 0: none, its token and place [B], and the distribution [B, V] after it."""
    candidate = draw(ends.chance, uniform)
    token = jnp.take_along_axis(ends.tokens, jnp.maximum(candidate - 1, 0)[:, None], axis=1)[:, 0]
    place = jnp.clip(place_of_candidate(candidate), 0, log_p.shape[1] - 1)
    own = jnp.take_along_axis(log_p, place[:, None, None], axis=1)[:, 0]
    return candidate, token, place, jnp.where((candidate > 0)[:, None], jnp.exp(own), ends.rest)


def _moved(target: LanguageModel, cache: Cache, start: Array, accepted: Array, path: Path) -> Cache:
    """The target's cache with accepted siblings' slots where the drafts' were that they replace.

    One after the other: a child's slot lies behind that of its sibling's new place.
    """
    assert target.moved is not None  # build_decoder looked
    for step in range(path.place.shape[1]):
        taken = step < path.length
        source, slot = (jnp.where(taken, place, 0) for place in (path.place[:, step], accepted + 1 + step))
        cache = target.moved(cache, start + source, start + slot)
    return cache


def _observed(
    drafter: Drafter, target: Distribution, draft: Draft, result: VerificationResult, context: RoundContext
) -> Any:
    """What the drafter's observer reads, padded to K+1 positions: the branches of all widths return one shape."""
    if drafter.observer.read is None:
        return ()
    return _padded(drafter.observer.read(target, draft, result, context), drafter.max_draft_length + 1)


def _padded(tree: Any, size: int) -> Any:
    """Leaves [B, T, ...] as [B, size, ...], cut or filled up."""

    def one(leaf: Array) -> Array:
        missing = max(size - leaf.shape[1], 0)
        return jnp.pad(leaf[:, :size], ((0, 0), (0, missing), *[(0, 0)] * (leaf.ndim - 2)))

    return jax.tree.map(one, tree)


def drafting_uniforms(key: Array, context: RoundContext) -> Callable[[Array], Array]:
    """What a drafter draws with: (step []) -> [B] float32, the uniform of draft `step` of this round."""

    def uniform(step: Array) -> Array:
        return uniforms(key, context.emitted, step, DRAFT)

    return uniform


def _chance(key: Array, context: RoundContext, parts: Parts) -> _Chance:
    """What acceptance and the recovered or bonus token are drawn with; of the latter's, one entry is read."""
    each = jax.vmap(lambda accepted: uniforms(key, context.emitted, accepted, NEXT), out_axes=1)
    ends = jnp.arange(parts.drafter.max_draft_length + 1, dtype=jnp.int32)
    one = lambda index: uniforms(key, context.emitted, jnp.int32(index), ACCEPT)  # noqa: E731
    steps = (parts.policy.beside is not None) + bool(parts.policy.expanded)
    beside = [one(step * BY_CANDIDATE) for step in range(1, 1 + steps)]
    none = jnp.zeros((context.length.shape[0], 0))
    return _Chance(one(0), jnp.stack(beside, axis=1) if beside else none, each(ends))


def _result(drafts: Array, accepted: Array, path: Path | None, token: Array, most: int) -> VerificationResult:
    held = drafts.shape[1]
    index = jnp.arange(most + 1, dtype=jnp.int32)[None, :]
    tokens = jnp.pad(drafts, ((0, 0), (0, most + 1 - held)))
    after = token[:, None]
    if path is not None:
        for step, beside in enumerate(jnp.unstack(path.tokens, axis=1)):
            here = (step < path.length)[:, None] & (index == accepted[:, None] + step)
            after = jnp.where(here, beside[:, None], after)
    tokens = jnp.where(index < accepted[:, None], tokens, after)
    return VerificationResult(tokens, accepted + 1, None if path is None else path.length)


def _cut(state: DecodeState, result: VerificationResult, context: RoundContext) -> tuple[Array, Array]:
    """Tokens emitted [B] after the end-of-sequence cut and the limit, and whether a stop token was among them."""
    size = result.tokens.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)[None, :]
    stops = jnp.any(result.tokens[:, :, None] == state.stop_ids[:, None, :], axis=-1)
    stops = stops & (index < result.emitted[:, None])
    first = jnp.min(jnp.where(stops, index, size), axis=1)
    emitted = jnp.minimum(jnp.minimum(result.emitted, first + 1), state.limit - state.length)
    emitted = jnp.where(context.alive, jnp.maximum(emitted, 0), 0)
    return emitted, context.alive & (first < emitted)


def _measured(
    draft: Draft,
    info: DraftInfo,
    result: VerificationResult,
    emitted: Array,
    width: Array,
    threshold: Array,
    phase: Array,
) -> RoundInfo:
    """The round as it is counted and recorded."""
    none = jnp.zeros_like(emitted)
    beside = none if result.beside is None else jnp.clip(emitted - (result.length - 1), 0, result.beside)
    return RoundInfo(
        proposed=draft.tokens,
        drafted=draft.length,
        accepted=jnp.minimum(result.length - 1, emitted),
        emitted=emitted,
        drafter_passes=info.passes,
        discarded=info.discarded,
        width=jnp.broadcast_to(width, emitted.shape),
        entropy=info.entropy,
        max_prob=info.max_prob,
        threshold=threshold.astype(jnp.float32),
        drafter_id=info.drafter_id,
        phase=phase,
        siblings=places(draft) - draft.length,
        by_sibling=beside,
    )


def _append(tokens: Array, length: Array, new: Array, count: Array) -> Array:
    """Row b's tokens with its first count[b] new ones written from length[b] on."""
    slot = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] - length[:, None]
    inside = (slot >= 0) & (slot < count[:, None])
    return jnp.where(inside, jnp.take_along_axis(new, jnp.clip(slot, 0, new.shape[1] - 1), axis=1), tokens)
