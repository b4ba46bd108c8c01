"""A small language model that reads its target's hidden states, as drafter.

The target's hidden states at a position are projected in the target's own pass and stored as features for the next
position: [B, S, P] alongside the drafter's cache. The first pass of a round uses them, and so does a row that catches
up after idle rounds. Later passes of the round use the drafter's own last hidden state, because the target has not
processed those positions. Accepted drafts are fed again with the target's features, which the cache then holds.

Sources: EAGLE (arXiv 2401.15077, section 4.1) and EAGLE-3 (arXiv 2503.01840, section 3.1).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding.cache_feed import Pass, feed_long, note_tokens, window
from specdec_jax.decoding.teacher_forcing import store_reads
from specdec_jax.drafters.model import FED, WIDE, CatchUp, at_end, first_pass, model, next_of, still_valid, with_token
from specdec_jax.drafters.no_drafter import no_drafter
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
    Observer,
    Params,
    RoundContext,
    Seen,
    Source,
)


class ReadingState(NamedTuple):
    cache: Cache
    valid: Array  # [B] int32, number of cache entries that match the row's text, fed with the target's features
    reads: Array  # [B, S, P], slot t: the features of position t - 1; slot 0 is zero
    num_reads: Array  # [B] int32, number of valid slots of `reads`; the others are never read


class _Memory(NamedTuple):
    """The memory of the draft loop."""

    cache: Cache
    last: Array  # [B, FED] int32, the text's last tokens
    reads: Array  # [B, FED, P] float32, features fed with each of them
    stand_in: Array  # [B, P] float32, features fed with the next token, from the drafter's own last state


@strategy
def reading(language_model: LanguageModel, max_draft_length: DraftLength = 7, catch_up: CatchUp = 4) -> Drafter:
    """Draft with a model that reads its target's hidden states, up to `max_draft_length` (K) tokens per round.

    Args:
        catch_up: tokens per pass for rows that begin to draft: accepted drafts, and the tokens of idle rounds. Most of
            a long text or prompt is fed `WIDE` tokens per pass.

    Raises:
        ValueError: a model that does not read its target.
    """
    draft_model = DraftModel.of(language_model)
    reads = draft_model.reading
    if reads is None:
        raise ValueError("this model reads no target: drafters.model drafts with it")

    def init(params: Params, batch: int, slots: int, source: Any = None) -> ReadingState:
        cache, none = language_model.init_cache(params, batch, slots), jnp.zeros((batch,), jnp.int32)
        return ReadingState(cache, none, jnp.zeros((batch, slots, reads.width), reads.dtype), none + 1)

    def source(params: Params, state: ReadingState, tokens: Array, context: RoundContext) -> Source:
        def open(going: Array) -> _Memory:
            wanted = jnp.where(going, _missing(state, context.length), 0)
            with jax.named_scope("draft_feed"):
                cache, _ = feed_long(pass_of(params, state), state.cache, tokens, state.valid, wanted, catch_up, WIDE)
            cache, last = first_pass(language_model, params, cache, tokens, context.length)
            first = window(state.reads, cache.length, FED).astype(jnp.float32)
            return _Memory(cache, last, first, jnp.zeros_like(first[:, 0]))

        def predict(memory: _Memory, drafted: Array, uniform: Array) -> tuple[Next, _Memory]:
            end = context.length + drafted
            with jax.named_scope("draft_pass"):
                logits, stand_in, cache = last_pass(draft_model, params, memory.cache, memory.last, memory.reads, end)
            following = next_of(draft_model.head, params, cache, logits, context, uniform)
            return following, memory._replace(cache=cache, stand_in=stand_in)

        def keep(memory: _Memory, token: Array, is_drafted: Array, drafted: Array) -> _Memory:
            length = context.length + drafted
            longer = with_token(memory.last, token, length), with_token(memory.reads, memory.stand_in, length)
            last = jnp.where(is_drafted[:, None], longer[0], memory.last)
            return memory._replace(last=last, reads=jnp.where(is_drafted[:, None, None], longer[1], memory.reads))

        def close(loop: LoopResult) -> tuple[ReadingState, LoopResult]:
            # Only the first pass used the target's features; later entries are recomputed if their tokens are accepted.
            fed = jnp.where(loop.passes > 0, context.length, state.valid)
            return state._replace(cache=loop.memory.cache, valid=jnp.maximum(state.valid, fed)), loop

        return Source(open, predict, keep, close)

    def commit(
        params: Params, state: ReadingState, tokens: Array, length: Array, seen: Seen | None = None
    ) -> ReadingState:
        """Roll the cache back to the text. Missing tokens are fed when the row drafts again.

        The features stay valid: an idle drafter is called with old lengths.
        """
        if seen is not None:
            after = store_reads(state.reads, seen.features, seen.start, seen.count)
            num_reads = jnp.where(seen.count > 0, seen.start + seen.count + 1, state.num_reads)
            state = state._replace(reads=after, num_reads=num_reads)
        return state._replace(valid=still_valid(state.valid, length))

    def prefill(
        params: Params, state: ReadingState, tokens: Array, length: Array, seen: Seen | None = None
    ) -> ReadingState:
        """Feed the tokens that have features, up to the last two."""
        state = commit(params, state, tokens, length, seen)
        wanted = _missing(state, length)
        cache, valid = feed_long(pass_of(params, state), state.cache, tokens, state.valid, wanted, catch_up, WIDE)
        return state._replace(cache=cache, valid=valid)

    def pass_of(params: Params, state: ReadingState) -> Pass:
        """A pass over known text, with the stored features."""

        def run(tokens: Array, start: Array, cache: Cache) -> Cache:
            cache = note_tokens(draft_model, params, language_model.with_length(cache, start), tokens)
            here = window(state.reads, start, tokens.shape[1]).astype(jnp.float32)
            return reads.apply(params, tokens, here, cache)[2]

        return run

    observer = Observer(reads.read, reads.layers, reads.target_width)
    return Drafter(init, source, commit, max_draft_length, language_model, observer, prefill)


def drafter_of(language_model: LanguageModel | None, max_draft_length: int = 7) -> Drafter:
    """The drafter for a model: by its `draft_with` if it has one, else `reading` or `model`. Raises as they do.

    None: plain decoding.
    """
    if language_model is None:
        return no_drafter()
    draft_model = DraftModel.of(language_model)
    if draft_model.draft_with is not None:
        return draft_model.draft_with(draft_model, max_draft_length)
    return (model if draft_model.reading is None else reading)(language_model, max_draft_length)


def _missing(state: ReadingState, length: Array) -> Array:
    """Number of entries [B] that the cache must hold before a pass over the last two tokens."""
    return jnp.maximum(jnp.minimum(length, state.num_reads) - FED, 0)


def last_pass(
    draft_model: DraftModel, params: Params, cache: Cache, last: Array, reads: Array, end: Array
) -> tuple[Array, Array, Cache]:
    """A pass over the last two tokens [B, FED] of texts of `end` [B] tokens, with their features [B, FED, P].

    Returns the next token's logits, [B, V] or [B, N] with a reduced head, its features [B, P], and the cache.
    """
    assert draft_model.reading is not None
    cache = draft_model.with_length(cache, jnp.maximum(end - FED, 0))
    logits, hidden, cache = draft_model.reading.apply(params, last, reads, cache)
    stand_in = draft_model.reading.stand_in(params, at_end(hidden, end)[:, None])[:, 0]
    return at_end(logits, end), stand_in, cache
