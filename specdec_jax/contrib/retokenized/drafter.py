"""A small language model with another vocabulary that drafts its own tokens, whose text is tokenised again as drafts.

It keeps its own version of each row's text: the spelling of each of the target's tokens, and for accepted drafts its
own tokens as drafted. After a rejection it rolls back to the last position at which tokens of both vocabularies end,
the longest common alignment; so it does if a row's text changes or is truncated. The rest is done by
`drafters/model.py` in its own tokens.

Drafts are its most probable tokens at every temperature, a function of the text. They count as chosen, not drawn, so
lossless verifiers stay lossless.

Source: universal assisted generation (UAG; arXiv 2502.05202 calls it string-level exact match), as in byte_pairs.py.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.contrib.retokenized.byte_pairs import retokenize, tables
from specdec_jax.decoding.cache_feed import feed_long, pass_of
from specdec_jax.drafters.draft_models.intersection import ROOM, with_shared_tokens
from specdec_jax.drafters.model import FED, WIDE, CatchUp, ModelDrafterState, model
from specdec_jax.loading import LoadedModel
from specdec_jax.ranges import DraftLength
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Cache,
    Drafter,
    DraftModel,
    LanguageModel,
    LoopResult,
    Next,
    Params,
    RoundContext,
    Source,
)

SPELLED = 32  # number of the target's tokens that are spelled at a time


class RetokenizedState(NamedTuple):
    """The drafter's own text, R slots, and its alignment with the row's text."""

    cache: Cache
    valid: Array  # [B] int32, number of cache entries that match `tokens`
    tokens: Array  # [B, R] int32
    text: Array  # [B, S] int32, the row's tokens that `tokens` represents
    ends: Array  # [B, S + 1] int32, number of `tokens` for each prefix of `text`; -1 inside one of `tokens`
    spelled: Array  # [B] int32, number of valid tokens of `text`


@dataclass(frozen=True, eq=False, repr=False)
class RetokenizedDrafter(Drafter):
    """A drafter whose `model`, over the common tokens, is used for scores and traces only."""


@strategy
def retokenized(
    language_model: LanguageModel, vocab_size: int, max_draft_length: DraftLength = 7, catch_up: CatchUp = 16
) -> Drafter:
    """Draft with a model with another vocabulary: at most `max_draft_length` (K) passes, and as many drafts.

    Policies decide once per pass, by the distribution over the drafter's own tokens, and learn from outcomes of the
    target's: what they keep by draft is paired with other tokens. Parameters are the `SharedParams` of `with_text`.

    Args:
        language_model: a model over the drafter's own tokens.
        vocab_size: that of the target.
        catch_up: tokens per pass for rows that resume drafting after idle rounds, as in `model`.

    Raises:
        ValueError: as `with_shared_tokens`.
    """
    shared = with_shared_tokens(language_model, vocab_size)  # for scores and traces
    own_model = with_inner_params(language_model)
    drafts = model(own_model, max_draft_length, catch_up)  # in its own tokens
    extra_slots = max_draft_length + FED  # additional slots for drafts

    def init(params: Params, batch: int, slots: int, source: Any = None) -> RetokenizedState:
        own_slots = ROOM * slots + extra_slots
        none, text = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32)
        cache = own_model.init_cache(params, batch, own_slots)
        own_tokens, ends = jnp.zeros((batch, own_slots), jnp.int32), jnp.zeros((batch, slots + 1), jnp.int32)
        return RetokenizedState(cache, none, own_tokens, text, ends, none)

    def source(params: Params, state: RetokenizedState, tokens: Array, context: RoundContext) -> Source:
        state = spelled(params, state, tokens, context.length)
        length = own_length(state)
        before = ModelDrafterState(state.cache, state.valid)
        inner = drafts.source(params, before, state.tokens, context._replace(length=length))

        def predict(memory: Any, drafted: Array, uniform: Array) -> tuple[Next, Any]:
            following, memory = inner.predict(memory, drafted, uniform)
            return following._replace(token=following.distribution.top_token), memory

        def close(loop: LoopResult) -> tuple[RetokenizedState, LoopResult]:
            (cache, valid), _ = inner.close(loop)
            with jax.named_scope("draft_retokenize"):
                again_tokens, count, ends = retokenize(params.tables, loop.tokens, loop.length, vocab_size)
            count = jnp.minimum(count, context.budget)
            after = state._replace(cache=cache, valid=valid)
            after = with_drafts(after, loop.tokens, length, again_tokens, count, ends)
            return after, loop._replace(tokens=again_tokens, length=count)

        return Source(inner.open, predict, inner.keep, close, chosen=True)

    def commit(params: Params, state: RetokenizedState, tokens: Array, length: Array) -> RetokenizedState:
        """Roll back to the last common alignment. Missing tokens are spelled and fed when the row drafts again."""
        return aligned(state, tokens, length)

    def prefill(params: Params, state: RetokenizedState, tokens: Array, length: Array) -> RetokenizedState:
        """Spell the text, and feed all but the last two tokens, which the next pass feeds."""
        state = spelled(params, aligned(state, tokens, length), tokens, length)
        wanted = jnp.maximum(own_length(state) - FED, 0)
        spelled_tokens = jnp.minimum(state.valid, wanted)
        run = pass_of(own_model, params)
        cache, valid = feed_long(run, state.cache, state.tokens, spelled_tokens, wanted, catch_up, WIDE)
        return state._replace(cache=cache, valid=jnp.maximum(state.valid, valid))

    def spelled(params: Params, state: RetokenizedState, tokens: Array, length: Array) -> RetokenizedState:
        limit = state.tokens.shape[1] - extra_slots

        def step(state: RetokenizedState) -> RetokenizedState:
            at = state.spelled[:, None] + jnp.arange(SPELLED, dtype=jnp.int32)[None, :]
            read = jnp.take_along_axis(tokens, jnp.minimum(at, tokens.shape[1] - 1), axis=1)
            pieces, count = params.pieces[read], params.count[read]
            return with_spelling(state, read, pieces, jnp.where(at < length[:, None], count, 0), length, limit)

        return lax.while_loop(lambda now: jnp.any(now.spelled < length), step, state)

    return RetokenizedDrafter(init, source, commit, max_draft_length, shared, prefill=prefill)


@functools.lru_cache(maxsize=16)
def with_inner_params(language_model: LanguageModel) -> LanguageModel:
    """The model over its own tokens, with the parameters inside `SharedParams`."""

    def init_cache(params, batch, slots, source=None):
        return language_model.init_cache(None if params is None else params.model, batch, slots, source)

    def apply(params, tokens, cache, positions=None, mask=None):
        return language_model.apply(params.model, tokens, cache, positions, mask)

    return LanguageModel(init_cache, apply, language_model.with_length, language_model.spec)


def with_text(target: LoadedModel, drafter: LoadedModel, shared: LoadedModel) -> LoadedModel:
    """The drafter with its text tokenised again for the target.

    Args:
        shared: the drafter over the common tokens, from `loading.across`.

    Raises:
        ValueError: as `check_target`.
    """
    table = tables(target.tokenizer, drafter.tokenizer, drafter.model.spec.vocab_size)
    model = DraftModel.of(shared.model).replace(draft_with=draft_with(drafter.model))
    return shared._replace(model=model, params=shared.params._replace(tables=table))


@functools.lru_cache(maxsize=16)
def draft_with(language_model: LanguageModel) -> Callable[[LanguageModel, int], Drafter]:
    """`DraftModel.draft_with` of the shared tokens, for a model over its own tokens."""

    def drafter(shared: LanguageModel, max_draft_length: int) -> Drafter:
        return retokenized(language_model, shared.spec.vocab_size, max_draft_length)

    return drafter


def own_length(state: RetokenizedState) -> Array:
    """Length [B] of the drafter's own text."""
    return jnp.take_along_axis(state.ends, state.spelled[:, None], axis=1)[:, 0]


def aligned(state: RetokenizedState, tokens: Array, length: Array) -> RetokenizedState:
    """The state rolled back to the last alignment within the text, the first `length` [B] of tokens [B, S]."""
    slot = jnp.arange(state.ends.shape[1], dtype=jnp.int32)[None, :]
    held = jnp.minimum(state.spelled, length)[:, None]
    differs = (state.text != tokens) & (slot[:, :-1] < held)
    same = jnp.minimum(held, jnp.min(jnp.where(differs, slot[:, :-1], slot[:, -1:]), axis=1, keepdims=True))
    last = jnp.max(jnp.where((state.ends >= 0) & (slot <= same), slot, 0), axis=1)
    state = state._replace(spelled=last)
    return state._replace(valid=jnp.minimum(state.valid, own_length(state)))


def with_spelling(
    state: RetokenizedState, read: Array, pieces: Array, count: Array, length: Array, limit: int
) -> RetokenizedState:
    """The state with the next tokens [B, T] spelled by the first `count` [B, T] of pieces [B, T, P].

    If the text exceeds `limit` slots, further pieces are dropped, and drafts become worse.
    """
    rows, nowhere = jnp.arange(read.shape[0])[:, None], state.tokens.shape[1]
    start, order = own_length(state)[:, None], jnp.arange(pieces.shape[2], dtype=jnp.int32)[None, None, :]
    ends = start + jnp.cumsum(count, axis=1)
    at = (ends - count)[:, :, None] + order
    at = jnp.where((order < count[:, :, None]) & (at < limit), at, nowhere)
    slots = state.spelled[:, None] + jnp.arange(read.shape[1], dtype=jnp.int32)[None, :]
    slots = jnp.where(slots < length[:, None], slots, nowhere)
    return state._replace(
        tokens=state.tokens.at[rows[:, :, None], at].set(pieces, mode="drop"),
        text=state.text.at[rows, slots].set(read, mode="drop"),
        ends=state.ends.at[rows, slots + 1].set(jnp.minimum(ends, limit), mode="drop"),
        spelled=jnp.maximum(state.spelled, jnp.minimum(state.spelled + read.shape[1], length)),
    )


def with_drafts(
    state: RetokenizedState, drafted: Array, length: Array, tokens: Array, count: Array, ends: Array
) -> RetokenizedState:
    """The state as if all drafts were accepted: `drafted` [B, K], after `length` [B] own tokens, for `count` `tokens`.

    `ends` [B, K]: the number of drafted tokens that end with each of `tokens`, -1 inside one.
    """
    rows, order = jnp.arange(drafted.shape[0])[:, None], jnp.arange(drafted.shape[1], dtype=jnp.int32)[None, :]
    slots = jnp.where(order < count[:, None], state.spelled[:, None] + order, state.tokens.shape[1])
    ends = jnp.where(ends > 0, length[:, None] + ends, -1)
    return state._replace(
        tokens=state.tokens.at[rows, length[:, None] + order].set(drafted, mode="drop"),
        text=state.text.at[rows, slots].set(tokens, mode="drop"),
        ends=state.ends.at[rows, slots + 1].set(ends, mode="drop"),
        spelled=state.spelled + count,
    )
