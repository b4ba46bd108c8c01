"""Every stopping rule against a plain-Python twin: 60 rounds of 12 rows at four temperatures, decision by decision.

Drafted tokens, drafter passes and the number a plot shows must agree in every round, so that a wrong decision, a wrong
update and a look at the wrong row all show. Budgets cut some drafts and leave some rounds without any.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stopping_oracles as twins
from rules import counting
from stopping_cases import MOST, ROUNDS, ROWS, K, context, outcome, play_rows, play_twin, story

from specdec_jax import stopping
from specdec_jax.decoding import sampling

LIVELY = {"step": 0.3, "threshold_decay": 0.5, "target_acceptance": 0.6}
LED = {"epsilon": 0.3, "beta2": 0.5, "alpha": 0.6}
VERIFY = {"step": 0.3, "threshold_decay": 0.5, "target_match": 0.6}
COSTS = {"drafter_cost": 0.23, "verification_cost": 0.017}
SMALL = (stopping.svip(), stopping.adaedl(), stopping.static())


def small_twins():
    return [twins.SVIP(), twins.AdaEDL(), twins.Length(7)]


@functools.cache
def thompsons_uniforms(count):
    seeds, emitted = (grid.ravel() for grid in np.meshgrid(np.arange(ROWS), np.arange(ROUNDS), indexing="ij"))
    own = jnp.asarray(seeds, jnp.uint32)  # the cases give row numbers as the seeds of policies
    draw = functools.partial(sampling.uniforms, own, jnp.asarray(emitted, jnp.int32))
    columns = [draw(jnp.int32(arm), 0) for arm in range(count)]
    return np.stack(columns, axis=1, dtype=np.float64).reshape(ROWS, ROUNDS, count).tolist()


class Slow(twins.Rule):
    """Any twin, taught every n-th round that drafted."""

    def __init__(self, inner, rounds):
        self.inner, self.rounds, self.since = inner, rounds, 0
        self.begins, self.draws, self.goes_on, self.shown = inner.begins, inner.draws, inner.goes_on, inner.shown

    def learns(self, drafted, accepted, most):
        self.since += drafted > 0
        if self.since == self.rounds:
            self.inner.learns(drafted, accepted, most)
            self.since = 0


CASES = {
    "adaedl": (stopping.adaedl(), {}, twins.AdaEDL),
    "adaedl_keep": (stopping.adaedl(True, True), LIVELY, lambda: twins.AdaEDL(raw=True, keep=True, **LED)),
    "adaedl_slow": (stopping.adaedl(), LIVELY | {"acceptance_decay": 0.8}, lambda: twins.AdaEDL(beta1=0.8, **LED)),
    "at_least_keep": (
        stopping.at_least(3, stopping.adaedl(keep_checked_token=True)),
        LIVELY,
        lambda: twins.AtLeast(3, twins.AdaEDL(keep=True, **LED)),
    ),
    "at_least_of_none": (
        stopping.at_least(2, stopping.static()),
        {"draft_length": 0},
        lambda: twins.AtLeast(2, twins.Length(0)),
    ),
    "update_every": (stopping.update_every(), LIVELY, lambda: Slow(twins.AdaEDL(**LED), 4)),
    "phase_length": (
        stopping.phase_length(stopping.adaedl(True)),  # of lengths that no draft has
        LIVELY | {"routine_length": 9, "reasoning_length": 9},
        lambda: twins.AdaEDL(keep=True, **LED),
    ),
    "max_confidence": (stopping.max_confidence(), {}, twins.MaxConfidence),
    "max_confidence_keep": (stopping.max_confidence(True), LIVELY, lambda: twins.MaxConfidence(keep=True, **LED)),
    "max_confidence_raw": (
        stopping.max_confidence(adaptive=False, raw=True),
        {"threshold": 0.4},
        lambda: twins.MaxConfidence(threshold=0.4, raw=True, adaptive=False),
    ),
    "adaptive_gamma": (stopping.adaptive_gamma(), {}, twins.AdaptiveGamma),
    "adaptive_gamma_keep": (
        stopping.adaptive_gamma(True),
        {"entropy_factor": 1.0, "prior_weight": 2.0, "decay": 0.8, **LIVELY},
        lambda: twins.AdaptiveGamma(gamma=1.0, weight=2.0, decay=0.8, keep=True, **LED),
    ),
    "draft_and_verify": (stopping.draft_and_verify(), {}, twins.DraftAndVerify),
    "draft_and_verify_lively": (
        stopping.draft_and_verify(),
        {"threshold": 0.2, "match_decay": 0.7, "initial_match": 0.5, **VERIFY},
        lambda: twins.DraftAndVerify(0.2, target=0.6, rate_decay=0.7, decay=0.5, step=0.3, match=0.5),
    ),
    "draft_and_verify_fixed": (
        stopping.draft_and_verify(adaptive=False),
        {"threshold": 0.5},
        lambda: twins.DraftAndVerify(threshold=0.5, adaptive=False),
    ),
    "svip": (stopping.svip(), {}, twins.SVIP),
    "svip_sampled": (
        stopping.svip(raw_entropy=False),
        {"entropy_factor": 0.3, "threshold": 0.5},
        lambda: twins.SVIP(0.3, 0.5, raw=False),
    ),
    "cumulative_confidence": (stopping.cumulative_confidence(), {}, twins.CumulativeConfidence),
    "hf_confidence": (stopping.hf_confidence(), {}, twins.HFConfidence),
    "hf_confidence_other": (
        stopping.hf_confidence(bins=7, positions=2),
        {"least_samples": 12, "false_positive_weight": 2.5, "false_negative_weight": 1.0, "threshold": 0.1},
        lambda: twins.HFConfidence(0.1, 12, (2.5, 1.0), bins=7, positions=2),
    ),
    "hf_confidence_fixed": (stopping.hf_confidence(refit=False), {}, lambda: twins.HFConfidence(refit=False)),
    "hf_heuristic": (stopping.hf_heuristic(), {}, twins.HFHeuristic),
    "hf_heuristic_other": (
        stopping.hf_heuristic(),
        {"draft_length": 9, "increase": 1, "decrease": 2},
        lambda: twins.HFHeuristic(9, 1, 2),
    ),
    "gamma_tuning": (stopping.gamma_tuning(), {}, twins.GammaTuning),
    "gamma_tuning_other": (
        stopping.gamma_tuning(),
        {"draft_length": 1, "high": 0.63, "low": 0.31, "decay": 0.2, "initial_acceptance": 1.0},
        lambda: twins.GammaTuning(1, 0.63, 0.31, 0.2, 1.0),
    ),
    "accepted_length_ema": (stopping.accepted_length_ema(), {}, twins.AcceptedLengthEMA),
    "accepted_length_ema_tiers": (
        stopping.accepted_length_ema(tiers=(1, 2, 4)),
        {"draft_length": 7, "weight": 0.6, "interval": 2, "warmup": 3},
        lambda: twins.AcceptedLengthEMA(7, 0.6, 2, 3, (1, 2, 4)),
    ),
    "goodput": (stopping.goodput(), {}, twins.Goodput),
    "goodput_at_least_2": (stopping.goodput(), {"least": 2, "drafter_cost": 0.4}, lambda: twins.Goodput(0.42, least=2)),
    "goodput_may_be_none": (
        stopping.goodput(most=4),
        {"least": 0, "prior_acceptance": 0.5, "prior_weight": 1.0, "decay": 0.7, "drafter_cost": 0.35},
        lambda: twins.Goodput(0.37, least=0, prior=0.5, weight=1.0, decay=0.7, most=4),
    ),
    "bandit": (stopping.bandit(), COSTS, lambda: twins.Bandit(**COSTS)),
    "bandit_other": (
        stopping.bandit(lengths=(3, 1, 5)),
        {"exploration": 0.3, "warmup": 2, **COSTS},
        lambda: twins.Bandit((3, 1, 5), 0.3, 2, **COSTS),
    ),
    "policy_bandit_ucb1": (
        stopping.policy_bandit(SMALL),
        COSTS,
        lambda: twins.PolicyBandit(small_twins(), 0.1, **COSTS),
    ),
    "policy_bandit_thompson": (
        stopping.policy_bandit(SMALL, method="thompson"),
        COSTS,
        lambda: twins.PolicyBandit(small_twins(), 1.0, thompsons_uniforms(3), **COSTS),
    ),
}
COLUMNS = ("drafted", "passes", "accepted", "shown")
STILL = {"max_confidence_raw", "draft_and_verify_fixed", "svip", "svip_sampled", "hf_confidence_fixed"}
STILL |= {"cumulative_confidence", "at_least_of_none"}


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_twins(name):
    policy, hyperparameters, make_twin = CASES[name]
    played, state = play_rows(policy, hyperparameters)
    for row in range(ROWS):
        for what, ours, his in zip(COLUMNS, played, play_twin(make_twin(), row), strict=True):
            np.testing.assert_allclose(ours[:, row], his, rtol=1e-4, atol=1e-5, err_msg=f"{what} of row {row}")
    drafted, _, accepted, shown = played
    assert len(np.unique(drafted)) > 2 and (accepted < drafted).any(), "an easy story: nothing was decided"
    assert (len(np.unique(shown)) == 1) == (name in STILL)


def test_the_story_has_rounds_without_drafts_and_cut_ones():
    budgets = story().budgets
    assert (budgets == 0).any() and ((budgets > 0) & (budgets < MOST)).any() and (budgets == MOST).any()


OUTER = {
    "at_least": (stopping.at_least(2, counting()), {"length": [0, 2, 3] * 4}, lambda state: [state]),
    "update_every": (stopping.update_every(counting()), {"rounds": 1}, lambda state: [state.policy]),
    "phase_length": (stopping.phase_length(counting()), {"length": 7}, lambda state: [state.policy]),
    "policy_bandit": (stopping.policy_bandit((counting(), counting())), {}, lambda state: state.policies),
}


@pytest.mark.parametrize("name", OUTER)
def test_a_rule_inside_another_is_asked_every_question_once(name):
    """And keeps what it made of it: its state goes through all four questions. Of arms, the one that plays is asked."""
    policy, hyperparameters, inner_states = OUTER[name]
    (drafted, passes, *_), state = play_rows(policy, hyperparameters)
    asked = jax.tree.map(lambda *counts: np.sum(counts, axis=0), *inner_states(state))
    np.testing.assert_array_equal(asked.checks, passes.sum(axis=0))
    np.testing.assert_array_equal(asked.proceeds, drafted.sum(axis=0))
    taught = (drafted > 0).sum(axis=0) if name == "update_every" else ROUNDS
    assert (asked.begins == ROUNDS).all() and (asked.updates == taught).all() and drafted.any(axis=0).all()


@pytest.mark.parametrize("name", ["policy_bandit_ucb1", "policy_bandit_thompson", "bandit", "bandit_other"])
def test_a_bandit_plays_every_arm_and_not_all_alike(name):
    policy, hyperparameters, _ = CASES[name]
    pulls = np.asarray(play_rows(policy, hyperparameters)[1].arms.pulls)
    assert (pulls > 0).all() and (pulls.max(axis=1) > pulls.min(axis=1)).any()


def test_an_arm_that_declines_to_draft_is_counted_and_left():
    policy = stopping.policy_bandit((stopping.static(draft_length=0), stopping.static(draft_length=2)))
    played, state = play_rows(policy, {"drafter_cost": 0.0, "verification_cost": 0.0})
    assert (np.asarray(state.arms.pulls) > 0).all() and played[0].any(axis=0).all()


def test_a_lookup_costs_a_bandit_nothing():
    free, policy = context(2)._replace(relative_drafter_cost=jnp.array([0.0, 1.0])), stopping.bandit()
    _, state = policy.begin(policy.init(2, drafter_cost=0.5), free)
    state = policy.update(state, *outcome([1, 1], [1, 1]))
    np.testing.assert_allclose(state.arms.rewards[:, 0], [2 / 1.02, 2 / 1.52], rtol=1e-6)


def test_a_threshold_read_from_a_state_is_accepted():
    state = stopping.adaedl().init(1, threshold=0.99)
    again = stopping.adaedl().init(1, threshold=state.control.threshold)
    np.testing.assert_array_equal(again.control.threshold, state.control.threshold)


def test_the_number_of_rounds_of_update_every_is_a_rows_own():
    policy, shown = stopping.update_every(stopping.hf_heuristic()), []
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
    after = stopping.adaedl().update(stopping.adaedl().init(4), *outcome([5, 5, 7, 0], [4, 5, 7, 0])).control
    np.testing.assert_allclose(after.acceptance, [0.85, 0.95, 0.95, 0.9], rtol=1e-6)
    np.testing.assert_allclose(after.threshold, [0.701, 0.699, 0.7, 0.7], rtol=1e-6)
    extreme = stopping.adaedl().init(2, threshold=[0.95, 0.05], step=1.0, threshold_decay=0.0, acceptance_decay=0.0)
    bounds = stopping.adaedl().update(extreme, *outcome([3, 3], [0, 3])).control.threshold
    np.testing.assert_allclose(bounds, [0.99, 0.0], rtol=1e-6)


def test_goodput_pays_for_passes_what_this_rounds_drafter_costs():
    """0 is a drafter cost of 0, 3 one three times as high: [0.1, 0.0, 0.3] at relative cost [1, 0, 3]."""
    policy, round_context = stopping.goodput(most=K), context(3)
    round_context = round_context._replace(relative_drafter_cost=jnp.array([1.0, 0.0, 3.0]))
    _, state = policy.begin(policy.init(3, drafter_cost=0.1, verification_cost=0.05), round_context)
    costs = policy.init(3, drafter_cost=[0.1, 0.0, 0.3], verification_cost=0.05)
    _, expected = policy.begin(costs, context(3))
    np.testing.assert_array_equal(state.draft_length, expected.draft_length)
    assert len(set(np.asarray(state.draft_length).tolist())) == 3
