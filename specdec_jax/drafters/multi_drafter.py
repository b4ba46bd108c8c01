"""Several drafters: each round uses the one with the best recent throughput in the text's current phase.

Texts alternate between quotation, calculation and narration: lookup is free and often right in quotations, a model is
better in narration, and the best model size depends on the difficulty of the text. Per row and phase, each drafter has
a running estimate of its emitted tokens per unit of time; the drafter with the largest one drafts. The estimates of
idle drafters drift to slightly above that of the active one, so that each is tried again.

If a drafter without a model finds no match, its row passes to the best drafter with a model in the same round, because
the lookup was free. A drafter runs only if some row chose it (`lax.cond`; a switch at batch 1); other rows are masked.
Idle drafters are not fed; they catch up, many tokens per pass, when they are chosen again.
"""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.phase import phase_of
from specdec_jax.decoding.sampling import log_prob_of
from specdec_jax.hyperparameters import select_rows
from specdec_jax.ranges import Between
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Drafted,
    Drafter,
    DrafterState,
    InTurn,
    Next,
    Observer,
    Params,
    RoundContext,
    Seen,
    Source,
)

PHASES = 2
OPTIMISM = 1.1  # estimates of idle drafters drift to this multiple of the active one's


class MultiDrafterState(NamedTuple):
    states: tuple[DrafterState, ...]
    informed: Array  # [B, N] int32, length of the text of each drafter's last commit
    tokens: Array  # [B, 2, N] float32, running sum of emitted tokens, by phase
    time: Array  # [B, 2, N] float32, running sum of time in target passes, by phase
    drafter: Array  # [B] int32, the round's drafter; N: no round yet, all are updated; N + 1: none
    passes: Array  # [B] int32, passes of that drafter
    phase: Array  # [B] int32, phase of this round
    length: Array  # [B] int32, tokens known when the round began


@strategy
def multi_drafter(
    drafters: Sequence[Drafter] = (),
    costs: Annotated[Sequence[float] | None, Between(0)] = None,
    decay: Annotated[float, Between(0, 0.9999)] = 0.8,
    drift: Annotated[float, Between(0, 1)] = 0.02,
    prior: Annotated[float, Between(0)] = 4.0,
) -> Drafter:
    """Combine drafters; the parameters are a tuple with one entry per drafter, in the same order.

    Args:
        drafters: drafters with equal `max_draft_length`, those expected to be better first: they win ties.
        costs: cost of a pass of each, in target passes (`experiments.step_cost`); None: 0 without a model, else 0.1.
        decay: decay of the running sums, in [0, 1); 0.8 corresponds to about five rounds.
        drift: how fast idle drafters become candidates again, in [0, 1]: the fraction by which their sums move in each
            round towards 1.1 times the rate of the active drafter.
        prior: initial estimate of every drafter's tokens per target pass; larger than usual, so that all are tried.

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
    cost = tuple(costs) if costs is not None else tuple(0.0 if part.model is None else 0.1 for part in parts)
    lookups = [index for index, part in enumerate(parts) if part.model is None]
    with_model = [index for index, part in enumerate(parts) if part.model is not None]
    vocab_size = parts[with_model[0]].model.spec.vocab_size if with_model else None  # type: ignore[union-attr]
    first = cost[with_model[0]] if with_model and cost[with_model[0]] > 0 else 1.0
    # A model with cost 0 is not a lookup: its relative cost stays positive, so that its passes are counted.
    relative_costs = [
        0.0 if part.model is None else max(part_cost / first, 1e-9) for part, part_cost in zip(parts, cost, strict=True)
    ]

    def init(params: Sequence[Params], batch: int, slots: int, source: Any = None) -> MultiDrafterState:
        if len(params) != len(parts):
            raise ValueError(f"{len(parts)} drafters need as many parameters in a tuple, got {len(params)}")
        row, nobody = jnp.zeros((batch,), jnp.int32), jnp.full((batch,), len(parts), jnp.int32)
        sums = jnp.ones((batch, PHASES, len(parts)), jnp.float32)
        more = () if source is None else (source,)
        states = tuple(
            part.init(part_params, batch, slots, *more) for part, part_params in zip(parts, params, strict=True)
        )
        informed = jnp.zeros((batch, len(parts)), jnp.int32)
        return MultiDrafterState(states, informed, prior * sums, sums, nobody, row, row, row)

    def source(params: Sequence[Params], state: MultiDrafterState, tokens: Array, context: RoundContext) -> Source:
        phase, nobody = phase_of(context), len(parts) + 1
        worth = _in_phase(state.tokens, phase) / _in_phase(
            state.time, phase
        )  # [B, N], estimated tokens per target pass
        idle = ~context.alive | (context.budget == 0)  # these rows draft nothing, so no drafter needs to catch up
        best = jnp.where(idle, nobody, jnp.argmax(worth, axis=1)).astype(jnp.int32)

        def join(indices: Sequence[int], choice: Array) -> Source:
            """The joint source of these drafters, each caught up and restricted to the rows that chose it.

            `close` returns their states and lengths of informed texts by index.
            """
            sources, informed = [], {}
            for index in indices:
                mine, before, part = choice == index, state.states[index], parts[index]
                informed[index] = jnp.where(mine, context.length, state.informed[:, index])
                catch_up = partial(part.commit, params[index], before, tokens, informed[index])
                after = lax.cond(jnp.any(mine), catch_up, lambda before=before: before)
                sources.append(part.source(params[index], after, tokens, context))
            there = jnp.isin(choice, jnp.array(indices, jnp.int32))
            drafter = jnp.where(there, choice, 0)
            joined = _joined(sources, [choice == index for index in indices], vocab_size)

            def close(drafted: Drafted) -> tuple[Any, Drafted]:
                states, verified = joined.close(drafted)
                return (dict(zip(indices, states, strict=True)), informed, choice), verified

            costs = jnp.array(relative_costs, jnp.float32)[drafter]
            return joined._replace(cost=costs, drafter_id=drafter, close=close)

        def hand_over(rows: Array) -> Source:
            """The source for rows whose lookup drafted nothing: the best drafter with a model."""
            model = jnp.array(with_model, jnp.int32)[jnp.argmax(worth[:, jnp.array(with_model)], axis=1)]
            return join(with_model, jnp.where(rows & jnp.isin(best, jnp.array(lookups, jnp.int32)), model, best))

        def close(drafted: Drafted) -> tuple[MultiDrafterState, Drafted]:
            states, informed = dict(enumerate(state.states)), dict(enumerate(state.informed.T))
            several = [(joined, drafted.memory)]
            if isinstance(drafted.memory, InTurn):
                several = [(joined, drafted.memory.first), (drafted.memory.source, drafted.memory.second)]
            verified = drafted
            for each, memory in several:
                (after, lengths, choice), verified = each.close(verified._replace(memory=memory))
                states, informed = states | after, informed | lengths
            return state._replace(
                states=tuple(states.values()),
                informed=jnp.stack([*informed.values()], axis=1),
                drafter=choice,
                passes=drafted.passes,
                phase=phase,
                length=context.length,
            ), verified

        joined = join(lookups or with_model, best)
        return joined._replace(close=close, otherwise=hand_over if lookups and with_model else None)

    def commit(
        params: Sequence[Params], state: MultiDrafterState, tokens: Array, length: Array, seen: Seen | None = None
    ) -> MultiDrafterState:
        state = _learnt(state, length, jnp.array(cost, jnp.float32), decay, drift)
        return update_each([part.commit for part in parts], params, state, tokens, length, seen)

    def prefill(
        params: Sequence[Params], state: MultiDrafterState, tokens: Array, length: Array, seen: Seen | None = None
    ) -> MultiDrafterState:
        return update_each([part.fill for part in parts], params, state, tokens, length, seen)

    def update_each(
        how: Sequence[Any],
        params: Sequence[Params],
        state: MultiDrafterState,
        tokens: Array,
        length: Array,
        seen: Seen | None,
    ) -> MultiDrafterState:
        states, informed = list(state.states), state.informed
        for index, commit_part in enumerate(how):
            # Before the first round and when a conversation continues, no drafter was chosen: all get the prompt.
            updated = (state.drafter == index) | (state.drafter == len(parts))
            upto = jnp.where(updated, length, jnp.minimum(informed[:, index], length))
            if seen is not None and index in seen.taken:  # idle drafters observe the target too
                part_seen = seen._replace(taken=seen.taken[index])
                states[index] = commit_part(params[index], states[index], tokens, upto, part_seen)
            else:
                update = partial(commit_part, params[index], states[index], tokens, upto)
                states[index] = lax.cond(jnp.any(upto != informed[:, index]), update, lambda old=states[index]: old)
            informed = informed.at[:, index].set(upto)
        nobody = jnp.full_like(state.drafter, len(parts))
        return state._replace(states=tuple(states), informed=informed, drafter=nobody)

    observers = {i: part.observe for i, part in enumerate(parts) if part.observe is not None}
    widths = sorted({observer.target_width for observer in observers.values()})
    if len(widths) > 1:
        raise ValueError(f"drafters that read targets {' and '.join(map(str, widths))} wide cannot read the same one")
    ends = np.cumsum([0, *(len(observer.layers) for observer in observers.values())]).tolist()

    def take(params: Sequence[Params], hidden: Array) -> dict[int, Any]:
        """Results by drafter, also of idle ones, each from its layers."""
        spans = zip(observers.items(), ends, ends[1:], strict=False)
        return {i: observer.take(params[i], hidden[:, :, begin:end]) for (i, observer), begin, end in spans}

    layers = tuple(layer for observer in observers.values() for layer in observer.layers)
    observe = Observer(take, layers, widths[0]) if observers else None
    return Drafter(init, source, commit, lengths.pop(), observe=observe, prefill=prefill)


def _joined(sources: Sequence[Source], rows: Sequence[Array], vocab_size: int | None) -> Source:
    """Joins sources, each with its own rows [B] bool; a model without rows is not run.

    `close` returns a tuple of their states.
    """

    def open(going: Array) -> tuple[Any, ...]:
        return tuple(source.open(going & mine) for source, mine in zip(sources, rows, strict=True))

    def predict(memory: tuple[Any, ...], drafted: Array, uniform: Array) -> tuple[Next, tuple[Any, ...]]:
        each, after = [], []
        for source, mine, before in zip(sources, rows, memory, strict=True):
            run = partial(source.predict, before, drafted, uniform)
            if isinstance(source.cost, float) and source.cost == 0:
                following, left = run()
            else:  # a model runs if it has any row; zeros are not read
                shapes = jax.eval_shape(run)[0]
                nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
                following, left = lax.cond(jnp.any(mine), run, lambda result=(nothing, before): result)
            each.append(following)
            after.append(left)
        return _by_row(rows, each, vocab_size), tuple(after)

    def keep(memory: tuple[Any, ...], token: Array, is_drafted: Array, drafted: Array) -> tuple[Any, ...]:
        each = zip(sources, rows, memory, strict=True)
        return tuple(source.keep(before, token, is_drafted & mine, drafted) for source, mine, before in each)

    def close(drafted: Drafted) -> tuple[tuple[DrafterState, ...], Drafted]:
        states, verified = [], drafted
        for source, mine, memory in zip(sources, rows, drafted.memory, strict=True):
            passes, length = jnp.where(mine, drafted.passes, 0), jnp.where(mine, drafted.length, 0)
            masked = drafted._replace(passes=passes, length=length, memory=memory)
            state, rewritten = source.close(masked)
            states.append(state)
            if rewritten is not masked:  # the source changed its draft
                length = jnp.where(mine, rewritten.length, verified.length)
                verified = verified._replace(
                    tokens=jnp.where(mine[:, None], rewritten.tokens, verified.tokens), length=length
                )
        return tuple(states), verified

    chosen: Array | bool = all(source.chosen is True for source in sources)
    if not chosen:
        each = [jnp.asarray(source.chosen) & mine for source, mine in zip(sources, rows, strict=True)]
        chosen = functools.reduce(jnp.logical_or, each)
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


def _in_phase(sums: Array, phase: Array) -> Array:
    """The sums [B, N] of each row's phase [B], from [B, 2, N]."""
    return jnp.take_along_axis(sums, phase[:, None, None], axis=1)[:, 0]


def _learnt(state: MultiDrafterState, length: Array, cost: Array, decay: float, drift: float) -> MultiDrafterState:
    """The sums after a round that extended the text to `length`; only those of the round's phase change."""
    count = cost.shape[0]
    drafted = jnp.arange(count, dtype=jnp.int32)[None, :] == state.drafter[:, None]  # [B, N]
    moved = (state.drafter < count) & (length > state.length)
    here = (jnp.arange(PHASES, dtype=jnp.int32)[None, :] == state.phase[:, None]) & moved[:, None]  # [B, 2]
    emitted = (length - state.length).astype(jnp.float32)[:, None]
    spent = 1.0 + state.passes.astype(jnp.float32)[:, None] * cost[None, :]  # [B, N]
    tokens, time = _in_phase(state.tokens, state.phase), _in_phase(state.time, state.phase)
    worked = decay * tokens + emitted, decay * time + spent
    rate = jnp.sum(jnp.where(drafted, worked[0] / worked[1], 0.0), axis=1, keepdims=True)  # [B, 1]
    tokens = jnp.where(drafted, worked[0], tokens + drift * (OPTIMISM * rate - tokens))
    time = jnp.where(drafted, worked[1], time + drift * (1.0 - time))
    put = lambda sums, new: jnp.where(here[:, :, None], new[:, None, :], sums)  # noqa: E731
    return state._replace(tokens=put(state.tokens, tokens), time=put(state.time, time))
