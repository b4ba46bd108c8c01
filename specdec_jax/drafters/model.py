"""A small language model as drafter: the draft loop over its cache and its passes.

Each pass feeds a row's last two tokens: the pass that writes the second-last entry is then the same one that follows a
fully accepted round, whose last draft was never fed, and on CPUs a bf16 matrix product of a single row takes a path ten
times slower than of two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.cache_feed import feed, feed_long, noted, window
from specdec_jax.decoding.draft_loop import Drawn, Next, Source, check_length
from specdec_jax.decoding.expansion import Fed
from specdec_jax.decoding.sampling import distribution
from specdec_jax.decoding.siblings import candidates
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Cache,
    Distribution,
    Draft,
    Drafter,
    DraftInfo,
    LanguageModel,
    Params,
    PolicyState,
    ReducedHead,
    RoundContext,
    StoppingPolicy,
)

FED = 2  # tokens fed by one drafter pass
WIDE = 64  # tokens a pass of long texts


class ModelDrafterState(NamedTuple):
    cache: Cache
    valid: Array  # [B] int32, entries of the cache that hold the row's own tokens


class _Memory(NamedTuple):
    """What the draft loop carries for a model."""

    cache: Cache
    last: Array  # [B, FED] int32, the text's last tokens, the draft appended; a shorter text stands at the left


@strategy
def model(language_model: LanguageModel, max_draft_length: int = 7, catch_up: int = 16) -> Drafter:
    """Draft with a language model, up to `max_draft_length` (K) tokens a round.

    Args:
        catch_up: tokens a pass feeds to rows that begin to draft after rounds they sat out. Of prompts most go in
            `WIDE` a pass.

    Raises:
        ValueError: max_draft_length or catch_up below its least value.
    """
    check_length(max_draft_length)
    if catch_up < FED:
        raise ValueError(f"catch_up must be at least {FED}, got {catch_up}")

    def init(params: Params, batch: int, slots: int, source: Any = None) -> ModelDrafterState:
        own = None if language_model.spec.source is None else source  # a decoder alone goes by the answer alone
        return ModelDrafterState(language_model.init_cache(params, batch, slots, own), jnp.zeros((batch,), jnp.int32))

    def propose(
        params: Params,
        state: ModelDrafterState,
        tokens: Array,
        context: RoundContext,
        uniform: Callable[[Array], Array],
        policy: StoppingPolicy,
        policy_state: PolicyState,
        keep_log_q: bool,
    ) -> tuple[Draft, DraftInfo, ModelDrafterState, PolicyState]:
        def open_source(going: Array) -> Source:
            wanted = jnp.where(going, context.length - FED, 0)
            known = jnp.minimum(state.valid, context.length)  # an array of its own: the state's would be copied
            with jax.named_scope("draft_feed"):
                cache, _ = feed(language_model, params, state.cache, tokens, known, wanted, catch_up)
            return model_source(language_model, params, cache, tokens, context)

        log_q = _no_log_q(language_model, params, state.cache, tokens, max_draft_length) if keep_log_q else None
        end = draft_loop.draft(open_source, policy, policy_state, context, uniform, max_draft_length, log_q)
        chosen, passes = jnp.zeros(end.tokens.shape, bool), end.predictions
        draft = Draft(end.tokens, end.log_q, chosen, end.length, end.siblings, children=end.children)
        info = DraftInfo(passes, passes - end.length, end.entropy, end.max_prob, jnp.zeros_like(end.length))
        fed = jnp.where(passes > 0, context.length + passes - 1, state.valid)
        return draft, info, ModelDrafterState(end.memory.cache, jnp.maximum(state.valid, fed)), end.policy

    def commit(params: Params, state: ModelDrafterState, tokens: Array, length: Array) -> ModelDrafterState:
        """Roll back to what still holds. What is missing is fed when the row drafts again, not while it sits out."""
        del params, tokens
        return state._replace(valid=still_valid(state.valid, length))

    def prefill(params: Params, state: ModelDrafterState, tokens: Array, length: Array) -> ModelDrafterState:
        """Feed what is missing up to the last two tokens, which a pass feeds."""
        cache, valid = commit(params, state, tokens, length)
        wanted = jnp.maximum(length - FED, 0)
        return ModelDrafterState(*feed_long(language_model, params, cache, tokens, valid, wanted, catch_up, WIDE))

    return Drafter(init, propose, commit, max_draft_length, language_model, prefill=prefill, draws_siblings=True)


def still_valid(valid: Array, length: Array) -> Array:
    """Of so many entries [B] of a cache, those that hold when the text is `length` [B] tokens long."""
    return jnp.minimum(valid, jnp.maximum(length - 1, 0))


def model_source(
    language_model: LanguageModel, params: Params, cache: Cache, tokens: Array, context: RoundContext
) -> Source:
    """The next distributions of a model after each row's `tokens` [B, S]: a pass of the last two tokens for each."""
    reduced = language_model.reduced
    apply = language_model.apply if reduced is None else reduced.apply

    def following(memory: _Memory, drafted: Array) -> tuple[Next, _Memory]:
        end = context.length + drafted  # [B], tokens known; rows that stopped feed their own last tokens again
        with jax.named_scope("draft_pass"):
            start = jnp.maximum(end - FED, 0)
            logits, cache = apply(params, memory.last, language_model.with_length(memory.cache, start))
            here = at_end(logits, end)  # [B, V], [B, N] reduced
        return next_of(reduced, params, cache, here, context), _Memory(cache, memory.last)

    def beside(memory: _Memory, drafted: Array, fed: Fed) -> tuple[Next, tuple[Next, ...], _Memory]:
        end = context.length + drafted
        with jax.named_scope("draft_pass"):
            start = jnp.maximum(end - FED, 0)
            both = jnp.concatenate([memory.last, fed.token], axis=1)
            where = where_fed(context.length, start, fed, tokens.shape[1])
            logits, cache = apply(params, both, language_model.with_length(memory.cache, start), *where)
        return *next_of_each(reduced, params, cache, logits, end, context), _Memory(cache, memory.last)

    def keep(memory: _Memory, token: Array, drawn: Array, drafted: Array) -> _Memory:
        longer = with_token(memory.last, token, context.length + drafted)
        return memory._replace(last=jnp.where(drawn[:, None], longer, memory.last))

    cache, last = first_pass(language_model, params, cache, tokens, context.length)
    return Source(_Memory(cache, last), following, keep, beside)


def at_end(given: Array, end: Array) -> Array:
    """Of what a pass of the last tokens of texts of `end` [B] gave, [B, FED or more, ...], the last one's, [B, ...]."""
    last = end - 1 - jnp.maximum(end - FED, 0)
    return jnp.take_along_axis(given, last[:, None, None], axis=1)[:, 0]


def where_fed(length: Array, start: Array, fed: Fed, slots: int) -> tuple[Array, Array]:
    """Positions [B, FED + W] and mask [B, FED + W, S] of a pass from slot start [B] on: the last tokens, and siblings.

    A sibling stands where the draft did that it replaces: it sees the text of `length` [B], the drafts before it, and
    itself. Its entry lies behind the chain's, where the next pass writes: nobody sees it again.
    """
    slot, count = jnp.arange(slots, dtype=jnp.int32)[None, None, :], fed.depth.shape[1]
    chain = jnp.broadcast_to(start[:, None] + jnp.arange(FED, dtype=jnp.int32)[None, :], (start.shape[0], FED))
    position = length[:, None] + fed.depth
    own = start[:, None] + FED + jnp.arange(count, dtype=jnp.int32)[None, :]
    sees = (slot < position[:, :, None]) | (slot == own[:, :, None])
    mask = jnp.concatenate([jnp.ones((start.shape[0], FED, slots), bool), sees], axis=1)
    return jnp.concatenate([chain, position], axis=1), mask


def first_pass(
    language_model: LanguageModel, params: Params, cache: Cache, tokens: Array, length: Array
) -> tuple[Cache, Array]:
    """The cache before a round's first pass, and the tokens [B, FED] of that pass; a text of one token has it twice."""
    start = jnp.maximum(length - FED, 0)
    last = window(tokens, start, FED)
    last = jnp.where(length[:, None] < FED, last[:, :1], last)
    return noted(language_model, params, language_model.with_length(cache, start), last), last


def next_of(reduced: ReducedHead | None, params: Params, cache: Cache, logits: Array, context: RoundContext) -> Next:
    """The next position by a pass's logits [B, V], of a reduced head [B, N], and the cache it left."""
    # Without the barrier XLA's CPU code fuses the logits into each of the distribution's sums, and makes them anew for
    # every one: a drafter pass then takes a twentieth longer (docs/performance.md).
    with jax.named_scope("draft_pass"):
        logits = lax.optimization_barrier(logits)
    with jax.named_scope("draft_distribution"):
        own = distribution(logits, context.warp)

    def draw_own(uniform: Callable[[int], Array], siblings: int) -> Drawn:
        found = candidates(own, context.warp.temperature > 0, 1 + siblings, uniform)
        if reduced is not None:
            found = [reduced.token(params, cache, token) for token in found]
        return Drawn(found[0], jnp.stack(found[1:], axis=1) if siblings else None)

    return Next(own if reduced is None else _of_all_tokens(reduced, params, cache, own), draw_own)


def next_of_each(
    reduced: ReducedHead | None, params: Params, cache: Cache, logits: Array, end: Array, context: RoundContext
) -> tuple[Next, tuple[Next, ...]]:
    """The next position after texts of `end` [B], and after each sibling, by a pass's logits [B, FED + W, V]."""
    each = [at_end(logits, end), *jnp.unstack(logits[:, FED:], axis=1)]
    first, *others = (next_of(reduced, params, cache, here, context) for here in each)
    return first, tuple(others)


def _no_log_q(language_model: LanguageModel, params: Params, cache: Cache, tokens: Array, most: int) -> Array:
    """[B, K, V] of the logits' type, every probability zero."""
    dtype = jax.eval_shape(language_model.apply, params, tokens[:, :FED], cache)[0].dtype
    return jnp.full((tokens.shape[0], most, language_model.spec.vocab_size), -jnp.inf, dtype)


def _of_all_tokens(reduced: ReducedHead, params: Params, cache: Cache, few: Distribution) -> Distribution:
    """A distribution of N tokens as one of the vocabulary; what nobody reads of it is never computed."""
    raw = few.raw_log_prob
    return few._replace(
        log_prob=reduced.spread(params, cache, few.log_prob),
        top_token=reduced.token(params, cache, few.top_token),
        raw_log_prob=None if raw is None else reduced.spread(params, cache, raw),
    )


def with_token(last: Array, token: Array, length: Array) -> Array:
    """The last tokens [B, FED, ...] of a text of `length` [B] with one more [B, ...]; a full window moves on."""
    row = (-1,) + (1,) * (last.ndim - 1)
    moved = jnp.concatenate([last[:, 1:], token[:, None]], axis=1)
    here = (jnp.arange(FED, dtype=jnp.int32)[None, :] == length[:, None]).reshape(*last.shape[:2], *row[2:])
    return jnp.where((length < FED).reshape(row), jnp.where(here, token[:, None], last), moved)
