"""A replay of a drafter that reads its target: rounds are the live ones, though drafts depend on where they began."""

import jax.numpy as jnp
import numpy as np
import pytest
import replayed
from replayed import answered, assert_same_rounds, decoded, gap
from tiny_reading import reading_pair

from specdec_jax.contrib.trees import comb, survival_tree
from specdec_jax.costs.cost_model import flat
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.drafters.reading import reading
from specdec_jax.lossless import toys
from specdec_jax.replay.replay import oracle, replay
from specdec_jax.replay.trace import FEATURES
from specdec_jax.replay.tracing import trace_texts
from specdec_jax.stopping import adaedl, static, survival

MOST, VOCAB, LIMIT = 5, 12, 40
TABLE, READER = toys.table_model(VOCAB), toys.reading_table_model(VOCAB)
PAIR = toys.with_reading(toys.toy_pair(VOCAB, 5, distance=0.4), 5, size=1.5)
PARAMS = ModelParams(jnp.asarray(PAIR.target), toys.ReadingTable(jnp.asarray(PAIR.drafter), jnp.asarray(PAIR.read)))
RULES = {
    "static": (static(), {"draft_length": 4}),
    "adaedl": (adaedl(), {"threshold": 0.2}),
    "survival": (survival(), {"drafter_cost": 0.2}),
    "comb": (comb(), {"links": 4}),
    "survival with siblings": (survival_tree(siblings=3), {"drafter_cost": 0.2}),
}
PROMPTS = [[a, b] for a in range(4) for b in range(5)]
STOPS = (5,)


def live(policy, prompts, hyperparameters, limit=LIMIT, **options):
    prefill_options = {"policy_hyperparameters": hyperparameters, "record_rounds": limit}
    drafter = reading(READER, MOST, catch_up=4)
    return decoded(TABLE, drafter, PARAMS, prompts, policy, limit=limit, prefill_options=prefill_options, **options)


def trace_of(prompts, limit=LIMIT, **options):
    return replayed.trace_of((TABLE, READER), PARAMS, prompts, most=MOST, limit=limit, **options)


@pytest.fixture(scope="module")
def greedy_trace():
    return trace_of(PROMPTS, stop_ids=STOPS)


@pytest.mark.seldom
def test_rounds_of_a_drafter_with_attention_are_the_live_ones_from_a_prompts_first_token_on():
    """Prompts of one token: both places of the first pass's window are not known yet."""
    target, params, model, own = reading_pair()
    both, prompts, limit = ModelParams(params, own), [[5], [7, 3], [9]], 16
    prefill_options = {"policy_hyperparameters": {"draft_length": MOST}, "record_rounds": limit}
    options = {"limit": limit, "prefill_options": prefill_options, "temperature": 0.0}
    state = decoded(target, reading(model, MOST), both, prompts, **options)
    texts = answered(state, prompts)
    options = {"warp": {"temperature": 0.0}, "seed": [0] * 3, "max_draft_length": MOST, "chunk": 8}
    trace = trace_texts((target, model), (params, own), texts, limit=limit, **options)
    found = replay(trace, static(), {"draft_length": MOST}, record=True)
    assert_same_rounds(found, state)
    seen = np.asarray(state.record.entropy)[:, 0, :MOST]
    np.testing.assert_allclose(trace.chains[:, 0, :, FEATURES.index("entropy")], seen, atol=1e-4)


@pytest.mark.often(2)
@pytest.mark.parametrize("rule", RULES)
def test_greedy_rounds_are_the_live_ones(rule, greedy_trace):
    policy, hyperparameters = RULES[rule]
    state = live(policy, PROMPTS, hyperparameters, stop_ids=STOPS)
    assert_same_rounds(replay(greedy_trace, policy, hyperparameters, record=True), state)


def test_where_a_round_began_matters_and_is_seen(greedy_trace):
    """Without its chains the trace replays other rounds, and so it does with the chains of the positions after."""
    policy, hyperparameters = RULES["static"]
    right = replay(greedy_trace, policy, hyperparameters, record=True).record
    bare = replay(greedy_trace._replace(chains=None, run=None), policy, hyperparameters, record=True).record
    assert (right != bare).any()
    policy, hyperparameters = adaedl(), {"threshold": 0.45, "step": 0.0}
    right = replay(greedy_trace, policy, hyperparameters, record=True).record
    moved = greedy_trace._replace(chains=np.roll(greedy_trace.chains, -1, axis=2))
    assert (right != replay(moved, policy, hyperparameters, record=True).record).any()


def test_which_sibling_is_right_is_read_and_what_a_trace_does_not_tell_is_refused(greedy_trace):
    policy, hyperparameters = RULES["comb"]
    right = replay(greedy_trace, policy, hyperparameters, record=True).record
    moved = greedy_trace._replace(candidate=np.roll(greedy_trace.candidate, 1, axis=1))
    assert (right != replay(moved, policy, hyperparameters, record=True).record).any()
    few = replay(greedy_trace, policy, hyperparameters, widest=6)
    assert few.by_length.shape[-1] == 6 and few.rounds.sum() > (right[..., 0] >= 0).sum()
    with pytest.raises(ValueError, match="does not say which candidate is right"):
        replay(greedy_trace._replace(candidate=None), policy, hyperparameters)
    with pytest.raises(ValueError, match="3 siblings, and comb wants 4"):
        replay(greedy_trace, comb(most=4), hyperparameters)


@pytest.fixture(scope="module")
def sampled_trace():
    return trace_of([[1, 2]] * 2000, limit=24, temperature=0.9, seed=100_000)


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("rule", RULES)
def test_sampled_rounds_have_the_live_distribution(rule, sampled_trace):
    policy, hyperparameters = RULES[rule]
    state = live(policy, [[1, 2]] * 2000, hyperparameters, limit=24, temperature=0.9)
    assert gap(state, replay(sampled_trace, policy, hyperparameters)) < 4.0
    never = sampled_trace._replace(run=np.minimum(sampled_trace.run, 2))
    if rule == "static":
        assert gap(state, replay(never, policy, hyperparameters)) > 6.0


def test_the_oracle_reads_chains(greedy_trace):
    best = oracle(greedy_trace).total_speedup(flat(0.1, MOST))
    for policy, hyperparameters in RULES.values():
        if not policy.drafts_chains:
            continue
        assert replay(greedy_trace, policy, hyperparameters).total_speedup(flat(0.1, MOST)) <= best + 1e-9
