"""Drafters as people name them, on the built-in models: several that take turns, and what they cost."""

import json

import numpy as np
import pytest

from specdec_jax.loading import load_model
from specdec_jax.monitors import phases
from specdec_jax.stopping import adaedl, at_least, phase_length, policy_bandit, static, survival, update_every
from specdec_jax.strategy import strategy
from specdec_jax.text.calibration import (
    ANY_STATIC_OPTIONS,
    Calibration,
    calibration_of,
    hyperparameters_for,
    read_calibration,
)
from specdec_jax.text.generation import build_pair, prepare
from specdec_jax.verification import by_phase, easd, lenience


def test_the_built_in_pair_finds_its_calibration(smollm2, smollm2_drafter):
    pair = build_pair(smollm2, smollm2_drafter, policy=static())
    found = calibration_of("built-in", pair)
    assert (found.target["name"], found.drafter["name"]) == ("smollm2", "smollm2-drafter")
    assert hyperparameters_for(found, "policy", pair.decoder.parts.policy, 0.0) == {"draft_length": 3}
    together = build_pair(smollm2, (smollm2_drafter, "prompt_lookup"), policy=static())
    assert together.monitor is None, "several drafters are not chosen by phase"
    assert calibration_of("built-in", together).source == found.source
    default = build_pair(smollm2, policy=static(), dtype="bfloat16", costs="estimated")
    assert calibration_of("built-in", default).drafter["name"] == "smollm2-drafter-reading"


def relative_cost(pair, **options):
    return prepare(pair, ["Hello"], **options).options.get("policy_hyperparameters", {}).get("drafter_cost")


def test_cost_rules_get_the_bytes_a_pass_reads(smollm2, smollm2_drafter):
    """Their own number first, then a calibration's, then the share of bytes; of a reduced head no calibration's."""
    few = load_model("smollm2-drafter@8192")
    whole, reduced = (build_pair(smollm2, drafter, policy=survival()) for drafter in (smollm2_drafter, few))
    assert relative_cost(whole) == pytest.approx(0.102, abs=0.002)
    assert relative_cost(reduced) == pytest.approx(0.035, abs=0.002)
    measured = calibration_of("built-in", whole).hyperparameters["greedy"]["policy"]["survival"]["drafter_cost"]
    assert relative_cost(whole, calibration="built-in") == measured
    assert relative_cost(reduced, calibration="built-in") == relative_cost(reduced)
    fixed = survival(drafter_cost=0.5)
    for rule in (fixed, at_least(1, fixed)):
        assert relative_cost(whole.using(rule), calibration="built-in") is None
    with pytest.raises(ValueError, match="drafter_params for 2 drafters must be a sequence of as many"):
        build_pair(smollm2, ("ngram", "prompt_lookup"), drafter_params=[None])
    table = {"any": np.zeros(1_000_000)}
    several = {"drafter_params": (table, None, None), "policy": survival()}
    together = build_pair(smollm2, ("ngram", few, smollm2_drafter), **several)
    assert relative_cost(together) == relative_cost(reduced), "the first model's"
    assert relative_cost(together, calibration="built-in") == relative_cost(reduced), (
        "and no other drafter's, measured or not"
    )
    calibrated = calibration_of("built-in", whole)
    of_few = calibrated._replace(drafter=calibrated.drafter | {"draft_vocabulary": 8192})
    assert relative_cost(reduced, calibration=of_few) == measured
    assert relative_cost(whole, calibration=of_few) == relative_cost(whole)
    assert relative_cost(build_pair(smollm2, "ngram", policy=survival())) is None


def made_up(**changes):
    """A calibration of no pair, every number another; `changes` are of its fields."""
    hyperparameters = {
        "policy": {
            "static": {"draft_length": 11},
            "adaedl": {"threshold": 0.11},
            "max_confidence": {"threshold": 0.12},
            "phase_length": {"routine_length": 13, "reasoning_length": 14},
            "survival": {"prior": [0.15] * 2, "drafter_cost": 0.16},
        },
        "verifier": {
            "lenience": {"lenience": 0.17},
            "by_phase": {"lenience": 0.18},
            "easd": {"drafter_entropy": 1.9, "target_entropy": 2.0},
        },
        "monitor": {"phases": {"enter": 2.1, "leave": 2.0}},
    }
    fields = {"variants": {}, "any_static_options": ANY_STATIC_OPTIONS}
    fields["hyperparameters"] = {"greedy": hyperparameters, "sampled": {}}
    return Calibration("made up", {}, {}, figures={}, **(fields | changes))


def variant(kind, name, static_options, hyperparameters):
    return {"kind": kind, "name": name, "static_options": static_options, "hyperparameters": hyperparameters}


PRIOR = {"prior": [0.15] * 2, "drafter_cost": 0.16}
UNCERTAIN = {"drafter_entropy": 1.9, "target_entropy": 2.0}


@pytest.mark.parametrize(
    ("kind", "strategy", "hyperparameters"),
    [
        ("policy", adaedl(), {"threshold": 0.11}),
        ("policy", adaedl(keep_checked_token=True), {}),  # searched for under other static options
        ("policy", survival(positions=16), PRIOR),  # the pair's own
        ("policy", at_least(1, adaedl(keep_checked_token=True)), {}),
        ("policy", update_every(), {"threshold": 0.11}),
        ("policy", update_every(at_least(2, static())), {"draft_length": 11}),
        ("policy", at_least(1, phase_length()), {"routine_length": 13, "reasoning_length": 14}),
        ("policy", phase_length(policy=survival()), PRIOR),  # lengths alone are another thing than caps
        ("policy", phase_length(policy=update_every(adaedl())), {"threshold": 0.11}),
        ("policy", policy_bandit([survival(), static()]), {}),  # its drafter_cost is its own
        ("policy", update_every(at_least(1, survival(drafter_cost=0.5))), {"prior": [0.15] * 2}),
        ("policy", at_least(1, adaedl(threshold=0.5)), {}),
        ("verifier", by_phase(lenience(lenience=0.9), lenience()), {"reasoning_lenience": 0.17}),
        ("verifier", lenience(), {"lenience": 0.17}),
        ("verifier", by_phase(), {"lenience": 0.18}),
        ("verifier", by_phase(lenience(), easd()), {"lenience": 0.17} | UNCERTAIN),
        ("verifier", by_phase(easd(top_n=2)), UNCERTAIN),
        ("verifier", by_phase(lenience(), lenience()), {"routine_lenience": 0.17, "reasoning_lenience": 0.17}),
        ("monitor", phases(), {"enter": 2.1, "leave": 2.0}),
        ("monitor", phases(raw_entropy=False), {}),  # nats of other distributions
    ],
)
def test_hyperparameters_are_those_of_the_static_options(kind, strategy, hyperparameters):
    assert hyperparameters_for(made_up(), kind, strategy, 0.0) == hyperparameters
    strategy.init(2, **hyperparameters)


def test_hyperparameters_of_further_static_options_are_found():
    found = [
        variant("policy", "adaedl", {"keep_checked_token": True}, {"threshold": 0.3}),
        variant("policy", "phase_length", {"policy": "survival"}, {"routine_length": 7}),
        variant("monitor", "phases", {"raw_entropy": False}, {"enter": 1.2}),
    ]
    calibration = made_up(variants={"greedy": found})
    assert hyperparameters_for(calibration, "policy", adaedl(keep_checked_token=True), 0.0) == {"threshold": 0.3}
    inside = at_least(1, adaedl(keep_checked_token=True))
    assert hyperparameters_for(calibration, "policy", inside, 0.0) == {"threshold": 0.3}
    assert hyperparameters_for(calibration, "policy", adaedl(True, raw_entropy=True), 0.0) == {}
    assert hyperparameters_for(calibration, "policy", adaedl(), 0.0) == {"threshold": 0.11}
    assert hyperparameters_for(calibration, "policy", phase_length(survival()), 0.0) == {"routine_length": 7} | PRIOR
    assert hyperparameters_for(calibration, "policy", phase_length(survival(positions=16)), 0.0) == PRIOR
    assert hyperparameters_for(calibration, "monitor", phases(raw_entropy=False), 0.0) == {"enter": 1.2}
    assert hyperparameters_for(calibration, "monitor", phases(raw_entropy=False), 0.7) == {}


def test_a_rule_of_ones_own_has_no_hyperparameters_of_its_namesake():
    @strategy
    def static():
        return adaedl()

    @strategy
    def survival():
        return adaedl()

    assert static().name == "static" and hyperparameters_for(made_up(), "policy", static(), 0.0) == {}
    assert hyperparameters_for(made_up(), "policy", survival(), 0.0) == {}
    assert hyperparameters_for(made_up(), "policy", adaedl().replace(begin=adaedl().begin), 0.0) == {}


def test_files_of_before_there_were_variants_are_read(tmp_path):
    path = tmp_path / "c.json"
    model = {"name": "m", "parameters": 1, "scale": 1.0}
    text = {"target": model, "drafter": model, "hyperparameters": made_up().hyperparameters, "figures": {}}
    path.write_text(json.dumps(text))
    assert hyperparameters_for(read_calibration(path), "policy", survival(positions=16), 0.0) == PRIOR
    path.write_text(json.dumps(text | {"any_static_options": {}}))
    assert hyperparameters_for(read_calibration(path), "policy", survival(positions=16), 0.0) == {}
    assert hyperparameters_for(read_calibration(path), "policy", survival(), 0.0) == PRIOR
    path.write_text(json.dumps(text | {"variants": {"greedy": [{"kind": "policy"}]}}))
    with pytest.raises(ValueError, match="name of a variant is missing"):
        read_calibration(path)
