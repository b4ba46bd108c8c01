"""Stopping rules against the paper's lines, and against what the paper leaves open."""

import jax.numpy as jnp
import numpy as np
import pytest
from stopping_cases import K, context, distribution_of_entropies, outcome

from specdec_jax.stopping import adaedl, adaptive_gamma, at_least, goodput, hf_heuristic, static, update_every
from specdec_jax.stopping.adaptive_gamma import fitted_factor


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
    again = adaedl().init(1, threshold=state.control.threshold)
    np.testing.assert_array_equal(again.control.threshold, state.control.threshold)


def test_the_number_of_rounds_of_update_every_is_a_rows_own():
    policy, shown = update_every(hf_heuristic()), []
    state = policy.init(3, draft_length=5, rounds=[1, 2, 3])
    for _ in range(4):
        state = policy.update(state, *outcome([5] * 3, [0] * 3))
        shown.append(np.asarray(policy.threshold(state)).tolist())
    assert shown == [[4, 5, 5], [3, 4, 5], [2, 4, 4], [1, 3, 4]]


# Decisions and updates by hand


def test_lambda_after_one_round_by_hand():
    """Lambda 0.7 and rate 0.9: 4 of 5 accepted give rate 0.85 < 0.9 and lambda 0.9 * 0.7 + 0.1 * 0.71. All 5 of 5 are
    not the full length of 7: lambda falls; 7 of 7 leaves it, and so does no draft at all.
    """
    after = adaedl().update(adaedl().init(4), *outcome([5, 5, 7, 0], [4, 5, 7, 0])).control
    np.testing.assert_allclose(after.acceptance, [0.85, 0.95, 0.95, 0.9], rtol=1e-6)
    np.testing.assert_allclose(after.threshold, [0.701, 0.699, 0.7, 0.7], rtol=1e-6)
    extreme = adaedl().init(2, threshold=[0.95, 0.05], step=1.0, threshold_decay=0.0, acceptance_decay=0.0)
    bounds = adaedl().update(extreme, *outcome([3, 3], [0, 3])).control.threshold
    np.testing.assert_allclose(bounds, [0.99, 0.0], rtol=1e-6)


def test_the_fitted_factor_by_hand():
    """Prior (10 positions at 0.2) and one round: two positions at 4 nats, the second rejected."""
    policy = adaptive_gamma()
    state = policy.init(1)._replace(root_entropy=jnp.full((1, 32), 2.0))
    np.testing.assert_allclose(fitted_factor(state), 0.2, rtol=1e-6)
    after = policy.update(state, *outcome([3], [1]))
    np.testing.assert_allclose(fitted_factor(after), ((10 * np.sqrt(0.2) + 1) / (10 + 4)) ** 2, rtol=1e-6)
    calm = state._replace(prior_weight=jnp.full(1, 1e-6), rejected=jnp.zeros(1))
    np.testing.assert_allclose(fitted_factor(policy.update(calm, *outcome([3], [3]))), 1e-3, rtol=1e-6)


@pytest.mark.parametrize("a, cost, best", [(0.5, 0.05, 3), (0.7, 0.05, 6), (0.9, 0.1, 10), (0.6, 0.2, 2), (1, 0.1, 16)])
def test_goodput_drafts_the_best_static_length(a, cost, best):
    """The optima of Leviathan et al.'s formula (arXiv 2211.17192, section 3.3), as tabulated for these values."""
    policy = goodput()
    state = policy.init(1, prior_acceptance=a, drafter_cost=cost, verification_cost=0.0)
    begins, state = policy.begin(state, context(1))
    assert bool(begins[0]) and int(state.draft_length[0]) == best


def test_goodput_pays_for_passes_what_this_rounds_drafter_costs():
    """0 is a drafter cost of 0, 3 one three times as high: [0.1, 0.0, 0.3] at relative cost [1, 0, 3]."""
    policy, round_context = goodput(most=K), context(3)
    round_context = round_context._replace(relative_drafter_cost=jnp.array([1.0, 0.0, 3.0]))
    _, state = policy.begin(policy.init(3, drafter_cost=0.1, verification_cost=0.05), round_context)
    costs = policy.init(3, drafter_cost=[0.1, 0.0, 0.3], verification_cost=0.05)
    _, expected = policy.begin(costs, context(3))
    np.testing.assert_array_equal(state.draft_length, expected.draft_length)
    assert len(set(np.asarray(state.draft_length).tolist())) == 3
