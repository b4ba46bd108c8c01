"""Drafters as people name them, on the built-in models: several that take turns, and what they cost."""

import numpy as np
import pytest

from specdec_jax.loading import load_model
from specdec_jax.stopping import at_least, static, survival
from specdec_jax.text.calibration import calibration_of, hyperparameters_for
from specdec_jax.text.generation import build_pair, prepare
from specdec_jax.text.pair import _relative_size


def test_parameters_are_one_for_each_drafter_whose_cost_is_its_share_of_the_targets_weights(smollm2, smollm2_drafter):
    with pytest.raises(ValueError, match="drafter_params for 2 drafters must be a sequence of as many"):
        build_pair(smollm2, ("ngram", "prompt_lookup"), drafter_params=[None])
    assert 0.09 < _relative_size(smollm2_drafter.params, smollm2.params) < 0.11
    assert _relative_size(None, smollm2.params) == 0


def test_the_built_in_pair_finds_its_calibration(smollm2, smollm2_drafter):
    pair = build_pair(smollm2, smollm2_drafter, policy=static())
    found = calibration_of("built-in", pair)
    assert (found.target["name"], found.drafter["name"]) == ("smollm2", "smollm2-drafter")
    assert hyperparameters_for(found, "policy", pair.decoder.parts.policy, 0.0) == {"draft_length": 3}
    together = build_pair(smollm2, (smollm2_drafter, "prompt_lookup"), policy=static())
    assert calibration_of("built-in", together).source == found.source
    default = build_pair(smollm2, policy=static(), dtype="bfloat16", costs="estimated")
    assert calibration_of("built-in", default).drafter["name"] == "smollm2-drafter-reading"


def cost_told(pair, **options):
    return prepare(pair, ["Hello"], **options).options.get("policy_hyperparameters", {}).get("drafter_cost")


def test_rules_that_weigh_costs_are_told_what_a_pass_reads(smollm2, smollm2_drafter):
    """Their own number first, then a calibration's, then the share of bytes; of a reduced head no calibration's."""
    few = load_model("smollm2-drafter@8192")
    whole, reduced = (build_pair(smollm2, drafter, policy=survival()) for drafter in (smollm2_drafter, few))
    assert cost_told(whole) == pytest.approx(0.102, abs=0.002)
    assert cost_told(reduced) == pytest.approx(0.035, abs=0.002)
    measured = calibration_of("built-in", whole).hyperparameters["greedy"]["policy"]["survival"]["drafter_cost"]
    assert cost_told(whole, calibration="built-in") == measured
    assert cost_told(reduced, calibration="built-in") == cost_told(reduced)
    fixed = survival(drafter_cost=0.5)
    for rule in (fixed, at_least(1, fixed)):
        assert cost_told(whole.using(rule), calibration="built-in") is None
    table = {"any": np.zeros(1_000_000)}
    together = build_pair(
        smollm2, ("ngram", few, smollm2_drafter), policy=survival(), drafter_params=(table, None, None)
    )
    assert cost_told(together) == cost_told(reduced), "the first model's"
    assert cost_told(together, calibration="built-in") == cost_told(reduced), "and no other drafter's, measured or not"
    told = calibration_of("built-in", whole)
    of_few = told._replace(drafter=told.drafter | {"draft_vocabulary": 8192})
    assert cost_told(reduced, calibration=of_few) == measured
    assert cost_told(whole, calibration=of_few) == cost_told(whole)
    pairs = ("prompt_lookup", survival()), ("ngram", survival()), (smollm2_drafter, static()), (smollm2_drafter, fixed)
    for drafter, policy in pairs:
        assert cost_told(build_pair(smollm2, drafter, policy=policy)) is None
