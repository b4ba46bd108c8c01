"""Which learnt hyperparameters a strategy gets: those of its static options, and those of what it wraps."""

import json

import pytest

from specdec_jax.monitors import phases
from specdec_jax.stopping import (
    adaedl,
    at_least,
    max_confidence,
    phase_length,
    policy_bandit,
    static,
    survival,
    update_every,
)
from specdec_jax.strategy import strategy
from specdec_jax.text.calibration import ANY_STATIC_OPTIONS, Calibration, hyperparameters_for, read_calibration
from specdec_jax.verification import by_phase, easd, lenience


def made_up(**changes):
    """A calibration of no pair, every number another; `changes` are of its fields."""
    hyperparameters = {
        "policy": {
            "static": {"draft_length": 11},
            "adaedl": {"threshold": 0.11},
            "max_confidence": {"threshold": 0.12},
            "phase_length": {"routine_length": 13, "reasoning_length": 14},
            "survival": {"greedy": [0.15] * 2, "drafter_cost": 0.16},
        },
        "verifier": {
            "lenience": {"lenience": 0.17},
            "by_phase": {"lenience": 0.18},
            "easd": {"drafter_entropy": 1.9, "target_entropy": 2.0},
        },
        "monitor": {"phases": {"enter": 2.1, "leave": 2.0}},
    }
    fields = {
        "hyperparameters": {"greedy": hyperparameters, "sampled": {}},
        "variants": {},
        "any_static_options": ANY_STATIC_OPTIONS,
    }
    return Calibration("made up", {}, {}, figures={}, **(fields | changes))


def variant(kind, name, static_options, hyperparameters):
    return {"kind": kind, "name": name, "static_options": static_options, "hyperparameters": hyperparameters}


PRIOR = {"greedy": [0.15] * 2, "drafter_cost": 0.16}
LENGTHS = {"routine_length": 13, "reasoning_length": 14}
UNCERTAIN = {"drafter_entropy": 1.9, "target_entropy": 2.0}


@pytest.mark.parametrize(
    ("kind", "strategy", "hyperparameters"),
    [
        ("policy", adaedl(), {"threshold": 0.11}),
        ("policy", adaedl(keep_checked_token=True), {}),  # searched for under other static options
        ("policy", adaedl(raw_entropy=True), {}),
        ("policy", max_confidence(adaptive=False), {}),
        ("policy", survival(positions=16), PRIOR),  # the pair's own
        ("policy", at_least(1, adaedl()), {"threshold": 0.11}),
        ("policy", at_least(1, adaedl(keep_checked_token=True)), {}),
        ("policy", update_every(), {"threshold": 0.11}),
        ("policy", update_every(static()), {"draft_length": 11}),
        ("policy", update_every(at_least(2, static())), {"draft_length": 11}),
        ("policy", phase_length(), LENGTHS),
        ("policy", at_least(1, phase_length()), LENGTHS),
        ("policy", phase_length(policy=survival()), PRIOR),  # lengths alone are another thing than caps
        ("policy", phase_length(policy=update_every(adaedl())), {"threshold": 0.11}),
        ("policy", policy_bandit([survival(), static()]), {}),  # its drafter_cost is its own
        ("policy", survival(drafter_cost=0.5), {"greedy": [0.15] * 2}),
        ("policy", update_every(at_least(1, survival(drafter_cost=0.5))), {"greedy": [0.15] * 2}),
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
    assert hyperparameters_for(calibration, "policy", at_least(1, adaedl(keep_checked_token=True)), 0.0) == {
        "threshold": 0.3
    }
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
