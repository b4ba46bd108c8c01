"""Stopping rules against the paper's lines, and against what the paper leaves open."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stopping_cases import K, context, distribution_of_entropies, outcome

from specdec_jax import stopping
from specdec_jax.stopping import (
    _arms,
    adaedl,
    adaptive_gamma,
    at_least,
    bandit,
    goodput,
    hf_confidence,
    hf_heuristic,
    static,
    update_every,
)
from specdec_jax.stopping._readings import evaluated_positions, remember
from specdec_jax.stopping.adaptive_gamma import fitted_factor
from specdec_jax.stopping.goodput import acceptance


@pytest.mark.parametrize("minimum", [0, 1, 3])
def test_at_least_overrules_until_its_minimum_only(minimum):
    rows, inner, policy = 300, adaedl(), at_least(minimum, adaedl())
    seen, _ = distribution_of_entropies(rows)
    for drafted in range(5):
        count = jnp.full(rows, drafted, jnp.int32)
        own, _ = inner.check(inner.init(rows), seen, count, context(rows))
        draw, _ = policy.check(policy.init(rows), seen, count, context(rows))
        np.testing.assert_array_equal(draw, np.asarray(own) | (drafted < minimum))
    none = at_least(minimum, static())
    begins, _ = none.begin(none.init(1, draft_length=0), context(1))
    assert bool(begins[0]) == (minimum > 0)
    keep = at_least(minimum, adaedl(keep_checked_token=True))
    _, state = keep.check(keep.init(rows, threshold=0.99), seen, jnp.zeros(rows, jnp.int32), context(rows))
    for drafted in range(1, 5):
        count = jnp.full(rows, drafted, jnp.int32)
        go_on, _ = keep.proceed(state, seen, seen.top_token, count, context(rows))
        np.testing.assert_array_equal(go_on, ~np.asarray(state.failed) | (drafted < minimum))


def test_a_threshold_read_from_a_state_is_accepted():
    state = adaedl().init(1, threshold=0.99)
    np.testing.assert_array_equal(
        adaedl().init(1, threshold=state.control.threshold).control.threshold, state.control.threshold
    )


def test_the_number_of_rounds_of_update_every_is_a_rows_own():
    policy, shown = update_every(hf_heuristic()), []
    state = policy.init(3, draft_length=5, rounds=[1, 2, 3])
    for _ in range(4):
        state = policy.update(state, *outcome([5] * 3, [0] * 3))
        shown.append(np.asarray(policy.threshold(state)).tolist())
    assert shown == [[4, 5, 5], [3, 4, 5], [2, 4, 4], [1, 3, 4]]


def test_positions_evaluated():
    """3 drafted: 1 accepted evaluates two of them; all accepted three; beyond the buffer nothing is remembered."""
    evaluated, accepted = evaluated_positions(*outcome([3, 3, 0, 3], [1, 3, 0, 0]), positions=4)
    assert np.asarray(evaluated).sum(axis=1).tolist() == [2, 3, 0, 1]
    assert np.asarray(evaluated & accepted).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [0] * 4, [0] * 4]
    buffer = remember(jnp.zeros((3, 2)), jnp.array([0, 1, 2]), jnp.array([5.0, 6.0, 7.0]))
    assert buffer.tolist() == [[5, 0], [0, 6], [0, 0]]


# Decisions and updates by hand


ALL_OR_NOTHING = {"step": 1.0, "threshold_decay": 0.0, "acceptance_decay": 0.0}
BY_HAND = {  # policy, hyperparameters, drafted and accepted tokens of rows, fields of the state after one round
    # Lambda 0.7 and rate 0.9: 4 of 5 accepted give rate 0.85 < 0.9 and lambda 0.9 * 0.7 + 0.1 * 0.71. All 5 of 5 are
    # not the full length of 7: lambda falls; 7 of 7 leaves it, and so does no draft at all.
    "adaedl": (
        *(stopping.adaedl(), {}, [5, 5, 7, 0], [4, 5, 7, 0]),
        {"control.acceptance": [0.85, 0.95, 0.95, 0.9], "control.threshold": [0.701, 0.699, 0.7, 0.7]},
    ),
    "adaedl, bounds of lambda": (
        *(stopping.adaedl(), {"threshold": [0.95, 0.05], **ALL_OR_NOTHING}, [3, 3], [0, 3]),
        {"control.threshold": [0.99, 0.0]},
    ),
    # From 0.6: all of 2 gives match 0.5 < 0.9, so 0.601; at match 0.9 a full draft stays and a shorter one falls.
    "draft_and_verify": (
        *(stopping.draft_and_verify(), {}, [2, 0], [2, 0]),
        {"acceptance": [0.5, 0.0], "threshold": [0.601, 0.6]},
    ),
    "draft_and_verify, full": (
        *(stopping.draft_and_verify(), {"initial_match": 1.0}, [K, K - 1], [K - 1, K - 1]),
        {"threshold": [0.6, 0.599]},
    ),
    # From 5: all 5 give 7; 4 of 5 and a cut draft give 4; no draft changes nothing. K is the most, 1 the least.
    "hf_heuristic": (stopping.hf_heuristic(), {}, [5, 5, 3, 0], [5, 4, 3, 0], {"draft_length": [7, 4, 4, 5]}),
    "hf_heuristic, ends": (
        *(stopping.hf_heuristic(), {"draft_length": [6, 1]}, [6, 1], [6, 0]),
        {"draft_length": [K, 1]},
    ),
    # From 4 at 0.65: 4 of 4 give 0.825 and 6; 3 of 3 (cut) 0.825 and 5; 2 of 4 0.575 and 4; 1 of 4 0.45 and 3.
    "gamma_tuning": (
        *(stopping.gamma_tuning(), {}, [4, 3, 4, 4, 0], [4, 3, 2, 1, 0]),
        {"draft_length": [6, 5, 4, 3, 4], "acceptance": [0.825, 0.825, 0.575, 0.45, 0.65]},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_one_round_by_hand(name):
    policy, hyperparameters, drafted, accepted, expected = BY_HAND[name]
    after = policy.update(policy.init(len(drafted), **hyperparameters), *outcome(drafted, accepted))
    for field, values in expected.items():
        np.testing.assert_allclose(operator.attrgetter(field)(after), values, rtol=1e-6)


def test_hf_confidence_by_hand():
    """Four accepted at 0.9 and two rejected at 0.3: no cost between them, and the highest edge that has none is 0.9."""
    policy = hf_confidence(bins=10, positions=4)
    state = policy.init(1)
    for probability, accepted in [(0.9, 2), (0.9, 2), (0.3, 0), (0.3, 0)]:
        history = state.history._replace(probability=jnp.full((1, 4), probability))
        before, drafted = state.threshold, max(accepted, 1)
        state = policy.update(state._replace(history=history), *outcome([drafted], [accepted]))
    np.testing.assert_allclose([before[0], state.threshold[0]], [0.4, 0.9], rtol=1e-6)
    assert state.history.accepted_above[0].tolist() == [4] * 10
    assert state.history.rejected_above[0].tolist() == [2] * 4 + [0] * 6


def test_the_fitted_factor_by_hand():
    """Prior (10 positions at 0.2) and one round: two positions at 4 nats, the second rejected."""
    policy = adaptive_gamma()
    state = policy.init(1)._replace(root_entropy=jnp.full((1, 32), 2.0))
    np.testing.assert_allclose(fitted_factor(state), 0.2, rtol=1e-6)
    after = policy.update(state, *outcome([3], [1]))
    np.testing.assert_allclose(fitted_factor(after), ((10 * np.sqrt(0.2) + 1) / (10 + 4)) ** 2, rtol=1e-6)
    calm = state._replace(prior_weight=jnp.full(1, 1e-6), rejected=jnp.zeros(1))
    np.testing.assert_allclose(fitted_factor(policy.update(calm, *outcome([3], [3]))), 1e-3, rtol=1e-6)


def test_the_average_accepted_length_waits_for_its_warmup():
    """weight 1: the average is the last round's. It moves at rounds 15 and 20 only, to one beyond it."""
    policy = stopping.accepted_length_ema()
    state, course = policy.init(1, weight=1.0), []
    for accepted in [0] * 15 + [5] * 5:
        state = policy.update(state, *outcome([5], [accepted]))
        course.append(int(state.draft_length[0]))
    assert course == [3] * 14 + [1] * 5 + [6]


@pytest.mark.parametrize("wanted, tier", [(1, 1), (2, 3), (3, 3), (4, 7), (7, 7)])
def test_a_tier_holds_the_wanted_length(wanted, tier):
    policy = stopping.accepted_length_ema(tiers=(1, 3, 7))
    state = policy.init(1, weight=1.0, interval=1, warmup=0)
    assert int(policy.update(state, *outcome([K], [wanted - 1])).draft_length[0]) == tier


@pytest.mark.parametrize("a, cost, best", [(0.5, 0.05, 3), (0.7, 0.05, 6), (0.9, 0.1, 10), (0.6, 0.2, 2), (1, 0.1, 16)])
def test_goodput_drafts_the_best_static_length(a, cost, best):
    """The optima of Leviathan et al.'s formula (arXiv 2211.17192, section 3.3), as tabulated for these values."""
    policy = goodput()
    state = policy.init(1, prior_acceptance=a, drafter_cost=cost, verification_cost=0.0)
    begins, state = policy.begin(state, context(1))
    assert bool(begins[0]) and int(state.draft_length[0]) == best


def test_goodput_forgives_a_drafter_that_it_switched_off():
    policy = goodput()
    state = policy.init(1, least=0, drafter_cost=0.4)
    for _ in range(4):
        state = policy.update(state, *outcome([4], [0]))
    begins, off = policy.begin(state, context(1))
    assert not bool(begins[0]) and float(acceptance(off)[0]) < 0.5
    for _ in range(60):
        off = policy.update(off, *outcome([0], [0]))
    assert bool(policy.begin(off, context(1))[0][0])


def test_the_reward_of_an_arm():
    """3 tokens for 4 passes and 2 drafts at 0.25 and 0.5: 3 / (1 + 1 + 1); no pass teaches nothing."""
    arms = _arms.begin_arms(2, 3, 0.25, 0.5, 0.1)._replace(arm=jnp.array([1, 1]))
    after = _arms.learn(arms, jnp.array([3, 1]), jnp.array([4, 0]), jnp.array([2, 0]))
    assert after.pulls.tolist() == [[0, 1, 0], [0, 0, 0]] and after.rewards.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_a_bandit_finds_the_best_length():
    """Everything is accepted, so longer is better; and with nothing accepted shorter."""
    policy, now, lengths = bandit(), context(2), []
    begin, update = jax.jit(policy.begin), jax.jit(policy.update)
    state = jax.tree.map(jnp.asarray, policy.init(2))
    for _ in range(60):
        _, state = begin(state, now)
        lengths.append(state.draft_length.tolist())
        state = update(state, *outcome(lengths[-1], [lengths[-1][0], 0]))
    assert [row[0] for row in lengths[:8]] == [1, 2, 3, 4] * 2
    assert np.mean(np.array(lengths[30:]) == [4, 1], axis=0).min() > 0.7


def test_goodput_pays_for_passes_what_this_rounds_drafter_costs():
    """0 is a drafter cost of 0, 3 one three times as high: [0.1, 0.0, 0.3] at relative cost [1, 0, 3]."""
    policy, told = goodput(most=K), context(3)
    told = told._replace(relative_drafter_cost=jnp.array([1.0, 0.0, 3.0]))
    _, state = policy.begin(policy.init(3, drafter_cost=0.1, verification_cost=0.05), told)
    costs = policy.init(3, drafter_cost=[0.1, 0.0, 0.3], verification_cost=0.05)
    _, expected = policy.begin(costs, context(3))
    np.testing.assert_array_equal(state.draft_length, expected.draft_length)
    assert len(set(np.asarray(state.draft_length).tolist())) == 3
