"""Several drafters: each round uses the one with the most expected tokens per unit of time.

Texts alternate between quotation, calculation and narration: lookup is free and often right in quotations, a model is
better in narration, and the best model size depends on the text. Per row, each drafter has a share of accepted drafts
a, learnt from the rounds that it drafted. With c the time of its pass, n drafts are expected to yield

    (1 + a + a^2 + ... + a^n) / (1 + n c)

tokens in the time of a target pass, and the drafter with the largest value over n drafts. This is `survival`'s estimate
before a round's first draft; its price of time, the row's own rate, is the same for all drafters. The shares begin
optimistically, so that every drafter is tried, and the evidence of all decays in every round, so that idle ones are
tried again. The choice is made before a token of the round is drawn.

If a drafter without a model finds no match, its row passes to the best drafter with a model in the same round, because
the lookup was free. A drafter runs only if some row chose it (`lax.cond`; a switch at batch 1); other rows are masked.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.sampling import log_prob_of
from specdec_jax.hyperparameters import select_rows
from specdec_jax.ranges import Between
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Drafter,
    DrafterState,
    InTurn,
    LoopResult,
    Next,
    Observer,
    Params,
    RoundContext,
    Seen,
    Source,
)

# Prior numbers of accepted and of verified drafts, optimistic: of a lookup, of a model.
HOPED = (0.8, 1.0), (1.8, 2.0)


class MultiDrafterState(NamedTuple):
    states: tuple[DrafterState, ...]
    accepted: Array  # [B, N] float32, decayed number of accepted drafts of each drafter, with the prior's
    verified: Array  # [B, N] float32, decayed number of those that were verified after accepted ones
    drafter: Array  # [B] int32, the last round's drafter
    drafted: Array  # [B] int32, its drafts; 0 once they are counted
    length: Array  # [B] int32, tokens known when that round began


@strategy
def multi_drafter(
    drafters: Sequence[Drafter] = (),
    costs: Annotated[Sequence[float] | None, Between(0)] = None,
    decay: Annotated[float, Between(0, 0.9999)] = 0.98,
) -> Drafter:
    """Combine drafters; the parameters are a tuple with one entry per drafter, in the same order.

    Args:
        drafters: drafters with equal `max_draft_length`, those expected to be better first: they win ties.
        costs: cost of a pass of each, in target passes (`experiments.step_cost`); None: 0 without a model, else 0.1.
        decay: of what a row has learnt, per round, in [0, 1): with less, idle drafters are tried again sooner.

    `survival` and `goodput` get the cost of the active drafter relative to the first model, whose cost is their
    hyperparameter drafter_cost.

    Raises:
        ValueError: no drafters, different draft lengths, vocabularies or target widths, or not one cost per
            drafter; `init` raises it if there is not one entry of parameters per drafter.
    """
    parts = tuple(drafters)
    if not parts:
        raise ValueError("multi_drafter needs at least one drafter")
    lengths = {part.max_draft_length for part in parts}
    if len(lengths) > 1:
        raise ValueError(f"drafters used together need one max_draft_length, got {sorted(lengths)}")
    if costs is not None and len(costs) != len(parts):
        raise ValueError(f"costs must be {len(parts)} numbers, one a drafter, got {tuple(costs)}")
    vocabularies = {part.model.spec.vocab_size for part in parts if part.model is not None}
    if len(vocabularies) > 1:
        raise ValueError(f"drafters used together need one vocabulary, got {sorted(vocabularies)} entries")
    longest, vocab_size = lengths.pop(), next(iter(vocabularies), None)
    cost = tuple(costs) if costs is not None else tuple(0.0 if part.model is None else 0.1 for part in parts)
    lookups = [index for index, part in enumerate(parts) if part.model is None]
    with_model = [index for index, part in enumerate(parts) if part.model is not None]
    prior = list(zip(*(HOPED[part.model is not None] for part in parts), strict=True))  # accepted, verified
    first = cost[with_model[0]] if with_model and cost[with_model[0]] > 0 else 1.0
    # A model with cost 0 is not a lookup: its relative cost stays positive, so that its passes are counted.
    relative_costs = [
        0.0 if part.model is None else max(part_cost / first, 1e-9) for part, part_cost in zip(parts, cost, strict=True)
    ]

    def init(params: Sequence[Params], batch: int, slots: int, source: Any = None) -> MultiDrafterState:
        if len(params) != len(parts):
            raise ValueError(f"{len(parts)} drafters need as many parameters in a tuple, got {len(params)}")
        more = () if source is None else (source,)
        states = tuple(part.init(weights, batch, slots, *more) for part, weights in zip(parts, params, strict=True))
        row, hoped = jnp.zeros((batch,), jnp.int32), jnp.tile(jnp.array(prior, jnp.float32)[:, None], (1, batch, 1))
        return MultiDrafterState(states, hoped[0], hoped[1], row, row, row)

    def source(params: Sequence[Params], state: MultiDrafterState, tokens: Array, context: RoundContext) -> Source:
        rates = expected_rates(state, jnp.array(cost, jnp.float32), longest)
        best = jnp.argmax(rates, axis=1).astype(jnp.int32)

        def joined(indices: Sequence[int], choice: Array) -> Source:
            """The source of these drafters, each in the rows that chose it."""
            each = {i: parts[i].source(params[i], state.states[i], tokens, context) for i in indices}
            cost = jnp.array(relative_costs, jnp.float32)[choice]
            return _joined(each, choice, vocab_size)._replace(cost=cost, drafter_id=choice)

        def hand_over(rows: Array) -> Source:
            """The source for rows without a lookup: the best drafter with a model."""
            models = jnp.array(with_model, jnp.int32)
            return joined(with_model, models[jnp.argmax(rates[:, models], axis=1)])

        def close(loop: LoopResult) -> tuple[MultiDrafterState, LoopResult]:
            each, states = [(begun, loop.memory)], dict(enumerate(state.states))
            if isinstance(loop.memory, InTurn):
                each = [(begun, loop.memory.first), (loop.memory.source, loop.memory.second)]
            for drafting, memory in each:
                closed, loop = drafting.close(loop._replace(memory=memory))
                states |= closed
            now = {"drafter": loop.drafter_id, "drafted": loop.length, "length": context.length}
            return state._replace(states=tuple(states.values()), **now), loop

        begun = joined(lookups or with_model, best)
        return begun._replace(close=close, otherwise=hand_over if lookups and with_model else None)

    def call_each(
        method: str,
        params: Sequence[Params],
        state: MultiDrafterState,
        tokens: Array,
        length: Array,
        seen: Seen | None = None,
    ) -> MultiDrafterState:
        """Calls a method of every drafter for the text; each gets what it observed of the target."""

        def observed(index: int) -> tuple[Seen, ...]:
            return () if seen is None or index not in seen.features else (seen._replace(features=seen.features[index]),)

        states = tuple(
            getattr(part, method)(params[index], state.states[index], tokens, length, *observed(index))
            for index, part in enumerate(parts)
        )
        return state._replace(states=states)

    def commit(
        params: Sequence[Params], state: MultiDrafterState, tokens: Array, length: Array, seen: Seen | None = None
    ) -> MultiDrafterState:
        return call_each("commit", params, learnt(state, length, prior, decay), tokens, length, seen)

    observers = {i: part.observe for i, part in enumerate(parts) if part.observe is not None}
    widths = sorted({observer.target_width for observer in observers.values()})
    if len(widths) > 1:
        raise ValueError(f"drafters that read targets {' and '.join(map(str, widths))} wide cannot read the same one")
    ends = np.cumsum([0, *(len(observer.layers) for observer in observers.values())]).tolist()

    def features(params: Sequence[Params], hidden: Array) -> dict[int, Any]:
        """Results by drafter, also of idle ones, each from its layers."""
        spans = zip(observers.items(), ends, ends[1:], strict=False)
        return {i: observer.features(params[i], hidden[:, :, begin:end]) for (i, observer), begin, end in spans}

    layers = tuple(layer for observer in observers.values() for layer in observer.layers)
    observe = Observer(features, layers, widths[0]) if observers else None
    return Drafter(init, source, commit, longest, observe=observe, prefill=partial(call_each, "fill"))


def expected_rates(state: MultiDrafterState, cost: Array, longest: int) -> Array:
    """Expected tokens of each drafter per target pass's time, [B, N] float32, at the best of up to `longest` drafts."""
    drafts = jnp.arange(longest + 1, dtype=jnp.float32)[None, None, :]
    share = (state.accepted / state.verified)[:, :, None]
    return jnp.max(jnp.cumsum(share**drafts, axis=2) / (1.0 + cost[None, :, None] * drafts), axis=2)


def learnt(state: MultiDrafterState, length: Array, prior: Sequence[Any], decay: float) -> MultiDrafterState:
    """The shares after a round that extended the text to `length` [B], if it did.

    `prior`: numbers [N] of accepted and of verified drafts, which do not decay.
    """
    accepted = jnp.minimum(length - state.length - 1, state.drafted)
    verified = jnp.minimum(accepted + 1, state.drafted)

    def add(total: Array, new: Array, hoped: Any) -> Array:
        drafters, always = jnp.arange(total.shape[1], dtype=jnp.int32)[None, :], jnp.array([hoped], jnp.float32)
        counted = jnp.where(state.drafter[:, None] == drafters, new[:, None], 0).astype(jnp.float32)
        return jnp.where((length > state.length)[:, None], always + decay * (total - always) + counted, total)

    return state._replace(
        accepted=add(state.accepted, accepted, prior[0]),
        verified=add(state.verified, verified, prior[1]),
        drafted=jnp.zeros_like(state.drafted),
    )


def _joined(sources: dict[int, Source], choice: Array, vocab_size: int | None) -> Source:
    """Joins sources, by drafter, each with the rows that chose it [B] int32; a model without rows is not run.

    `close` returns their states by drafter.
    """
    rows = {index: choice == index for index in sources}

    def open(going: Array) -> tuple[Any, ...]:
        return tuple(source.open(going & rows[index]) for index, source in sources.items())

    def predict(memory: tuple[Any, ...], drafted: Array, uniform: Array) -> tuple[Next, tuple[Any, ...]]:
        def run(index: int, source: Source, before: Any) -> tuple[Next, Any]:
            now = partial(source.predict, before, drafted, uniform)
            if len(sources) == 1 or (isinstance(source.cost, float) and source.cost == 0):
                return now()
            shapes = jax.eval_shape(now)[0]  # a model runs if it has any row; zeros are not read
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            return lax.cond(jnp.any(rows[index]), now, lambda: (nothing, before))

        each = [run(*item, before) for item, before in zip(sources.items(), memory, strict=True)]
        following, after = zip(*each, strict=True)
        return _by_row(list(rows.values()), following, vocab_size), after

    def keep(memory: tuple[Any, ...], token: Array, is_drafted: Array, drafted: Array) -> tuple[Any, ...]:
        each = zip(sources.items(), memory, strict=True)
        return tuple(source.keep(before, token, is_drafted & rows[index], drafted) for (index, source), before in each)

    def close(loop: LoopResult) -> tuple[dict[int, DrafterState], LoopResult]:
        states, verified = {}, loop
        for (index, source), memory in zip(sources.items(), loop.memory, strict=True):
            mine = loop.drafter_id == index
            passes, length = jnp.where(mine, loop.passes, 0), jnp.where(mine, loop.length, 0)
            states[index], changed = source.close(loop._replace(passes=passes, length=length, memory=memory))
            verified = verified._replace(  # the source may have changed its draft
                tokens=jnp.where(mine[:, None], changed.tokens, verified.tokens),
                length=jnp.where(mine, changed.length, verified.length),
            )
        return states, verified

    chosen: Array | bool = all(source.chosen is True for source in sources.values())
    if not chosen:
        each = [jnp.asarray(source.chosen) & rows[index] for index, source in sources.items()]
        chosen = reduce(jnp.logical_or, each)
    return Source(open, predict, keep, close, chosen=chosen)  # type: ignore[arg-type]


def _by_row(rows: Sequence[Array], each: Sequence[Next], vocab_size: int | None) -> Next:
    """Selects each row's next position from its source.

    A lookup may have no log_prob, and with another vocabulary its size differs from `vocab_size`, the target's.
    Verification reads neither, because those tokens are chosen; policies read `token_log_prob`.
    """
    if len(each) == 1:
        there = rows[0] if each[0].known is None else rows[0] & each[0].known
        return each[0]._replace(known=there)
    sizes = [part.distribution.log_prob.shape[1] for part in each if part.distribution.log_prob is not None]
    mixed, size = len(set(sizes)) > 1, vocab_size or min(sizes, default=0)
    joined: Next | None = None
    for mine, part in zip(rows, each, strict=True):
        seen = part.distribution
        probability = None if not mixed or seen.log_prob is None else log_prob_of(seen, part.token)
        if mixed and seen.log_prob is None:
            probability = jnp.full(mine.shape, -jnp.inf)
        whole = {"log_prob": seen.log_prob, "raw_log_prob": seen.raw_log_prob}
        for name, values in whole.items():
            if sizes and (values is None or values.shape[1] != size):
                whole[name] = jnp.full((mine.shape[0], size), -jnp.inf)
        distribution = seen._replace(**whole, token_log_prob=probability)
        following = Next(distribution, part.token, mine if part.known is None else mine & part.known)
        joined = following if joined is None else select_rows(mine, following, joined)
    assert joined is not None
    return joined
