"""One round of chains with siblings: as `decoding/rounds.py`, with further candidates at every drafted position, a mask
in the target's pass, and an accepted sibling.

A pass holds the token before the draft, the chain of drafts, and their siblings. A row's siblings begin where its chain
ends, so that rows of different shapes share a width. A sibling has the position of the draft it replaces, and by the
mask attends to the same tokens and itself. The cache slot of an accepted sibling is copied to that of the draft.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.contrib.trees.seams import TreeDraft, TreePolicy, TreeResult
from specdec_jax.contrib.trees.siblings import at_depth, entries_at, further_candidates, outcomes
from specdec_jax.decoding import draft_loop, rounds, sampling
from specdec_jax.decoding.rounds import ModelParams, Parts, Run, Verified
from specdec_jax.decoding.sampling import ACCEPT, BY_CANDIDATE, DRAFT, NEXT, draw, pick
from specdec_jax.hyperparameters import select_rows
from specdec_jax.models.attention import write
from specdec_jax.types import (
    Array,
    Cache,
    DecodeState,
    Draft,
    InTurn,
    LoopResult,
    Next,
    RoundContext,
    Source,
    VerificationResult,
)
from specdec_jax.verification._common import at_position


def decode_round(parts: Parts, params: ModelParams, run: Run) -> Run:
    """One round for all unfinished rows, as `decoding.rounds.decode_round`.

    Statistics count siblings as drafted, and accepted siblings as accepted; those by position and the record are of the
    chain, to whose accepted drafts and last token accepted siblings add.
    """
    policy, longest, (state, log_q) = parts.policy, parts.drafter.max_draft_length, run
    assert isinstance(policy, TreePolicy) and policy.beside is not None  # checked by round_of
    with jax.named_scope("draft"):
        context, uniforms, source = rounds.open_round(parts, params, state)
        loop, siblings = draft(source, policy, state.policy, context, state.key, longest, log_q)
        drafter, to_verify = source.close(loop)
        chain = rounds.draft_of(to_verify)
        free = parts.widths[-1] - 1 - chain.length
        tree = TreeDraft.of(chain, siblings, policy.beside(loop.policy, chain.length, free, context), free)
    with jax.named_scope("verify"):
        choice = rounds.narrowest(parts.widths, tree.places)
        branches = [_verification(parts, width) for width in parts.widths]
        of_siblings = sampling.uniforms(state.key, context.emitted, jnp.int32(BY_CANDIDATE), ACCEPT)
        verified = lax.switch(choice, branches, params, state, tree, context, uniforms, of_siblings)
    result: TreeResult = verified.result
    after = rounds.commit(parts, params, state, context, loop, drafter, tree, verified, choice, result.extra_tokens)
    with jax.named_scope("commit"):
        extra_tokens = jnp.clip(after.length - state.length - (result.length - 1), 0, result.extra_tokens)
        more = jnp.where(context.alive[:, None], jnp.stack([tree.places - tree.length, extra_tokens], axis=1), 0)
        counts = after.statistics._replace(
            num_draft_tokens=after.statistics.num_draft_tokens + more[:, 0],
            num_accepted_tokens=after.statistics.num_accepted_tokens + more[:, 1],
        )
        return Run(after._replace(statistics=counts), loop.log_q)


class _Memory(NamedTuple):
    """The memory of the draft loop for a source whose predictions also draw siblings."""

    inner: Any  # the source's
    going: Array  # [B] bool, rows that began
    index: Array  # [] int32, the loop's position
    siblings: Array  # [B, K, M] int32


def draft(
    source: Source, policy: TreePolicy, state: Any, context: RoundContext, key: Array, longest: int, log_q: Array | None
) -> tuple[LoopResult, Array]:
    """As `draft_loop.draft`; also the siblings [B, K, M] int32 of every draft, `policy.siblings` (M) of each."""
    uniform = lambda index: sampling.uniforms(key, context.emitted, index, DRAFT)  # noqa: E731

    def with_siblings(source: Source) -> Source:
        def open(going: Array) -> _Memory:
            none = jnp.zeros((*going.shape, longest, policy.siblings), jnp.int32)
            return _Memory(source.open(going), going, jnp.int32(0), none)

        def predict(memory: _Memory, *drafted: Array) -> tuple[Next, _Memory]:
            (following, inner), index, siblings = source.predict(memory.inner, *drafted), memory.index, memory.siblings
            if source.chosen is not True:  # lookups have no further candidates
                with jax.named_scope("draft_draw"):
                    each = lambda candidate: uniform(index + candidate * BY_CANDIDATE)  # noqa: E731
                    seen, is_sampled = following.distribution, context.warp.temperature > 0
                    further = further_candidates(seen, following.token, is_sampled, policy.siblings, each)
                siblings = lax.dynamic_update_slice_in_dim(siblings, further[:, None], index, axis=1)
            return following, _Memory(inner, memory.going, index + 1, siblings)

        keep = lambda memory, *token: memory._replace(inner=source.keep(memory.inner, *token))  # noqa: E731
        otherwise = source.otherwise and (lambda rows: with_siblings(source.otherwise(rows)))  # type: ignore[misc]
        return source._replace(open=open, predict=predict, keep=keep, otherwise=otherwise)

    loop = draft_loop.draft(with_siblings(source), policy, state, context, uniform, longest, log_q)
    if not isinstance(loop.memory, InTurn):
        return loop._replace(memory=loop.memory.inner), loop.memory.siblings
    first, second, other = loop.memory
    siblings = select_rows(second.going, second.siblings, first.siblings)
    return loop._replace(memory=InTurn(first.inner, second.inner, other)), siblings


def _verification(parts: Parts, width: int) -> Callable[..., Verified]:
    """The branch for one verification width: target pass, distributions, acceptance and next token."""
    longest, layers = parts.drafter.max_draft_length, parts.drafter.layers
    held, of_chain = min(width - 1, longest), rounds.verification_in(parts, width)

    def verify(
        params: ModelParams, state: DecodeState, tree: TreeDraft, context: RoundContext, uniforms: Array, extra: Array
    ) -> Verified:
        if held == 0:  # no drafts fit this width
            verified = of_chain(params, state, Draft(*tree[:4]), context, uniforms)
            return verified._replace(result=TreeResult(*verified.result, jnp.zeros_like(tree.length)))  # type: ignore[arg-type]
        tree = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf[:, :held], tree)
        start = context.length - 1
        last = pick(state.tokens, start)
        fed, *where = tree_inputs(last, tree, start, width, state.tokens.shape[1])
        with jax.named_scope("target_pass"):
            cache = parts.target.with_length(state.target_cache, start)
            logits, hidden, cache = rounds.apply_observed(parts.target, layers, params.target, fed, cache, *where)
        target = sampling.distributions(logits, state.warp)
        chain = jax.tree.map(lambda leaf: leaf[:, : held + 1], target)
        log_prob_accepted, next_distribution, verifier = parts.verifier.verify(state.verifier, tree, chain, context)  # type: ignore[arg-type]
        accepted = draw(jnp.exp(log_prob_accepted), uniforms[:, 0, ACCEPT])
        ends = outcomes(parts.verifier, next_distribution, tree, chain, accepted, context)
        candidate = draw(ends.chance, extra)  # 0: no sibling is accepted
        is_taken, counts = candidate > 0, tree.sibling_counts
        sibling = jnp.take_along_axis(ends.tokens, jnp.maximum(candidate - 1, 0)[:, None], axis=1)
        place = tree.length + at_depth(jnp.cumsum(counts, axis=1) - counts, accepted) + candidate
        after = jnp.where(is_taken[:, None], jnp.exp(at_position(target.log_prob, place)), ends.rest)
        token = draw(after, pick(uniforms[..., NEXT], accepted))[:, None]
        index = jnp.arange(width, dtype=jnp.int32)[None, :]  # of entries in the order of the accepted tokens
        index = jnp.where(is_taken[:, None] & (index == accepted[:, None] + 1), place[:, None], index)
        logits, hidden = jax.tree.map(lambda leaf: entries_at(leaf, index), (logits, hidden))
        cache = with_slot_moved(
            cache, start + jnp.where(is_taken, place, 0), start + jnp.where(is_taken, accepted + 1, 0)
        )
        index = jnp.arange(longest + 1, dtype=jnp.int32)[None, :]
        tokens = jnp.pad(tree.tokens, ((0, 0), (0, longest + 1 - held)))
        token = jnp.where(is_taken[:, None] & (index == accepted[:, None]), sibling, token)
        tokens = jnp.where(index < accepted[:, None], tokens, token)
        result = TreeResult(tokens, accepted + 1, is_taken.astype(jnp.int32))
        emitted = VerificationResult(result.tokens, result.emitted)
        monitor = parts.monitor.observe(state.monitor, logits, emitted, context)
        features = rounds.observed_features(parts.drafter, params.drafter, hidden)
        verifier, monitor = select_rows(context.alive, (verifier, monitor), (state.verifier, state.monitor))
        return Verified(result, cache, verifier, monitor, rounds.padded(features, longest + 1))  # type: ignore[arg-type]

    return verify


def tree_inputs(before: Array, tree: TreeDraft, start: Array, width: int, slots: int) -> tuple[Array, Array, Array]:
    """The inputs of a pass of `width` (W) places from slot start [B], that of the token `before` [B] the draft.

    Returns:
        tokens [B, W] int32, positions [B, W] int32, the slots [B, W, S] bool that a place attends to, up to its own.
    """
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    index = place - 1 - tree.length[:, None]  # index among the siblings
    ends = jnp.cumsum(tree.sibling_counts, axis=1)
    owner = jnp.sum((ends[:, None, :] <= index[:, :, None]).astype(jnp.int32), axis=2)
    is_sibling = (index >= 0) & (owner < ends.shape[1])
    owner = jnp.minimum(owner, ends.shape[1] - 1)
    candidate = index - jnp.take_along_axis(ends - tree.sibling_counts, owner, axis=1)
    flat = jnp.maximum(owner * tree.siblings.shape[2] + candidate, 0)
    sibling = jnp.take_along_axis(tree.siblings.reshape(len(before), -1), flat, axis=1, mode="clip")
    chain = jnp.pad(tree.tokens, ((0, 0), (1, max(width - 1 - tree.tokens.shape[1], 0))))[:, :width]
    tokens = jnp.where(place == 0, before[:, None], chain)
    behind = jnp.where(is_sibling, owner, place)  # a sibling at depth d attends to places 0 to d and itself
    seen = jnp.arange(slots, dtype=jnp.int32)[None, None, :] - start[:, None, None]
    mask = (seen <= behind[:, :, None]) | (seen == place[:, :, None])
    positions = start[:, None] + jnp.where(is_sibling, owner + 1, place)
    return jnp.where(is_sibling, sibling, tokens), positions, mask


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
