"""Stopping rules against the paper's lines, and against what the paper leaves open."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest
from stopping_cases import K, context, distribution_of_entropies, outcome

from specdec_jax.stopping import adaedl, at_least, static


@pytest.mark.parametrize(
    "hyperparameters, own",
    [
        ({}, {}),
        ({"threshold": 0.3, "target_acceptance": 0.6}, {"lam": 0.3, "alpha": 0.6}),
        (
            {"step": 0.2, "threshold_decay": 0.3, "acceptance_decay": 0.8, "threshold": 0.9},
            {"epsilon": 0.2, "beta2": 0.3, "beta1": 0.8, "lam": 0.9},
        ),
    ],
    ids=["paper", "other_target", "fast"],
)
def test_algorithm_1_line_by_line(hyperparameters, own):
    """300 rounds of 20 rows with random outcomes: rounds without drafts, full ones, and drafts cut by the budget."""
    rng, rows, policy = np.random.default_rng(1), 20, adaedl()
    twins = [oracles.AdaEDL(**own) for _ in range(rows)]
    state, update = policy.init(rows, **hyperparameters), jax.jit(policy.update)
    seen = set()
    for _ in range(300):
        drafted = rng.integers(0, K + 1, rows)
        accepted = np.minimum(rng.integers(0, 2 * K, rows), drafted)
        state = update(state, *outcome(drafted, accepted))
        for twin, n, a in zip(twins, drafted.tolist(), accepted.tolist(), strict=True):
            twin.learns(n, a, K)
            seen.add((n == 0, a == n, a == K, twin.rate < twin.alpha))
        np.testing.assert_allclose(state.control.threshold, [twin.lam for twin in twins], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(policy.threshold(state), state.control.threshold)
        np.testing.assert_allclose(state.control.acceptance, [twin.rate for twin in twins], rtol=2e-5, atol=1e-6)
    assert len(seen) >= 7, "the random outcomes missed a branch"


def test_one_step_of_algorithm_1_by_hand():
    """Lambda 0.7 and rate 0.9: 4 of 5 accepted give rate 0.85 < 0.9 and lambda 0.9 * 0.7 + 0.1 * 0.71."""
    policy = adaedl()
    after = policy.update(policy.init(4), *outcome([5, 5, 7, 0], [4, 5, 7, 0]))
    np.testing.assert_allclose(after.control.acceptance, [0.85, 0.95, 0.95, 0.9], rtol=1e-6)
    # all 5 of 5 accepted is not the full length of 7: lambda falls; 7 of 7 leaves it, and so does no draft at all
    np.testing.assert_allclose(after.control.threshold, [0.701, 0.699, 0.7, 0.7], rtol=1e-6)


def test_lambda_stays_within_0_and_099():
    policy = adaedl()
    hyperparameters = {"step": 1.0, "threshold_decay": 0.0, "acceptance_decay": 0.0}
    up = policy.update(policy.init(1, threshold=0.95, **hyperparameters), *outcome([3], [0]))
    down = policy.update(policy.init(1, threshold=0.05, **hyperparameters), *outcome([3], [3]))
    np.testing.assert_allclose([up.control.threshold[0], down.control.threshold[0]], [0.99, 0.0], rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("raw", [False, True])
def test_the_bound_of_adaedl(temperature, raw):
    rows, policy = 300, adaedl(raw_entropy=raw)
    seen, logits = distribution_of_entropies(rows, temperature=temperature)
    state = policy.init(rows, entropy_factor=0.15, threshold=0.75)
    draw, after = policy.check(state, seen, jnp.zeros(rows, jnp.int32), context(rows))
    read = 1.0 if raw or temperature == 0 else temperature
    entropies = np.array([oracles.entropy(oracles.warp(row, read)) for row in logits])
    bound = 1 - np.sqrt(0.15 * entropies)
    clear = np.abs(bound - 0.75) > 1e-4
    assert clear.sum() > 250 and 20 < (bound < 0.75).sum() < 280
    np.testing.assert_array_equal(np.asarray(draw)[clear], (bound >= 0.75)[clear])
    go_on, _ = policy.proceed(after, seen, seen.top_token, jnp.ones(rows, jnp.int32), context(rows))
    assert np.asarray(go_on).all(), "the published rule stops in check alone"


def test_static_stops_before_the_next_pass_is_paid():
    rows, policy = 4, static()
    state = policy.init(rows, draft_length=[0, 1, 3, 9])
    begins, _ = policy.begin(state, context(rows))
    assert np.asarray(begins).tolist() == [False, True, True, True]
    seen, _ = distribution_of_entropies(rows)
    draw, _ = policy.check(state, seen, jnp.full(rows, 8, jnp.int32), context(rows))
    assert np.asarray(draw).all()
    for drafted in range(1, 10):
        go_on, _ = policy.proceed(state, seen, seen.top_token, jnp.full(rows, drafted, jnp.int32), context(rows))
        assert np.asarray(go_on).tolist() == [drafted < length for length in (0, 1, 3, 9)]


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
