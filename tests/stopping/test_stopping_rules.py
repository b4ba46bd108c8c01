"""Stopping rules by hand: single steps worked out on paper, and what they may read of a distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stopping_cases import K, context, distribution_of_entropies, outcome

from specdec_jax import stopping
from specdec_jax.stopping import _arms, adaptive_gamma, bandit, goodput, hf_confidence, policy_bandit
from specdec_jax.stopping._readings import evaluated_positions, remember, token_probability
from specdec_jax.stopping.adaptive_gamma import fitted_factor
from specdec_jax.stopping.goodput import acceptance
from specdec_jax.text.strategies import find_factory, names

pytestmark = pytest.mark.slow

ROWS = 300
TEMPERATURES = np.tile(np.float32([0.0, 1.0, 0.7]), ROWS // 3)


def zeros(rows=ROWS):
    return jnp.zeros(rows, jnp.int32)


@functools.cache
def mixed_distributions():
    """Distributions of rows at three temperatures, and a token each that could be drawn."""
    distribution, _ = distribution_of_entropies(ROWS, temperature=TEMPERATURES)
    token = jax.random.categorical(jax.random.key(0), distribution.log_prob).astype(jnp.int32)
    return distribution, token


# What may be read


def test_the_probability_of_a_token():
    distribution, token = mixed_distributions()
    read = np.asarray(token_probability(distribution, token, context(ROWS, TEMPERATURES)))
    is_sampled, rows = TEMPERATURES > 0, np.arange(ROWS)
    np.testing.assert_allclose(read[is_sampled], np.exp(distribution.log_prob)[rows, token][is_sampled], rtol=1e-5)
    np.testing.assert_array_equal(read[~is_sampled], distribution.raw_max_prob[~is_sampled])
    assert (read[~is_sampled] < 0.99).any() and (np.exp(distribution.log_prob)[~is_sampled].max(axis=1) == 1).all()


@pytest.mark.parametrize("name", names("policy"))
def test_a_rule_reads_no_more_of_a_distribution_than_a_replay_keeps(name):
    """A distribution of one token, the drawn one as token 0, and no top token: answers and states must be the same."""
    distribution, token = mixed_distributions()
    chosen = jnp.take_along_axis(distribution.log_prob, token[:, None], axis=1)
    little = distribution._replace(log_prob=chosen, top_token=jnp.full(ROWS, -1, jnp.int32))
    policy, now = find_factory("policy", name)(), context(ROWS, TEMPERATURES)

    def ask(distribution, token):
        _, state = policy.begin(policy.init(ROWS), now)
        draw, state = policy.check(state, distribution, zeros(), now)
        go_on, state = policy.proceed(state, distribution, token, zeros() + 1, now)
        return draw, go_on, state

    jax.tree.map(np.testing.assert_array_equal, ask(distribution, token), ask(little, zeros()))


def test_positions_evaluated():
    """3 drafted: 1 accepted evaluates two of them; all accepted three; beyond the buffer nothing is remembered."""
    evaluated, accepted = evaluated_positions(*outcome([3, 3, 0, 3], [1, 3, 0, 0]), positions=4)
    assert np.asarray(evaluated).sum(axis=1).tolist() == [2, 3, 0, 1]
    assert np.asarray(evaluated & accepted).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [0] * 4, [0] * 4]
    buffer = remember(jnp.zeros((3, 2)), jnp.array([0, 1, 2]), jnp.array([5.0, 6.0, 7.0]))
    assert buffer.tolist() == [[5, 0], [0, 6], [0, 0]]


# Decisions and updates by hand


@pytest.mark.parametrize("name", ["adaedl", "max_confidence", "adaptive_gamma"])
def test_keeping_the_checked_token_draws_always_and_stops_after_the_failure(name):
    published, keep = find_factory("policy", name)(), find_factory("policy", name)(keep_checked_token=True)
    (distribution, token), now = mixed_distributions(), context(ROWS, TEMPERATURES)
    says, after = published.check(published.init(ROWS), distribution, zeros(), now)
    go_on, _ = published.proceed(after, distribution, token, zeros() + 1, now)
    draw, after = keep.check(keep.init(ROWS), distribution, zeros(), now)
    stays, _ = keep.proceed(after, distribution, token, zeros() + 1, now)
    assert np.asarray(go_on).all() and np.asarray(draw).all() and 0 < np.asarray(says).sum() < ROWS
    np.testing.assert_array_equal(stays, says)


def test_draft_and_verify_by_hand():
    """From 0.6: all of 2 gives match 0.5 < 0.9, so 0.601; at match 0.9 a full draft stays and a shorter one falls."""
    policy = stopping.draft_and_verify()
    first = policy.update(policy.init(2), *outcome([2, 0], [2, 0]))
    np.testing.assert_allclose(first.acceptance, [0.5, 0.0])
    np.testing.assert_allclose(first.threshold, [0.601, 0.6], rtol=1e-6)
    good = policy.update(policy.init(2, initial_match=1.0), *outcome([K, K - 1], [K - 1, K - 1]))
    np.testing.assert_allclose(good.threshold, [0.6, 0.599], rtol=1e-6)


def test_hf_heuristic_by_hand():
    """From 5: all 5 give 7; 4 of 5 and a cut draft give 4; no draft changes nothing. K is the most, 1 the least."""
    policy = stopping.hf_heuristic()
    after = policy.update(policy.init(4), *outcome([5, 5, 3, 0], [5, 4, 3, 0]))
    assert after.draft_length.tolist() == [7, 4, 4, 5]
    ends = policy.update(policy.init(2, draft_length=[6, 1]), *outcome([6, 1], [6, 0]))
    assert ends.draft_length.tolist() == [K, 1]


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


def test_gamma_tuning_by_hand():
    """From 4 at 0.65: 4 of 4 give 0.825 and 6; 3 of 3 (cut) 0.825 and 5; 2 of 4 0.575 and 4; 1 of 4 0.45 and 3."""
    policy = stopping.gamma_tuning()
    after = policy.update(policy.init(5), *outcome([4, 3, 4, 4, 0], [4, 3, 2, 1, 0]))
    assert after.draft_length.tolist() == [6, 5, 4, 3, 4]
    np.testing.assert_allclose(after.acceptance, [0.825, 0.825, 0.575, 0.45, 0.65], rtol=1e-6)


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


def test_only_the_chosen_arm_changes_its_state():
    policy, now = policy_bandit((stopping.adaedl(), stopping.hf_heuristic())), context(2)
    state = policy.init(2)
    arms = state.arms._replace(pulls=jnp.array([[1, 1], [0, 1]]), rewards=jnp.array([[1.0, 2.0], [0.0, 9.0]]))
    state = state._replace(arms=arms)
    _, state = policy.begin(state, now)
    assert state.arms.arm.tolist() == [1, 0]
    distribution, _ = distribution_of_entropies(2)
    _, state = policy.check(state, distribution._replace(entropy=jnp.full(2, 3.0)), zeros(2), now)
    assert state.policies[0].failed.tolist() == [False, True]
    after = policy.update(state, *outcome([2, 2], [0, 0]))
    assert np.asarray(after.policies[0].control.threshold != state.policies[0].control.threshold).tolist() == [
        False,
        True,
    ]
    assert np.asarray(after.policies[1].draft_length != state.policies[1].draft_length).tolist() == [True, False]
    assert after.arms.pulls.tolist() == [[1, 2], [1, 1]]


def test_thompsons_choice_is_the_rows_own():
    """The same row beside others, and at another place of the batch, plays the same arms."""
    policy, now = policy_bandit(method="thompson"), context(ROWS)
    state = policy.init(ROWS)
    state = state._replace(arms=state.arms._replace(pulls=state.arms.pulls + 1))
    arms = np.asarray(policy.begin(state, now)[1].arms.arm)
    assert np.bincount(arms, minlength=5).min() > ROWS / 10, "equal arms are played alike"
    turned = jax.tree.map(lambda leaf: jnp.asarray(leaf)[::-1], now)
    np.testing.assert_array_equal(policy.begin(state, turned)[1].arms.arm, arms[::-1])
    later = now._replace(emitted=now.emitted + 1)
    assert (np.asarray(policy.begin(state, later)[1].arms.arm) != arms).any()


def test_goodput_pays_for_passes_what_this_rounds_drafter_costs():
    """0 is a drafter cost of 0, 3 one three times as high: [0.1, 0.0, 0.3] at relative cost [1, 0, 3]."""
    policy, told = goodput(most=K), context(3)
    told = told._replace(relative_drafter_cost=jnp.array([1.0, 0.0, 3.0]))
    _, state = policy.begin(policy.init(3, drafter_cost=0.1, verification_cost=0.05), told)
    costs = policy.init(3, drafter_cost=[0.1, 0.0, 0.3], verification_cost=0.05)
    _, expected = policy.begin(costs, context(3))
    np.testing.assert_array_equal(state.draft_length, expected.draft_length)
    assert len(set(np.asarray(state.draft_length).tolist())) == 3
