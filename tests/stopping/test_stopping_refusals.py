"""What stopping rules refuse: hyperparameters out of range and static options without sense, each named."""

import pytest

from specdec_jax import stopping
from specdec_jax.contrib.trees import comb, survival_tree
from specdec_jax.stopping import (
    adaedl,
    adaptive_gamma,
    at_least,
    bandit,
    goodput,
    hf_confidence,
    max_confidence,
    policy_bandit,
    static,
    survival,
    update_every,
)
from specdec_jax.text.strategies import choose


@pytest.mark.parametrize(
    "policy, hyperparameters, words",
    [
        (adaedl(), {"threshold": 1.0}, r"threshold.*\[0, 0.99\].*1.0"),
        (adaedl(), {"threshold": -0.1}, "threshold.*-0.1"),
        (adaedl(), {"entropy_factor": 0.0}, r"entropy_factor.*\(0.*0.0"),
        (adaedl(), {"entropy_factor": 1e-60}, "entropy_factor.*1e-60"),
        (adaedl(), {"target_acceptance": 1.5}, "target_acceptance.*1.5"),
        (adaedl(), {"acceptance_decay": -1}, "acceptance_decay.*-1"),
        (adaedl(), {"threshold_decay": 2}, "threshold_decay.*2"),
        (adaedl(), {"step": float("nan")}, "step.*nan"),
        (static(), {"draft_length": -1}, "draft_length.*-1"),
        (static(), {"draft_length": [1, 2, 3]}, "draft_length.*2.*3"),
        (static(), {"draft_length": 1.5}, "draft_length.*whole.*1.5"),
        (static(), {"draft_length": 2**40}, "draft_length.*1099511627776"),
        (survival(), {"drafter_cost": 0.0}, "drafter_cost.*0.0"),
        (survival(), {"greedy": [1.0, 2.0]}, r"greedy.*3 numbers.*\(2,\)"),
        (survival(), {"sampled": [float("inf")] * 3}, "sampled.*inf"),
        (survival(), {"verification_times": 1.0}, "verification_times.*1.0"),
        (survival(), {"verification_times": [1.0, -1.0]}, "verification_times.*-1.0"),
        (survival(), {"rate_weight": -1.5}, "rate_weight.*-1.5"),
        (update_every(), {"rounds": 0}, "rounds.*0"),
        (update_every(), {"rounds": 1.5}, "rounds.*1.5"),
        (max_confidence(), {"threshold": 1.0}, r"threshold.*\[0, 0.99\].*1.0"),
        (stopping.draft_and_verify(), {"match_decay": 1.5}, "match_decay.*1.5"),
        (stopping.svip(), {"entropy_factor": 0.0}, "entropy_factor.*0.0"),
        (stopping.cumulative_confidence(), {"threshold": 1.1}, "threshold.*1.1"),
        (stopping.hf_heuristic(), {"draft_length": 0}, "draft_length.*0"),
        (hf_confidence(), {"false_negative_weight": -1.0}, "false_negative_weight.*-1.0"),
        (stopping.gamma_tuning(), {"high": 2.0}, "high.*2.0"),
        (stopping.accepted_length_ema(), {"interval": 0}, "interval.*0"),
        (goodput(most=4), {"least": 5}, r"least.*\[0, 4\].*5"),
        (goodput(), {"prior_weight": 0.0}, "prior_weight.*0.0"),
        (bandit(), {"exploration": -0.1}, "exploration.*-0.1"),
        (policy_bandit(), {"drafter_cost": -1.0}, "drafter_cost.*-1.0"),
        (adaptive_gamma(), {"entropy_factor": 11.0}, r"entropy_factor.*\[0.001, 10\].*11.0"),
    ],
)
def test_hyperparameters_out_of_range_are_named(policy, hyperparameters, words):
    with pytest.raises(ValueError, match=words):
        policy.init(2, **hyperparameters)


@pytest.mark.parametrize(
    "factory, words",
    [
        (lambda: bandit(lengths=()), "bandit.*lengths"),
        (lambda: bandit(lengths=(1, 0)), r"\(1, 0\)"),
        (lambda: bandit(lengths=7), "7"),
        (lambda: stopping.accepted_length_ema(tiers=(3, 1)), r"\(3, 1\)"),
        (lambda: stopping.accepted_length_ema(tiers=(0, 1)), r"\(0, 1\)"),
        (lambda: goodput(most=0), "0"),
        (lambda: hf_confidence(bins=0), "bins=0"),
        (lambda: adaptive_gamma(positions=0), "0"),
        (lambda: policy_bandit(method="ucb"), "thompson.*'ucb'"),
        (lambda: policy_bandit([stopping.svip()]), "at least two"),
        (lambda: policy_bandit([stopping.svip(), comb()]), "rules of chains, and comb drafts trees"),
        (lambda: comb(most=0), "most of 1 or more, got 0"),
        (lambda: comb(expanded=-1), "expanded of 0 or more, and siblings to expand, got -1 of 3"),
        (lambda: survival_tree(expanded=-2), "survival_tree needs expanded of 0 or more.* got -2 of 3"),
        (lambda: survival_tree(siblings=0), "siblings of 1 to 3, got 0"),
        (lambda: survival_tree(siblings=4), "siblings of 1 to 3, got 4"),
        (lambda: survival(positions=0), "positions.*0"),
        (lambda: at_least(-1), "-1"),
        (lambda: update_every(update_every()), "update_every.*rounds"),
        (lambda: policy_bandit(stopping.svip()), "StoppingPolicy"),
        (lambda: policy_bandit((stopping.svip(), "adaedl")), "'adaedl'"),
    ],
)
def test_wrong_static_options_are_named(factory, words):
    with pytest.raises(ValueError, match=words):
        factory()


@pytest.mark.parametrize("factory", [max_confidence, stopping.draft_and_verify])
def test_a_fixed_threshold_has_no_other_hyperparameters(factory):
    with pytest.raises(ValueError, match="has no hyperparameter .step."):
        factory(adaptive=False).init(1, step=0.1)


def test_an_option_that_a_variant_has_names_the_variant():
    with pytest.raises(ValueError, match="survival has no option 'siblings'.*; survival_tree has 'siblings'$"):
        choose("policy", "survival(siblings=3)")
    with pytest.raises(ValueError, match="no option 'nothing'[^;]*$"):
        choose("policy", "survival(nothing=3)")
