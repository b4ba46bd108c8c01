"""One round of chains with siblings: as `decoding/rounds.py`, with a mask in the target's pass and an accepted path."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.contrib.trees import draft_loop
from specdec_jax.contrib.trees.expansion import child_of
from specdec_jax.contrib.trees.layout import Path, gather_path, place_of, place_of_child, places, tree_inputs, truncated
from specdec_jax.contrib.trees.seams import SiblingOutcomes, TreeDraft, TreePolicy, TreeResult
from specdec_jax.contrib.trees.siblings import child_outcomes, outcomes
from specdec_jax.contrib.trees.sources import expanding
from specdec_jax.decoding import sampling
from specdec_jax.decoding.rounds import (
    ModelParams,
    Parts,
    Run,
    Verified,
    apply_observed,
    commit,
    draft_of,
    narrowest,
    open_round,
    padded,
    take,
)
from specdec_jax.decoding.sampling import ACCEPT, BY_CANDIDATE, DRAFT, NEXT, distributions, draw
from specdec_jax.hyperparameters import select_rows
from specdec_jax.models.attention import write
from specdec_jax.types import Array, Cache, DecodeState, RoundContext, VerificationResult


class _Uniforms(NamedTuple):
    """A round's uniforms for verification, drawn before the switch, where every width would compile them."""

    accepted: Array  # [B] float32
    following: Array  # [B, K+1] float32, by the number of accepted drafts
    siblings: Array  # [B, N] float32, for a sibling, and its child; N is 1, or 2 if the policy expands siblings


def decode_round(parts: Parts, params: ModelParams, run: Run) -> Run:
    """One round for all unfinished rows, as `decoding.rounds.decode_round`.

    Statistics count the whole tree as drafted, and accepted siblings and children as accepted; those by position and
    the record are of the chain, to whose accepted drafts and last token accepted siblings and children add.
    """
    policy, longest, (state, log_q) = parts.policy, parts.drafter.max_draft_length, run
    assert isinstance(policy, TreePolicy) and policy.beside is not None  # checked by check_parts
    with jax.named_scope("draft"):
        context, of_chain, source = open_round(parts, params, state)
        predict_beside = None
        if policy.expanded:
            slots = state.tokens.shape[1]
            source, predict_beside = expanding(source, parts.drafter, params.drafter, context, slots)
        uniform = lambda index: sampling.uniforms(state.key, context.emitted, index, DRAFT)  # noqa: E731
        drafted = draft_loop.draft(source, predict_beside, policy, state.policy, context, uniform, longest, log_q)
        drafter, to_verify = source.close(drafted.chain)
        chain = draft_of(to_verify)
        free = parts.widths[-1] - 1 - chain.length
        parent = None if drafted.children is None else drafted.children.parent
        wanted = policy.beside(drafted.chain.policy, chain.length, free, context, parent)
        draft = truncated(TreeDraft(*chain, siblings=drafted.siblings, children=drafted.children), wanted, free)
    with jax.named_scope("verify"):
        choice = narrowest(parts.widths, places(draft))
        branches = [_verification(parts, width) for width in parts.widths]
        uniforms = _uniforms(of_chain, state.key, context, parts)
        verified = lax.switch(choice, branches, params, state, draft, context, uniforms)
    result: TreeResult = verified.result
    after = commit(parts, params, state, context, drafted.chain, drafter, draft, verified, choice, result.extra_tokens)
    with jax.named_scope("commit"):
        extra_tokens = jnp.clip(after.length - state.length - (result.length - 1), 0, result.extra_tokens)
        more = jnp.where(context.alive[:, None], jnp.stack([places(draft) - draft.length, extra_tokens], axis=1), 0)
        counts = after.statistics._replace(
            num_draft_tokens=after.statistics.num_draft_tokens + more[:, 0],
            num_accepted_tokens=after.statistics.num_accepted_tokens + more[:, 1],
        )
        return Run(after._replace(statistics=counts), drafted.chain.log_q)


def _uniforms(of_chain: Array, key: Array, context: RoundContext, parts: Parts) -> _Uniforms:
    steps = 2 if getattr(parts.policy, "expanded", 0) else 1
    index = [jnp.int32(step * BY_CANDIDATE) for step in range(1, 1 + steps)]
    siblings = [sampling.uniforms(key, context.emitted, each, ACCEPT) for each in index]
    return _Uniforms(of_chain[:, 0, ACCEPT], of_chain[..., NEXT], jnp.stack(siblings, axis=1))


def _verification(parts: Parts, width: int) -> Callable[..., Verified]:
    """The branch for one verification width: target pass, distributions, acceptance and next token."""
    longest = parts.drafter.max_draft_length
    held = min(width - 1, longest)  # number of drafts that fit this width

    def verify(
        params: ModelParams, state: DecodeState, draft: TreeDraft, context: RoundContext, uniforms: _Uniforms
    ) -> Verified:
        draft = _first(draft, held)
        logits, hidden, cache = _target_pass(parts, params, state, draft, context, width)
        shown = held + 1 if draft.sibling_counts is None else width
        logits, hidden = jax.tree.map(lambda leaf: leaf[:, :shown], (logits, hidden))
        target = distributions(logits, state.warp)
        chain = jax.tree.map(lambda leaf: leaf[:, : held + 1], target)
        log_prob_accepted, next_distribution, verifier = parts.verifier.verify(state.verifier, draft, chain, context)  # type: ignore[arg-type]
        accepted = draw(jnp.exp(log_prob_accepted), uniforms.accepted)
        following = jnp.take_along_axis(uniforms.following, accepted[:, None], axis=1)[:, 0]
        if draft.sibling_counts is None:  # no drafts fit this width
            path = Path(jnp.zeros_like(accepted), *[jnp.zeros((accepted.shape[0], 0), jnp.int32)] * 2)
            after = next_distribution(accepted)
        else:
            ends = outcomes(parts.verifier, next_distribution, draft, chain, accepted, context)
            is_sampled = context.warp.temperature > 0
            path, after = _path(draft, target.log_prob, ends, accepted, is_sampled, uniforms.siblings)
            logits, hidden = gather_path((logits, hidden), accepted, path)
            cache = _moved(cache, context.length - 1, accepted, path)
        result = _result(draft.tokens, accepted, path, draw(after, following), longest)
        emitted = VerificationResult(result.tokens, result.emitted)
        monitor = parts.monitor.observe(state.monitor, logits, emitted, context)
        taken = take(parts.drafter, params.drafter, hidden)
        verifier, monitor = select_rows(context.alive, (verifier, monitor), (state.verifier, state.monitor))
        return Verified(result, cache, verifier, monitor, padded(taken, longest + 1))  # type: ignore[arg-type]

    return verify


def _first(draft: TreeDraft, held: int) -> TreeDraft:
    """The first `held` drafts with their siblings; no row has more."""
    log_q = None if draft.log_q is None else draft.log_q[:, :held]
    few = TreeDraft(draft.tokens[:, :held], log_q, draft.one_hot[:, :held], draft.length)
    if draft.siblings is None or draft.sibling_counts is None or held == 0:
        return few
    return few._replace(
        siblings=draft.siblings[:, :held], sibling_counts=draft.sibling_counts[:, :held], children=draft.children
    )


def _target_pass(
    parts: Parts, params: ModelParams, state: DecodeState, draft: TreeDraft, context: RoundContext, width: int
) -> tuple[Array, Array | None, Cache]:
    """As `apply_observed`, over the last token, the draft, its siblings and children, at this width."""
    start = context.length - 1
    last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
    cache = parts.target.with_length(state.target_cache, start)
    missing = width - 1 - draft.tokens.shape[1]
    fed, comb = jnp.pad(jnp.concatenate([last, draft.tokens], axis=1), ((0, 0), (0, missing))), ()
    if draft.sibling_counts is not None:
        fed, *comb = tree_inputs(last[:, 0], draft, start, width, state.tokens.shape[1])
    with jax.named_scope("target_pass"):
        return apply_observed(parts.target, parts.drafter.layers, params.target, fed, cache, *comb)


def _path(
    draft: TreeDraft, log_p: Array, ends: SiblingOutcomes, accepted: Array, is_sampled: Array, uniform: Array
) -> tuple[Path, Array]:
    """The accepted sibling and child after the accepted drafts, and the distribution [B, V] of the next token."""
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
    taken, tokens, where = (jnp.stack(each, axis=1) for each in zip(*steps, strict=True))
    return Path(jnp.sum(taken, axis=1, dtype=jnp.int32), tokens, where), after


def _step(
    ends: SiblingOutcomes, log_p: Array, uniform: Array, place_of_candidate: Callable[[Array], Array]
) -> tuple[Array, Array, Array, Array]:
    """The accepted candidate [B] (0: none), its token and place [B], and the distribution [B, V] after it."""
    candidate = draw(ends.chance, uniform)
    token = jnp.take_along_axis(ends.tokens, jnp.maximum(candidate - 1, 0)[:, None], axis=1)[:, 0]
    place = jnp.clip(place_of_candidate(candidate), 0, log_p.shape[1] - 1)
    log_p_there = jnp.take_along_axis(log_p, place[:, None, None], axis=1)[:, 0]
    return candidate, token, place, jnp.where((candidate > 0)[:, None], jnp.exp(log_p_there), ends.rest)


def _moved(cache: Cache, start: Array, accepted: Array, path: Path) -> Cache:
    """The target's cache with the slots of accepted siblings copied to those of the drafts they replace.

    In order: a child's slot is after its sibling's new slot.
    """
    for step in range(path.place.shape[1]):
        taken = step < path.length
        source, slot = (jnp.where(taken, place, 0) for place in (path.place[:, step], accepted + 1 + step))
        cache = with_slot_moved(cache, start + source, start + slot)
    return cache


def with_slot_moved(cache: Cache, source: Array, slot: Array) -> Cache:
    """Copies slot source[b] of row b to slot[b] in every leaf: keys and values [B, H, S, D] on axis 2, a table's tokens
    [B, S] on axis 1. Lengths [B] are unchanged.
    """

    def copied(leaf: Array) -> Array:
        if leaf.ndim == 4:
            return write(leaf, jnp.take_along_axis(leaf, source[:, None, None, None], axis=2), slot)
        rows = jnp.arange(slot.shape[0], dtype=jnp.int32)
        return leaf if leaf.ndim == 1 else leaf.at[rows, slot].set(leaf[rows, source])

    return jax.tree.map(copied, cache)


def _result(drafts: Array, accepted: Array, path: Path, token: Array, longest: int) -> TreeResult:
    held = drafts.shape[1]
    index = jnp.arange(longest + 1, dtype=jnp.int32)[None, :]
    tokens = jnp.pad(drafts, ((0, 0), (0, longest + 1 - held)))
    after = token[:, None]
    for step, there in enumerate(jnp.unstack(path.tokens, axis=1)):
        here = (step < path.length)[:, None] & (index == accepted[:, None] + step)
        after = jnp.where(here, there[:, None], after)
    return TreeResult(jnp.where(index < accepted[:, None], tokens, after), accepted + 1, path.length)
