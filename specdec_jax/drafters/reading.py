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

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.cache_feed import feed_long, keep_reads, noted, reads_at
from specdec_jax.decoding.draft_loop import Next, Source, check_length
from specdec_jax.decoding.expansion import Fed
from specdec_jax.drafters.model import (
    FED,
    WIDE,
    at_end,
    first_pass,
    model,
    next_of,
    next_of_each,
    still_valid,
    where_fed,
    with_token,
)
from specdec_jax.drafters.retokenized import retokenized
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Cache,
    Draft,
    Drafter,
    DraftInfo,
    Features,
    LanguageModel,
    Observer,
    Params,
    PolicyState,
    Reading,
    RoundContext,
    StoppingPolicy,
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
    owns: Array | None  # [B, K, P] float32, the same of every draft, where its siblings are fed too


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

    def propose(
        params: Params,
        state: ReadingState,
        tokens: Array,
        context: RoundContext,
        uniform: Callable[[Array], Array],
        policy: StoppingPolicy,
        policy_state: PolicyState,
        keep_log_q: bool,
    ) -> tuple[Draft, DraftInfo, ReadingState, PolicyState]:
        def open_source(going: Array) -> Source:
            wanted = jnp.where(going, _missing(state, context.length), 0)
            with jax.named_scope("draft_feed"):
                cache, _ = feed_long(fed_with(state), params, state.cache, tokens, state.valid, wanted, catch_up, WIDE)
            drafts = max_draft_length if policy.expanded else None
            return _source(language_model, params, state._replace(cache=cache), tokens, context, drafts)

        shape = (tokens.shape[0], max_draft_length, language_model.spec.vocab_size)
        log_q = jnp.full(shape, -jnp.inf, jnp.float32) if keep_log_q else None
        end = draft_loop.draft(open_source, policy, policy_state, context, uniform, max_draft_length, log_q)
        chosen, passes = jnp.zeros(end.tokens.shape, bool), end.predictions
        draft = Draft(end.tokens, end.log_q, chosen, end.length, end.siblings, children=end.children)
        info = DraftInfo(passes, passes - end.length, end.entropy, end.max_prob, jnp.zeros_like(end.length))
        # Only the first pass read the target; the entries of later ones are fed anew if their tokens are accepted.
        fed = jnp.where(passes > 0, context.length, state.valid)
        after = state._replace(cache=end.memory.cache, valid=jnp.maximum(state.valid, fed))
        return draft, info, after, end.policy

    def commit(params: Params, state: ReadingState, tokens: Array, length: Array) -> ReadingState:
        """Roll back to what still holds. What is missing is fed when the row drafts again, not while it sits out.

        What was read stays: a drafter that sits out is told of old lengths, and a text that grows is read first.
        """
        del params, tokens
        return state._replace(valid=still_valid(state.valid, length))

    def prefill(params: Params, state: ReadingState, tokens: Array, length: Array) -> ReadingState:
        """Feed what is missing and was read, up to the last two tokens."""
        state = commit(params, state, tokens, length)
        wanted = _missing(state, length)
        cache, valid = feed_long(fed_with(state), params, state.cache, tokens, state.valid, wanted, catch_up, WIDE)
        return state._replace(cache=cache, valid=valid)

    def fed_with(state: ReadingState) -> LanguageModel:
        return language_model._replace(apply=_fed_with(language_model, reads, state.reads))

    def learn(params: Params, state: ReadingState, kept: Array, start: Array, count: Array) -> ReadingState:
        del params
        reads = keep_reads(state.reads, kept, start, count)
        return state._replace(reads=reads, known=jnp.where(count > 0, start + count + 1, state.known))

    features = Features(reads.layers, reads.target_width, reads.read, learn)
    observer = Observer(features=features)
    return Drafter(init, propose, commit, max_draft_length, language_model, observer, prefill, draws_siblings=True)


def drafter_of(language_model: LanguageModel, max_draft_length: int = 7) -> Drafter:
    """The drafter that drafts with this model, whether it reads its target, or has its text tokenised again, or not."""
    if language_model.retokenizing is not None:
        return retokenized(language_model, max_draft_length)
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
    logits, hidden, cache = _pass(language_model, params, cache, last, reads, end)
    return at_end(logits, end), _own(language_model, params, hidden, end), cache


def _pass(
    language_model: LanguageModel, params: Params, cache: Cache, last: Array, reads: Array, end: Array, *where: Array
) -> tuple[Array, Array, Cache]:
    """(logits [B, FED + W, V], hidden states [B, FED + W, D], cache) of the last tokens, and of siblings at `where`."""
    assert language_model.reading is not None
    cache = language_model.with_length(cache, jnp.maximum(end - FED, 0))
    return language_model.reading.apply(params, last, reads, cache, *where)


def _own(language_model: LanguageModel, params: Params, hidden: Array, end: Array) -> Array:
    """What the token after texts of `end` [B] is fed with, [B, P]."""
    assert language_model.reading is not None
    return language_model.reading.own(params, at_end(hidden, end)[:, None])[:, 0]


def _source(
    language_model: LanguageModel,
    params: Params,
    state: ReadingState,
    tokens: Array,
    context: RoundContext,
    drafts: int | None,
) -> Source:
    """The next distributions after each row's `tokens` [B, S]: a pass of the last two tokens for each.

    `drafts` (K) where siblings are fed too.
    """

    def following(memory: _Memory, drafted: Array) -> tuple[Next, _Memory]:
        end = context.length + drafted
        with jax.named_scope("draft_pass"):
            logits, own, cache = last_pass(language_model, params, memory.cache, memory.last, memory.reads, end)
        found = next_of(language_model.reduced, params, cache, logits, context)
        return found, memory._replace(cache=cache, own=own)

    def beside(memory: _Memory, drafted: Array, fed: Fed) -> tuple[Next, tuple[Next, ...], _Memory]:
        assert memory.owns is not None
        end = context.length + drafted
        with jax.named_scope("draft_pass"):
            both = jnp.concatenate([memory.last, fed.token], axis=1)
            read = jnp.take_along_axis(memory.owns, fed.depth[:, :, None], axis=1, mode="clip")
            read = jnp.concatenate([memory.reads, read], axis=1)
            where = where_fed(context.length, jnp.maximum(end - FED, 0), fed, tokens.shape[1])
            logits, hidden, cache = _pass(language_model, params, memory.cache, both, read, end, *where)
            own = _own(language_model, params, hidden, end)
        here = jnp.arange(memory.owns.shape[1], dtype=jnp.int32)[None, :, None] == drafted[:, None, None]
        owns = jnp.where(here, own[:, None], memory.owns)
        found = next_of_each(language_model.reduced, params, cache, logits, end, context)
        return *found, memory._replace(cache=cache, own=own, owns=owns)

    def keep(memory: _Memory, token: Array, drawn: Array, drafted: Array) -> _Memory:
        length = context.length + drafted
        longer = with_token(memory.last, token, length), with_token(memory.reads, memory.own, length)
        last = jnp.where(drawn[:, None], longer[0], memory.last)
        return memory._replace(last=last, reads=jnp.where(drawn[:, None, None], longer[1], memory.reads))

    cache, last = first_pass(language_model, params, state.cache, tokens, context.length)
    first = reads_at(state.reads, cache.length, FED)
    own = jnp.zeros_like(first[:, 0])
    owns = None if drafts is None else jnp.zeros((own.shape[0], drafts, own.shape[1]), own.dtype)
    return Source(_Memory(cache, last, first, own, owns), following, keep, beside)
