"""Several drafters at once: what each got accepted lately, in the phase the text is in, chooses who drafts next.

A text quotes, calculates and narrates by turns: a lookup in its own words is free and often right in the first, a model
is better in the last, and which size of model pays depends on how hard the next words are. Per row, each drafter has a
running estimate of the tokens it brings per unit of time, one for each phase; the best estimate drafts. Estimates of
drafters that sit out drift to a little above that of who drafts: each is tried again.

A drafter without a model that finds nothing (no match) hands its row to the best of those with one, in the same round:
looking was free. A drafter runs only if some row chose it (`lax.cond`; at batch 1 that is a switch) and rows that did
not are masked. One that sat out is not fed meanwhile; it catches up, in passes of many tokens, when it is chosen again.
"""

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.phase import phase_of
from specdec_jax.hyperparameters import select_rows
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Commit,
    Distribution,
    Draft,
    Drafted,
    Drafter,
    DrafterState,
    Features,
    Learn,
    Next,
    Observer,
    Params,
    Read,
    RoundContext,
    Source,
    VerificationResult,
)

PHASES = 2
HOPE = 1.1  # who sits out is believed, in the end, to bring a tenth more than who drafts, and is tried again


class MultiDrafterState(NamedTuple):
    states: tuple[DrafterState, ...]
    known: Array  # [B, N] int32, tokens each drafter was last told of
    tokens: Array  # [B, 2, N] float32, running sum of emitted tokens, by phase
    time: Array  # [B, 2, N] float32, and of time, in target passes
    drafter: Array  # [B] int32, who drafted in this round; N: no round yet, all are told; N + 1: nobody
    passes: Array  # [B] int32, its passes
    phase: Array  # [B] int32, of this round
    length: Array  # [B] int32, tokens known when it began


@strategy
def multi_drafter(
    drafters: Sequence[Drafter] = (),
    costs: Sequence[float] | None = None,
    decay: float = 0.8,
    drift: float = 0.02,
    prior: float = 4.0,
) -> Drafter:
    """Join drafters; parameters are a tuple, one entry a drafter, in their order.

    Args:
        drafters: of one `max_draft_length`. Give those expected to be better first: they win ties.
        costs: a pass of each in target passes (`experiments.step_cost`); None: 0 without a model, 0.1 with one.
        decay: of the running sums, in [0, 1); 0.8 remembers about five rounds.
        drift: how fast drafters that sit out are given another chance, in [0, 1]: the share of the way that their sums
            go each round to a tenth more than what the drafter at work brings.
        prior: tokens a target pass that every drafter is believed to bring at first; above what is usual, so that all
            are tried.

    `survival` and `goodput` are told the relative cost of who drafts, in passes of the first model, whose cost is their
    own number.

    Raises:
        ValueError: no drafters, lengths that differ, or a number out of range.
    """
    parts, most = tuple(drafters), _checked(tuple(drafters), costs, decay, drift, prior)
    cost = tuple(costs) if costs is not None else tuple(0.0 if part.model is None else 0.1 for part in parts)
    free = [index for index, part in enumerate(parts) if part.model is None]
    paid = [index for index, part in enumerate(parts) if part.model is not None]
    first = cost[paid[0]] if paid and cost[paid[0]] > 0 else 1.0
    # A model that costs nothing is still no lookup: its passes count.
    relative_costs = [
        0.0 if part.model is None else max(one / first, 1e-9) for part, one in zip(parts, cost, strict=True)
    ]

    def init(params: Sequence[Params], batch: int, slots: int, source: Any = None) -> MultiDrafterState:
        if len(params) != len(parts):
            raise ValueError(f"{len(parts)} drafters need as many parameters in a tuple, got {len(params)}")
        row, nobody = jnp.zeros((batch,), jnp.int32), jnp.full((batch,), len(parts), jnp.int32)
        sums = jnp.ones((batch, PHASES, len(parts)), jnp.float32)
        more = () if source is None else (source,)
        states = tuple(part.init(own, batch, slots, *more) for part, own in zip(parts, params, strict=True))
        known = jnp.zeros((batch, len(parts)), jnp.int32)
        return MultiDrafterState(states, known, prior * sums, sums, nobody, row, row, row)

    def source(params: Sequence[Params], state: MultiDrafterState, tokens: Array, context: RoundContext) -> Source:
        phase, nobody = phase_of(context), len(parts) + 1
        worth = _worth(state, phase)
        idle = ~context.alive | (context.budget == 0)  # they draft nothing: nobody is to catch up for them
        choice = jnp.where(idle, nobody, jnp.argmax(worth, axis=1)).astype(jnp.int32)
        told, sources = {}, {}

        def ask(index: int) -> None:
            mine = choice == index
            length = jnp.where(mine, context.length, state.known[:, index])
            own, part = state.states[index], parts[index]
            tell = partial(part.commit, params[index], own, tokens, length)
            told[index] = lax.cond(jnp.any(mine), tell, lambda: own), length
            sources[index] = parts[index].source(params[index], told[index][0], tokens, context)

        for index in free:
            ask(index)
        if free and paid:  # who finds nothing hands its row on
            passed_on = jnp.array(paid, jnp.int32)[jnp.argmax(worth[:, jnp.array(paid)], axis=1)]
            for index in free:
                choice = jnp.where((choice == index) & ~_finds(sources[index], choice), passed_on, choice)
        for index in paid:
            ask(index)
        known = jnp.stack([told[index][1] for index in range(len(parts))], axis=1)
        relative = jnp.array(relative_costs, jnp.float32)[jnp.where(idle, 0, choice)]
        joined = _joined(tuple(sources[index] for index in range(len(parts))), choice, free)

        def close(drafted: Drafted) -> MultiDrafterState:
            return state._replace(
                states=joined.close(drafted),
                known=known,
                drafter=choice,
                passes=jnp.where(relative == 0, 0, drafted.predictions),
                phase=phase,
                length=context.length,
            )

        return joined._replace(close=close, cost=relative, drafter_id=jnp.where(idle, 0, choice))

    def commit(params: Sequence[Params], state: MultiDrafterState, tokens: Array, length: Array) -> MultiDrafterState:
        state = _learnt(state, length, jnp.array(cost, jnp.float32), decay, drift)
        return tell([part.commit for part in parts], params, state, tokens, length)

    def prefill(params: Sequence[Params], state: MultiDrafterState, tokens: Array, length: Array) -> MultiDrafterState:
        return tell([part.fill for part in parts], params, state, tokens, length)

    def tell(
        how: Sequence[Commit], params: Sequence[Params], state: MultiDrafterState, tokens: Array, length: Array
    ) -> MultiDrafterState:
        states, known = list(state.states), state.known
        for index, one in enumerate(how):
            # Before the first round, and when a conversation goes on, nobody drafted: all are told of the prompt.
            told = (state.drafter == index) | (state.drafter == len(parts))
            upto = jnp.where(told, length, jnp.minimum(known[:, index], length))
            states[index] = _told(one, params[index], states[index], tokens, upto, known[:, index])
            known = known.at[:, index].set(upto)
        nobody = jnp.full_like(state.drafter, len(parts))
        return state._replace(states=tuple(states), known=known, drafter=nobody)

    return Drafter(init, source, commit, most, observer=_observer(parts), prefill=prefill)


def _checked(
    parts: tuple[Drafter, ...], costs: Sequence[float] | None, decay: float, drift: float, prior: float
) -> int:
    """The drafters' common length, after looking at everything given."""
    if not parts:
        raise ValueError("multi_drafter needs at least one drafter")
    lengths = {part.max_draft_length for part in parts}
    if len(lengths) > 1:
        raise ValueError(f"drafters used together need one max_draft_length, got {sorted(lengths)}")
    if costs is not None and (len(costs) != len(parts) or not all(0 <= cost < math.inf for cost in costs)):
        raise ValueError(f"costs must be {len(parts)} numbers of 0 or more, one a drafter, got {tuple(costs)}")
    for name, value, high in (("decay", decay, 0.9999), ("drift", drift, 1.0), ("prior", prior, float("inf"))):
        if not 0 <= value <= high or not math.isfinite(value):
            raise ValueError(f"{name} must lie in [0, {high:g}] and be finite, got {value!r}")
    vocabularies = {part.model.spec.vocab_size for part in parts if part.model is not None}
    if len(vocabularies) > 1:
        raise ValueError(f"drafters used together need one vocabulary, got {sorted(vocabularies)} entries")
    return lengths.pop()


def _finds(source: Source, rows: Array) -> Array:
    """Whether a lookup has a first token, [B] bool."""
    none = jnp.zeros(rows.shape, jnp.int32)
    known = source.predict(source.open(none == 0), none, none.astype(jnp.float32))[0].known
    return none == 0 if known is None else known


def _joined(sources: tuple[Source, ...], choice: Array, free: Sequence[int]) -> Source:
    """Of several sources one, in which each row has its own; a model that no row chose is not run."""
    own = tuple(choice == index for index in range(len(sources)))

    def open(going: Array) -> tuple[Any, ...]:
        return tuple(one.open(going & mine) for one, mine in zip(sources, own, strict=True))

    def predict(memory: tuple[Any, ...], drafted: Array, uniform: Array) -> tuple[Next, tuple[Any, ...]]:
        each, after = [], []
        for index, (one, mine, before) in enumerate(zip(sources, own, memory, strict=True)):
            run = partial(one.predict, before, drafted, uniform)
            found, left = run() if index in free else _if_any(mine, run, before)
            each.append(found)
            after.append(left)
        return _by_row(own, each), tuple(after)

    def keep(memory: tuple[Any, ...], token: Array, drawn: Array, drafted: Array) -> tuple[Any, ...]:
        each = zip(sources, own, memory, strict=True)
        return tuple(one.keep(before, token, drawn & mine, drafted) for one, mine, before in each)

    def close(drafted: Drafted) -> tuple[DrafterState, ...]:
        each = zip(sources, own, drafted.memory, strict=True)
        return tuple(
            one.close(drafted._replace(predictions=jnp.where(mine, drafted.predictions, 0), memory=left))
            for one, mine, left in each
        )

    chosen = [
        jnp.broadcast_to(jnp.asarray(one.chosen), mine.shape) & mine for one, mine in zip(sources, own, strict=True)
    ]
    all_chosen = all(one.chosen is True for one in sources)

    def rewrite(drafted: Drafted) -> Drafted:
        for one, mine, memory in zip(sources, own, drafted.memory, strict=True):
            if one.rewrite is not None:
                again = one.rewrite(drafted._replace(memory=memory))
                length = jnp.where(mine, again.length, drafted.length)
                tokens = jnp.where(mine[:, None], again.tokens, drafted.tokens)
                drafted = drafted._replace(tokens=tokens, length=length)
        return drafted

    return Source(
        open,
        predict,
        keep,
        close,
        chosen=True if all_chosen else functools.reduce(jnp.logical_or, chosen),
        rewrite=rewrite if any(one.rewrite is not None for one in sources) else None,
    )


def _by_row(own: Sequence[Array], each: Sequence[Next]) -> Next:
    """Each row's own next position. Of a lookup that has no distributions none is read: its tokens are chosen."""
    known = [one.distribution.log_prob for one in each if one.distribution.log_prob is not None]
    joined: Next | None = None
    for mine, one in zip(own, each, strict=True):
        log_prob = jnp.full_like(known[0], -jnp.inf) if known and one.distribution.log_prob is None else None
        log_prob = one.distribution.log_prob if log_prob is None else log_prob
        distribution = one.distribution._replace(log_prob=log_prob, raw_log_prob=None)
        there = jnp.ones_like(mine) if one.known is None else one.known
        one = Next(distribution, one.token, there)
        joined = one if joined is None else select_rows(mine, one, joined)
    assert joined is not None
    return joined


def _if_any(mine: Array, run: Any, before: Any) -> tuple[Next, Any]:
    """What a model says next if any row is its own; else nothing that is read, and its memory as it was."""
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run)[0])
    return lax.cond(jnp.any(mine), run, lambda: (nothing, before))


def _in_phase(sums: Array, phase: Array) -> Array:
    """[B, 2, N] sums of the phase [B] each row is in, [B, N]."""
    return jnp.take_along_axis(sums, phase[:, None, None], axis=1)[:, 0]


def _worth(state: MultiDrafterState, phase: Array) -> Array:
    """Tokens per target pass that each drafter is believed to bring in its row's phase, [B, N] float32."""
    return _in_phase(state.tokens, phase) / _in_phase(state.time, phase)


def _learnt(state: MultiDrafterState, length: Array, cost: Array, decay: float, drift: float) -> MultiDrafterState:
    """The sums after a round that took the text to `length`; of the round's phase only."""
    count = cost.shape[0]
    drafted = jnp.arange(count, dtype=jnp.int32)[None, :] == state.drafter[:, None]  # [B, N]
    moved = (state.drafter < count) & (length > state.length)
    here = (jnp.arange(PHASES, dtype=jnp.int32)[None, :] == state.phase[:, None]) & moved[:, None]  # [B, 2]
    emitted = (length - state.length).astype(jnp.float32)[:, None]
    paid = 1.0 + state.passes.astype(jnp.float32)[:, None] * cost[None, :]  # [B, N]
    tokens, time = _in_phase(state.tokens, state.phase), _in_phase(state.time, state.phase)
    worked = decay * tokens + emitted, decay * time + paid
    rate = jnp.sum(jnp.where(drafted, worked[0] / worked[1], 0.0), axis=1, keepdims=True)  # [B, 1]
    tokens = jnp.where(drafted, worked[0], tokens + drift * (HOPE * rate - tokens))
    time = jnp.where(drafted, worked[1], time + drift * (1.0 - time))
    put = lambda sums, new: jnp.where(here[:, :, None], new[:, None, :], sums)  # noqa: E731
    return state._replace(tokens=put(state.tokens, tokens), time=put(state.time, time))


def _told(tell: Commit, params: Params, state: DrafterState, tokens: Array, upto: Array, known: Array) -> DrafterState:
    """The drafter's state after it was told of the text up to there; untouched if that is nothing new."""
    news = jnp.any(upto != known)
    return lax.cond(news, lambda: tell(params, state, tokens, upto), lambda: state)


def _observer(parts: tuple[Drafter, ...]) -> Observer:
    """All the observers there are; those who sit out see the target too."""
    return Observer(*_watching(parts), _features(parts))


def _features(parts: tuple[Drafter, ...]) -> Features | None:
    """The hidden states that any of them reads; each keeps of its own layers what it wants."""
    readers = {i: part.observer.features for i, part in enumerate(parts) if part.observer.features is not None}
    if not readers:
        return None
    widths = sorted({reader.target_width for reader in readers.values()})
    if len(widths) > 1:
        raise ValueError(f"drafters that read targets {' and '.join(map(str, widths))} wide cannot read the same one")
    ends = np.cumsum([len(reader.layers) for reader in readers.values()]).tolist()
    begins = [0, *ends[:-1]]

    def keep(params: Sequence[Params], hidden: Array) -> dict[int, Any]:
        spans = zip(readers.items(), begins, ends, strict=True)
        return {i: reader.keep(params[i], hidden[:, :, begin:end]) for (i, reader), begin, end in spans}

    def learn(
        params: Sequence[Params], state: MultiDrafterState, kept: dict[int, Any], start: Array, count: Array
    ) -> MultiDrafterState:
        states = list(state.states)
        for i, reader in readers.items():
            states[i] = reader.learn(params[i], states[i], kept[i], start, count)
        return state._replace(states=tuple(states))

    layers = tuple(layer for reader in readers.values() for layer in reader.layers)
    return Features(layers, widths[0], keep, learn)


def _watching(parts: tuple[Drafter, ...]) -> tuple[Read | None, Learn | None]:
    """What all who look at the target's distributions read and learn."""
    watching = {i: part.observer for i, part in enumerate(parts) if part.observer.read is not None}
    if not watching:
        return None, None

    def read(
        distributions: Distribution, draft: Draft, result: VerificationResult, context: RoundContext
    ) -> dict[int, Any]:
        asked = distributions, draft, result, context
        return {i: observer.read(*asked) for i, observer in watching.items() if observer.read is not None}

    def learn(
        params: Sequence[Params],
        state: MultiDrafterState,
        seen: dict[int, Any],
        draft: Draft,
        tokens: Array,
        context: RoundContext,
    ) -> MultiDrafterState:
        states = list(state.states)
        for i, observer in watching.items():
            if observer.learn is not None:
                states[i] = observer.learn(params[i], states[i], seen[i], draft, tokens, context)
        return state._replace(states=tuple(states))

    return read, learn
