"""How a drafter's model reads expanded siblings beside the chain's last tokens, in the same pass."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specdec_jax.contrib.trees.expansion import Fed
from specdec_jax.drafters.model import FED, at_end, next_of
from specdec_jax.types import (
    Array,
    Cache,
    Distribution,
    Drafted,
    Drafter,
    LanguageModel,
    Next,
    Params,
    RoundContext,
    Source,
)


class PredictBeside(Protocol):
    """As `Source.predict`, and the distribution after each of the W siblings that the pass is fed with."""

    def __call__(
        self, memory: Any, drafted: Array, fed: Fed, uniform: Array, /
    ) -> tuple[Next, tuple[Distribution, ...], Any]: ...


def expanding(
    source: Source, drafter: Drafter, params: Params, context: RoundContext, slots: int
) -> tuple[Source, PredictBeside]:
    """The source of `model` or of `reading`, whose memory is then (memory, what later passes read of siblings), and its
    pass with siblings; `slots` (S) of the caches.
    """
    language_model = drafter.model
    assert language_model is not None  # check_parts looked
    reads = language_model.reading is not None

    def open(going: Array) -> Any:
        inner = source.open(going)
        if not reads:
            return inner, ()
        shape = inner.own.shape[0], drafter.max_draft_length, inner.own.shape[1]
        return inner, jnp.zeros(shape, inner.own.dtype)

    def predict(memory: Any, drafted: Array, uniform: Array) -> tuple[Next, Any]:
        following, inner = source.predict(memory[0], drafted, uniform)
        return following, (inner, memory[1])

    def keep(memory: Any, token: Array, drawn: Array, drafted: Array) -> Any:
        return source.keep(memory[0], token, drawn, drafted), memory[1]

    def close(drafted: Drafted) -> tuple[Any, Drafted]:
        return source.close(drafted._replace(memory=drafted.memory[0]))

    pass_beside = _reading if reads else _model
    return source._replace(open=open, predict=predict, keep=keep, close=close), pass_beside(
        language_model, params, context, slots
    )


def _model(language_model: LanguageModel, params: Params, context: RoundContext, slots: int) -> PredictBeside:
    reduced = language_model.reduced
    apply = language_model.apply if reduced is None else reduced.apply

    def predict(memory: Any, drafted: Array, fed: Fed, uniform: Array) -> tuple[Next, tuple[Distribution, ...], Any]:
        inner, carried = memory
        end = context.length + drafted
        with jax.named_scope("draft_pass"):
            start = jnp.maximum(end - FED, 0)
            both = jnp.concatenate([inner.last, fed.token], axis=1)
            where = _where_fed(context.length, start, fed, slots)
            logits, cache = apply(params, both, language_model.with_length(inner.cache, start), *where)
        following, after = _each(language_model, params, cache, logits, end, context, uniform)
        return following, after, (inner._replace(cache=cache), carried)

    return predict


def _reading(language_model: LanguageModel, params: Params, context: RoundContext, slots: int) -> PredictBeside:
    reading = language_model.reading
    assert reading is not None

    def predict(memory: Any, drafted: Array, fed: Fed, uniform: Array) -> tuple[Next, tuple[Distribution, ...], Any]:
        inner, states = memory  # states [B, K, P]: what stands in for the target's at every draft
        end = context.length + drafted
        with jax.named_scope("draft_pass"):
            start = jnp.maximum(end - FED, 0)
            both = jnp.concatenate([inner.last, fed.token], axis=1)
            read = jnp.take_along_axis(states, fed.depth[:, :, None], axis=1, mode="clip")
            read = jnp.concatenate([inner.reads, read], axis=1)
            where = _where_fed(context.length, start, fed, slots)
            cache = language_model.with_length(inner.cache, start)
            logits, hidden, cache = reading.apply(params, both, read, cache, *where)
            state = reading.own(params, at_end(hidden, end)[:, None])[:, 0]
        here = jnp.arange(states.shape[1], dtype=jnp.int32)[None, :, None] == drafted[:, None, None]
        states = jnp.where(here, state[:, None], states)
        following, after = _each(language_model, params, cache, logits, end, context, uniform)
        return following, after, (inner._replace(cache=cache, own=state), states)

    return predict


def _each(
    language_model: LanguageModel,
    params: Params,
    cache: Cache,
    logits: Array,
    end: Array,
    context: RoundContext,
    uniform: Array,
) -> tuple[Next, tuple[Distribution, ...]]:
    """What follows texts of `end` [B], and the distribution after each sibling, by logits [B, FED + W, V]."""
    each = [at_end(logits, end), *jnp.unstack(logits[:, FED:], axis=1)]
    first, *others = (next_of(language_model.reduced, params, cache, here, context, uniform) for here in each)
    return first, tuple(one.distribution for one in others)


def _where_fed(length: Array, start: Array, fed: Fed, slots: int) -> tuple[Array, Array]:
    """Positions [B, FED + W] and mask [B, FED + W, S] of a pass from slot start [B] on: the last tokens, and siblings.

    A sibling stands where the draft did that it replaces: it sees the text of `length` [B], the drafts before it, and
    itself. Its entry lies behind the chain's, where the next pass writes: nothing sees it again.
    """
    slot, count = jnp.arange(slots, dtype=jnp.int32)[None, None, :], fed.depth.shape[1]
    chain = jnp.broadcast_to(start[:, None] + jnp.arange(FED, dtype=jnp.int32)[None, :], (start.shape[0], FED))
    position = length[:, None] + fed.depth
    own = start[:, None] + FED + jnp.arange(count, dtype=jnp.int32)[None, :]
    sees = (slot < position[:, :, None]) | (slot == own[:, :, None])
    mask = jnp.concatenate([jnp.ones((start.shape[0], FED, slots), bool), sees], axis=1)
    return jnp.concatenate([chain, position], axis=1), mask
