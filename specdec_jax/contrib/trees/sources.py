"""Sources whose drafter passes also read expanded siblings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.contrib.trees.expansion import Expanded
from specdec_jax.drafters.model import FED, at_end, next_of
from specdec_jax.types import Array, Distribution, Drafted, Drafter, DraftModel, Next, Params, RoundContext, Source

Predicted = tuple[Next, tuple[Distribution, ...], Any]


# As `Source.predict`, with the distributions after the W siblings that the pass expands.
PredictBeside = Callable[[Any, Array, Expanded, Array], Predicted]  # (memory, drafted, fed, uniform)


def expanding(
    source: Source, drafter: Drafter, params: Params, context: RoundContext, slots: int
) -> tuple[Source, PredictBeside]:
    """The source of `model` or `reading`, with memory (memory, features for expanded siblings), and its pass with
    siblings; `slots` (S) of the caches.
    """
    assert drafter.model is not None  # checked by check_parts
    draft_model = DraftModel.of(drafter.model)

    def open(going: Array) -> Any:
        inner = source.open(going)
        if draft_model.reading is None:
            return inner, ()
        shape = inner.stand_in.shape[0], drafter.max_draft_length, inner.stand_in.shape[1]
        return inner, jnp.zeros(shape, inner.stand_in.dtype)

    def predict(memory: Any, drafted: Array, uniform: Array) -> tuple[Next, Any]:
        following, inner = source.predict(memory[0], drafted, uniform)
        return following, (inner, memory[1])

    def keep(memory: Any, token: Array, is_drafted: Array, drafted: Array) -> Any:
        return source.keep(memory[0], token, is_drafted, drafted), memory[1]

    def close(drafted: Drafted) -> tuple[Any, Drafted]:
        return source.close(drafted._replace(memory=drafted.memory[0]))

    expanded = source._replace(open=open, predict=predict, keep=keep, close=close)
    return expanded, _with_siblings(draft_model, params, context, slots)


def _with_siblings(draft_model: DraftModel, params: Params, context: RoundContext, slots: int) -> PredictBeside:
    reading = draft_model.reading
    apply = draft_model.apply if draft_model.head is None else draft_model.head.apply

    def predict(memory: Any, drafted: Array, fed: Expanded, uniform: Array) -> Predicted:
        inner, states = memory  # states [B, K, P]: the drafter's features at every draft; () if it reads none
        end = context.length + drafted
        with jax.named_scope("draft_pass"):
            start = jnp.maximum(end - FED, 0)
            both = jnp.concatenate([inner.last, fed.token], axis=1)
            where = _where_fed(context.length, start, fed, slots)
            cache = draft_model.with_length(inner.cache, start)
            if reading is None:
                logits, cache = apply(params, both, cache, *where)
                inner = inner._replace(cache=cache)
            else:
                read = jnp.take_along_axis(states, fed.depth[:, :, None], axis=1, mode="clip")
                read = jnp.concatenate([inner.reads, read], axis=1)
                logits, hidden, cache = reading.apply(params, both, read, cache, *where)
                state = reading.stand_in(params, at_end(hidden, end)[:, None])[:, 0]
                here = jnp.arange(states.shape[1], dtype=jnp.int32)[None, :, None] == drafted[:, None, None]
                states, inner = jnp.where(here, state[:, None], states), inner._replace(cache=cache, stand_in=state)
        each = [at_end(logits, end), *jnp.unstack(logits[:, FED:], axis=1)]  # after the text, and after each sibling
        first, *others = (next_of(draft_model.head, params, cache, here, context, uniform) for here in each)
        return first, tuple(other.distribution for other in others), (inner, states)

    return predict


def _where_fed(length: Array, start: Array, fed: Expanded, slots: int) -> tuple[Array, Array]:
    """Positions [B, FED + W] and mask [B, FED + W, S] of a pass from slot start [B] on: the last tokens, and siblings.

    A sibling has the position of the draft that it replaces: it attends to the text of `length` [B], the drafts before
    it, and itself. Its entry is after the chain's, where the next pass writes, so it is never attended to again.
    """
    slot, count = jnp.arange(slots, dtype=jnp.int32)[None, None, :], fed.depth.shape[1]
    chain = jnp.broadcast_to(start[:, None] + jnp.arange(FED, dtype=jnp.int32)[None, :], (start.shape[0], FED))
    position = length[:, None] + fed.depth
    entry = start[:, None] + FED + jnp.arange(count, dtype=jnp.int32)[None, :]
    sees = (slot < position[:, :, None]) | (slot == entry[:, :, None])
    mask = jnp.concatenate([jnp.ones((start.shape[0], FED, slots), bool), sees], axis=1)
    return jnp.concatenate([chain, position], axis=1), mask
