"""Stopping rules against the paper's lines, and against what the paper leaves open."""

import jax.numpy as jnp
import numpy as np
from stopping_cases import K, context, outcome

from specdec_jax.stopping import adaedl, goodput, hf_heuristic, update_every


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


def test_goodput_pays_for_passes_what_this_rounds_drafter_costs():
    """0 is a drafter cost of 0, 3 one three times as high: [0.1, 0.0, 0.3] at relative cost [1, 0, 3]."""
    policy, round_context = goodput(most=K), context(3)
    round_context = round_context._replace(relative_drafter_cost=jnp.array([1.0, 0.0, 3.0]))
    _, state = policy.begin(policy.init(3, drafter_cost=0.1, verification_cost=0.05), round_context)
    costs = policy.init(3, drafter_cost=[0.1, 0.0, 0.3], verification_cost=0.05)
    _, expected = policy.begin(costs, context(3))
    np.testing.assert_array_equal(state.draft_length, expected.draft_length)
    assert len(set(np.asarray(state.draft_length).tolist())) == 3
