"""A small language model that reads its target's hidden states, as drafter (models/llama_reading.py).

What the target's layers left at a position is projected in the target's own pass, and kept for the position after it:
[B, S, P] beside the drafter's cache. So the first pass of a round reads the target, and whoever sat out catches up from
what was kept. Later passes of the round read the drafter's own last state: the target has not been there. Accepted
drafts are fed again with what the target left at them, so that nothing in the cache stands in for the target.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.decoding.cache_feed import feed_long, keep_reads, noted, reads_at
from specdec_jax.drafters._checks import check_length
from specdec_jax.drafters.model import FED, WIDE, at_end, first_pass, model, next_of, still_valid, with_token
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Cache,
    Distribution,
    Drafted,
    Drafter,
    LanguageModel,
    Next,
    Observer,
    Params,
    Reading,
    RoundContext,
    Seen,
    Source,
)


class ReadingState(NamedTuple):
    cache: Cache
    valid: Array  # [B] int32, entries of the cache that hold the row's own tokens, fed with what the target left
    reads: Array  # [B, S, P], slot t: what was read at position t - 1; slot 0 is zero
    known: Array  # [B] int32, slots of `reads` that count; what lies beyond is garbage and never read


class _Memory(NamedTuple):
    """What the draft loop carries."""

    cache: Cache
    last: Array  # [B, FED] int32, the text's last tokens
    reads: Array  # [B, FED, P] float32, what each of them is fed with
    own: Array  # [B, P] float32, what the next token will be: the model's own state after the last


@strategy
def reading(language_model: LanguageModel, max_draft_length: int = 7, catch_up: int = 4) -> Drafter:
    """Draft with a model that reads its target, up to `max_draft_length` (K) tokens a round.

    Args:
        catch_up: tokens a pass feeds to rows that begin to draft: accepted drafts, and rounds they sat out. Of many
            and of prompts most go in `WIDE` a pass.

    Raises:
        ValueError: a model that reads no target, or a number below its least value.
    """
    check_length(max_draft_length)
    if catch_up < FED:
        raise ValueError(f"catch_up must be at least {FED}, got {catch_up}")
    if language_model.reading is None:
        raise ValueError("this model reads no target: drafters.model drafts with it")
    reads = language_model.reading

    def init(params: Params, batch: int, slots: int, source: Any = None) -> ReadingState:
        del source
        cache, none = language_model.init_cache(params, batch, slots), jnp.zeros((batch,), jnp.int32)
        return ReadingState(cache, none, jnp.zeros((batch, slots, reads.width), reads.dtype), none + 1)

    def source(params: Params, state: ReadingState, tokens: Array, context: RoundContext) -> Source:
        def open(going: Array) -> _Memory:
            wanted = jnp.where(going, _missing(state, context.length), 0)
            with jax.named_scope("draft_feed"):
                cache, _ = feed_long(fed_with(state), params, state.cache, tokens, state.valid, wanted, catch_up, WIDE)
            cache, last = first_pass(language_model, params, cache, tokens, context.length)
            first = reads_at(state.reads, cache.length, FED)
            return _Memory(cache, last, first, jnp.zeros_like(first[:, 0]))

        def predict(memory: _Memory, drafted: Array, uniform: Array) -> tuple[Next, _Memory]:
            end = context.length + drafted
            with jax.named_scope("draft_pass"):
                logits, own, cache = last_pass(language_model, params, memory.cache, memory.last, memory.reads, end)
            found = next_of(language_model.reduced, params, cache, logits, context, uniform)
            return found, memory._replace(cache=cache, own=own)

        def keep(memory: _Memory, token: Array, drawn: Array, drafted: Array) -> _Memory:
            length = context.length + drafted
            longer = with_token(memory.last, token, length), with_token(memory.reads, memory.own, length)
            last = jnp.where(drawn[:, None], longer[0], memory.last)
            return memory._replace(last=last, reads=jnp.where(drawn[:, None, None], longer[1], memory.reads))

        def close(drafted: Drafted) -> tuple[ReadingState, Drafted]:
            # Only the first pass read the target; entries of later ones are fed anew if their tokens are accepted.
            fed = jnp.where(drafted.passes > 0, context.length, state.valid)
            return state._replace(cache=drafted.memory.cache, valid=jnp.maximum(state.valid, fed)), drafted

        return Source(open, predict, keep, close)

    def commit(
        params: Params, state: ReadingState, tokens: Array, length: Array, seen: Seen | None = None
    ) -> ReadingState:
        """Roll back to what still holds. What is missing is fed when the row drafts again, not while it sits out.

        What was read stays: a drafter that sits out is called with old lengths.
        """
        del params, tokens
        if seen is not None:
            kept = keep_reads(state.reads, seen.taken, seen.start, seen.count)
            known = jnp.where(seen.count > 0, seen.start + seen.count + 1, state.known)
            state = state._replace(reads=kept, known=known)
        return state._replace(valid=still_valid(state.valid, length))

    def prefill(
        params: Params, state: ReadingState, tokens: Array, length: Array, seen: Seen | None = None
    ) -> ReadingState:
        """Feed what is missing and was read, up to the last two tokens."""
        state = commit(params, state, tokens, length, seen)
        wanted = _missing(state, length)
        cache, valid = feed_long(fed_with(state), params, state.cache, tokens, state.valid, wanted, catch_up, WIDE)
        return state._replace(cache=cache, valid=valid)

    def fed_with(state: ReadingState) -> LanguageModel:
        return language_model._replace(apply=_fed_with(language_model, reads, state.reads))

    def take(params: Params, hidden: Array | None, distributions: Distribution | None) -> Array:
        del distributions
        assert hidden is not None
        return reads.read(params, hidden)

    observer = Observer(take, reads.layers, reads.target_width)
    return Drafter(init, source, commit, max_draft_length, language_model, observer, prefill)


def drafter_of(language_model: LanguageModel, max_draft_length: int = 7) -> Drafter:
    """The drafter that drafts with this model, whether it reads its target or not."""
    return (model if language_model.reading is None else reading)(language_model, max_draft_length)


def _missing(state: ReadingState, length: Array) -> Array:
    """Entries [B] that the cache should hold before a pass of the last two tokens."""
    return jnp.maximum(jnp.minimum(length, state.known) - FED, 0)


def _fed_with(language_model: LanguageModel, reading: Reading, reads: Array) -> Callable[..., tuple[Array, Cache]]:
    """The model's pass over known text, whose reads lie at the tokens' own slots."""

    def apply(params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        here = reads_at(reads, cache.length, tokens.shape[1])
        logits, _, cache = reading.apply(params, tokens, here, noted(language_model, params, cache, tokens))
        return logits, cache

    return apply


def last_pass(
    language_model: LanguageModel, params: Params, cache: Cache, last: Array, reads: Array, end: Array
) -> tuple[Array, Array, Cache]:
    """A pass of the last two tokens [B, FED] of texts of `end` [B], and what was read before each [B, FED, P].

    Gives what comes next: logits [B, V], of a reduced head [B, N]; and what it will be fed with, its own state [B, P].
    """
    assert language_model.reading is not None
    cache = language_model.with_length(cache, jnp.maximum(end - FED, 0))
    logits, hidden, cache = language_model.reading.apply(params, last, reads, cache)
    own = language_model.reading.own(params, at_end(hidden, end)[:, None])[:, 0]
    return at_end(logits, end), own, cache
