"""The draft loop over a scripted source and a scripted policy, against the same round written row by row in Python."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.decoding import draft_loop
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.types import Distribution, Next, RoundContext, Source, StoppingPolicy

ROWS, MOST, VOCAB = 128, 5, 7


class Asked(NamedTuple):
    begun: jax.Array  # [B] int32, times each question was put to the row
    checked: jax.Array
    proceeded: jax.Array


class Script(NamedTuple):
    """Answers and facts by row, and by row and drafted tokens."""

    alive: np.ndarray
    budget: np.ndarray
    begins: np.ndarray
    known: np.ndarray  # [B, K + 1]
    draws: np.ndarray  # [B, K + 1]
    goes: np.ndarray  # [B, K + 1]
    uniform: np.ndarray  # [B, K]


def script(seed=0):
    rng = np.random.default_rng(seed)
    often = lambda *shape: rng.random(shape) < 0.92  # noqa: E731
    wide = (ROWS, MOST + 1)
    budget = rng.integers(0, MOST + 1, ROWS).astype(np.int32)
    uniform = rng.random((ROWS, MOST)).astype(np.float32)
    return Script(often(ROWS), budget, often(ROWS), often(*wide), often(*wide), often(*wide), uniform)


def at(table, drafted):
    return jnp.take_along_axis(jnp.asarray(table), drafted[:, None], axis=1)[:, 0]


def policy_of(plan):
    def begin(state, context):
        return jnp.asarray(plan.begins), state._replace(begun=state.begun + 1)

    def check(state, distribution, drafted, context):
        return at(plan.draws, drafted), state._replace(checked=state.checked + 1)

    def proceed(state, distribution, token, drafted, context):
        return at(plan.goes, drafted), state._replace(proceeded=state.proceeded + 1)

    return StoppingPolicy(lambda batch: (), begin, check, proceed, None, None)


def source_of(plan):
    """Its memory is a sum over drafts of token times place, so that a draft too many or at another place shows."""

    def predict(memory, drafted, uniform):
        number = drafted.astype(jnp.float32)
        log_prob = jnp.broadcast_to(-number[:, None], (ROWS, VOCAB))
        seen = Distribution(log_prob, drafted, number + 0.5, number / 10, number, number, number)
        return Next(seen, (uniform * 100).astype(jnp.int32), at(plan.known, drafted)), memory

    def keep(memory, token, drawn, drafted):
        return memory + jnp.where(drawn, token * (drafted + 1), 0)

    return Source(lambda going: jnp.zeros(ROWS, jnp.int32), predict, keep, lambda drafted: ((), drafted))


@jax.jit
def loop(plan):
    zeros = jnp.zeros(ROWS, jnp.int32)
    context = RoundContext(zeros + 3, zeros, plan.budget, plan.alive, zeros.astype(jnp.uint32), make_warp(ROWS), ())
    return draft_loop.draft(
        source_of(plan),
        policy_of(plan),
        Asked(zeros, zeros, zeros),
        context,
        lambda index: jnp.take(plan.uniform, index, axis=1),
        MOST,
        jnp.zeros((ROWS, MOST, VOCAB), jnp.float32),
    )


def twin(plan, row):
    """(tokens, asked_for, memory, Asked) of one row."""
    tokens, asked_for, asked = [], 0, [0, 0, 0]
    if plan.alive[row]:
        asked[0] = 1
        going = plan.begins[row] and plan.budget[row] > 0
        while going and plan.known[row, len(tokens)]:
            asked_for, asked[1] = asked_for + 1, asked[1] + 1
            if not plan.draws[row, len(tokens)]:
                break
            tokens.append(int(plan.uniform[row, len(tokens)] * 100))
            asked[2] += 1
            going = plan.goes[row, len(tokens)] and len(tokens) < plan.budget[row]
    return tokens, asked_for, sum(token * (place + 1) for place, token in enumerate(tokens)), asked


@pytest.mark.parametrize("seed", range(3))
def test_a_round_is_the_twins(seed):
    plan = script(seed)
    end = jax.tree.map(np.asarray, loop(plan))
    lengths = set()
    for row in range(ROWS):
        tokens, asked_for, memory, asked = twin(plan, row)
        assert end.tokens[row, : len(tokens)].tolist() == tokens and end.length[row] == len(tokens)
        assert (end.passes[row], end.memory[row]) == (asked_for, memory)
        assert [leaf[row] for leaf in end.policy] == asked, "a row that does not go on keeps its policy's state"
        np.testing.assert_allclose(end.entropy[row, :asked_for], np.arange(asked_for) + 0.5)
        np.testing.assert_allclose(end.max_prob[row, :asked_for], np.arange(asked_for) / 10, rtol=1e-6)
        assert np.isnan(end.entropy[row, asked_for:]).all() and np.isnan(end.max_prob[row, asked_for:]).all()
        assert (end.log_q[row, : len(tokens)] == -np.arange(len(tokens))[:, None]).all()
        lengths.add(len(tokens))
    assert lengths == set(range(MOST + 1)), "every length occurs"


def test_check_is_given_nothing_of_the_token():
    """The line that makes every rule lossless: `check` gets the distribution, the count and the context alone."""
    taken = []

    def check(*given):
        taken.append(given)
        return jnp.ones(ROWS, bool), given[0]

    plan = script()
    policy = policy_of(plan).replace(check=check)
    zeros = jnp.zeros(ROWS, jnp.int32)
    context = RoundContext(zeros, zeros, zeros + MOST, zeros == 0, zeros.astype(jnp.uint32), make_warp(ROWS), ())
    half = jnp.full(ROWS, 0.5)
    seen = Distribution(jnp.zeros((ROWS, VOCAB)), zeros, half, half, half, half, half)
    for token in (1, VOCAB - 1):
        draft_loop.step(policy, Asked(zeros, zeros, zeros), context, zeros == 0, zeros, seen, zeros + token)
    jax.tree.map(np.testing.assert_array_equal, *taken)
