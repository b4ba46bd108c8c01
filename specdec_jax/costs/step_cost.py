"""Measures the time of target passes and drafter steps on this machine. Their ratio c determines whether drafting pays.

Every figure is from a loop of passes inside one jitted program, compiled like decoders, so that it excludes dispatch;
programs alternate, so that slow moments of a shared machine affect all of them; the result is the median over repeats
with quartiles.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.compilation_cache import compile_together
from specdec_jax.costs.machine import load_average
from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.prefill import target_prefill
from specdec_jax.decoding.rounds import empty_log_q
from specdec_jax.decoding.sampling import DRAFT, argmax, make_warp, round_uniforms
from specdec_jax.sharding import by_rows
from specdec_jax.types import Array, Cache, Drafter, LanguageModel, Params, RoundContext, StoppingPolicy

SOURCE = 128  # slots of an encoder's source, all filled
SPREAD = 0.3  # maximum interquartile range on an idle machine, relative to the median


class Cost(NamedTuple):
    """Seconds of one pass or step: median and quartiles over repeats."""

    median: float
    low: float
    high: float


def target_pass(
    model: LanguageModel, params: Params, width: int, batch: int, slots: int, passes: int
) -> Callable[[], Any]:
    """A call that runs `passes` target passes of [batch, width] tokens over a half-full cache and waits for them.

    The cache is donated, as in decoding: a copy of sixteen rows' takes as long as half a pass.
    """

    def loop(params: Params, cache: Cache, tokens: Array) -> tuple[Cache, Array]:
        def one_pass(_: Array, carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
            cache, tokens = carry
            start = jnp.full((batch,), slots // 2, jnp.int32)
            logits, cache = model.apply(params, tokens, model.with_length(cache, start))
            chosen = argmax(logits.reshape(batch * width, -1))  # keeps XLA from removing the head
            return cache, chosen.reshape(batch, width)

        return by_rows(lax.fori_loop(0, passes, one_pass, (cache, tokens)))

    source = None if model.spec.source is None else _source(batch)
    cache = jax.jit(lambda params, source: model.init_cache(params, batch, slots, source))(params, source)
    tokens = jnp.ones((batch, width), jnp.int32)
    return _again(jax.jit(loop, donate_argnums=1), params, cache, tokens)


def _again(compiled: Callable[..., tuple[Any, Any]], params: Params, state: Any, *arguments: Any) -> Callable[[], Any]:
    """A call of `compiled(params, state, *arguments)`, which returns the next call's state first, and waits for it."""
    state = by_rows(state)  # on a mesh as it will be returned, for one compilation

    def call() -> Any:
        nonlocal state
        state, out = jax.block_until_ready(compiled(params, state, *arguments))
        return out

    return call


def prompt_pass(model: LanguageModel, params: Params, length: int) -> Callable[[], Any]:
    """A call that prefills a prompt of `length` tokens, in a cache that is a quarter longer, and waits for it."""
    tokens = jnp.ones((1, length + length // 4), jnp.int32)
    fill, full_length = target_prefill(model, None, 64), jnp.full((1,), length, jnp.int32)
    return lambda: jax.block_until_ready(fill(params, None, tokens, full_length))


def large_product(dtype: Any, size: int) -> Callable[[], Any]:
    """A call that multiplies two square matrices (2 * size**3 operations), for the attainable arithmetic rate."""
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    return lambda: jax.block_until_ready(product(matrix, matrix))


def draft_round(
    drafter: Drafter, params: Params, policy: StoppingPolicy, *, batch: int, slots: int, temperature: float
) -> Callable[[], Any]:
    """A call that drafts one round and waits for it; the entropies are not computed."""
    assert drafter.model is not None
    longest, vocab_size = drafter.max_draft_length, drafter.model.spec.vocab_size
    begin = jnp.full((batch,), slots // 2, jnp.int32)

    def draft(params: Params, before: Any, tokens: Array, policy_state: Any, context: RoundContext) -> Any:
        state, log_q = before
        source = drafter.source(params, state, tokens, context)
        chance = round_uniforms(jnp.zeros((batch,), jnp.uint32), context.emitted, longest)
        uniform = lambda step: chance[:, step, DRAFT]  # noqa: E731
        drafted = draft_loop.draft(source, policy, policy_state, context, uniform, longest, log_q)
        after, to_verify = source.close(drafted)
        after = drafter.commit(params, after, tokens, context.length)  # each call drafts the same
        return by_rows((after, drafted.log_q)), to_verify.tokens

    def half_full(params: Params, read: tuple[Array, Array], tokens: Array) -> Any:
        state = drafter.fill(params, drafter.init(params, batch, slots, read), tokens, begin)
        source = drafter.source(params, state, tokens, context)
        return state, empty_log_q(source, batch, longest, vocab_size, True)

    tokens = jnp.ones((batch, slots), jnp.int32)
    context = RoundContext(
        length=begin,
        emitted=jnp.zeros_like(begin),
        budget=jnp.full_like(begin, longest),
        alive=jnp.ones((batch,), bool),
        policy_seed=jnp.zeros((batch,), jnp.uint32),
        warp=jax.tree.map(jnp.asarray, make_warp(batch, temperature)),
        monitor=(),
    )
    begun = jax.jit(half_full)(params, _source(batch), tokens)
    return _again(jax.jit(draft, donate_argnums=1), params, begun, tokens, policy.init(batch), context)


def _source(batch: int) -> tuple[Array, Array]:
    """A source for encoders; the cost of later passes does not depend on its contents."""
    return jnp.ones((batch, SOURCE), jnp.int32), jnp.full((batch,), SOURCE, jnp.int32)


def alternate(
    programs: Mapping[str, Callable[[], Any]], repeats: int, per: Mapping[str, int], seconds: float = math.inf
) -> dict[str, Cost]:
    """Median and quartiles of `turns`."""
    return {name: summary(times) for name, times in turns(programs, repeats, per, seconds).items()}


def turns(
    programs: Mapping[str, Callable[[], Any]], repeats: int, per: Mapping[str, int], seconds: float = math.inf
) -> dict[str, list[float]]:
    """Runs the programs alternately, `repeats` times after a warm-up; times are divided by `per[name]` (default 1).

    After `seconds` three turns are enough. Entry i of every program belongs to turn i.
    """
    compile_together(programs.values())
    times: dict[str, list[float]] = {name: [] for name in programs}
    began = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - began > seconds:
            break
        for name, program in programs.items():
            watch = time.perf_counter()
            program()
            times[name].append((time.perf_counter() - watch) / per.get(name, 1))
    return times


def summary(times: Sequence[float]) -> Cost:
    """Median and quartiles."""
    low, median, high = np.percentile(times, (25, 50, 75))
    return Cost(float(median), float(low), float(high))


def busy_doubts() -> tuple[str, ...]:
    """A clause if the load average exceeds the number of cores."""
    load, cores = load_average(), os.cpu_count() or 1
    return (f"the load average was {load:.1f} on {cores} cores",) if load > cores else ()


def spread_doubts(times: Mapping[str, Cost]) -> tuple[str, ...]:
    """A clause about the time with the largest interquartile range, if that is too large."""
    name, (median, low, high) = max(times.items(), key=lambda entry: (entry[1].high - entry[1].low) / entry[1].median)
    too_far = high - low > SPREAD * median
    return (f"{name} took {1e3 * low:.1f} to {1e3 * high:.1f} ms (quartiles)",) if too_far else ()
