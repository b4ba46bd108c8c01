"""Strategies by name or file: options to the factory, hyperparameters to `init`, one message for what is wrong."""

import sys

import numpy as np
import pytest

from specdec_jax.choices import choose, names
from specdec_jax.types import StoppingPolicy

RULE = """
from dataclasses import dataclass
from specdec_jax.stopping import static

@dataclass
class Unused:  # a dataclass looks its module up
    number: "int" = 1

def my_rule(strict: bool = False, least: int = 1):
    return static()
"""


def test_every_built_in_name_makes_a_strategy():
    assert {"adaedl", "static", "at_least"} <= set(names("policy"))
    assert {"rejection", "block", "greedy"} <= set(names("verifier"))
    for kind in ("policy", "verifier"):
        for name in names(kind):
            assert choose(kind, name).name == name


def test_static_options_go_to_the_factory_and_hyperparameters_to_init():
    choice = choose("policy", "adaedl", ["keep-checked-token=true", "threshold=0.5", "entropy_factor = 0.3"])
    assert choice.hyperparameters == {"threshold": 0.5, "entropy_factor": 0.3}
    state = choice.strategy.init(2, **choice.hyperparameters)
    assert np.allclose(state.threshold, 0.5) and np.allclose(state.entropy_factor, 0.3)
    kept, dropped = choice.strategy, choose("policy", "adaedl", ["keep_checked_token=false"]).strategy
    assert kept.proceed.__name__ != dropped.proceed.__name__


def test_a_policy_can_wrap_another_with_its_static_options_and_hyperparameters():
    options = ["minimum=2", "policy=adaedl", "keep_checked_token=true", "threshold=0.4"]
    choice = choose("policy", "at_least", options)
    assert choice.hyperparameters == {"threshold": 0.4}
    assert np.allclose(choice.strategy.init(1, threshold=0.4).threshold, 0.4)
    with pytest.raises(ValueError, match="unknown policy 'adadl'; did you mean 'adaedl'"):
        choose("policy", "at_least", ["policy=adadl"])


def test_a_users_own_file(tmp_path):
    path = tmp_path / "my_rule.py"
    path.write_text(RULE)
    choice = choose("policy", str(path), ["draft_length=3", "strict=True", "least=2"])
    assert isinstance(choice.strategy, StoppingPolicy)
    assert choice.hyperparameters == {"draft_length": 3}


def test_what_lies_beside_a_users_file_can_be_imported_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "my_rule.py").write_text("from a_helper_of_my_rule import LENGTH\n" + RULE)
    (tmp_path / "a_helper_of_my_rule.py").write_text("LENGTH = 2\n")
    assert isinstance(choose("policy", str(tmp_path / "my_rule.py")).strategy, StoppingPolicy)
    (tmp_path / "json.py").write_text("raise ImportError('nothing of the name of an installed module is taken')")
    (tmp_path / "other.py").write_text(RULE.replace("my_rule", "other").replace("static\n", "static\nimport json\n", 1))
    assert isinstance(choose("policy", str(tmp_path / "other.py")).strategy, StoppingPolicy)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adadl", [], "unknown policy 'adadl'; did you mean 'adaedl'? (there are: accepted_length_ema, adaedl, "),
        ("adaedl", ["treshold=1"], "policy adaedl has no option 'treshold'; did you mean 'threshold'?"),
        ("adaedl", ["keep_token=true"], "did you mean 'keep_checked_token'?"),
        ("adaedl", ["threshold"], "an option reads key=value, got 'threshold'"),
        ("adaedl", ["threshold=high"], "threshold must be a number, got 'high'"),
        ("adaedl", ["threshold=1.5"], "threshold must lie in [0, 0.99], got 1.5"),
        ("adaedl", ["keep_checked_token=no"], "keep_checked_token must be true or false, got 'no'"),
        ("at_least", ["minimum=2.5"], "minimum must be a whole number, got 2.5"),
        ("at_least", ["minimum=x"], "minimum must be a number, got 'x'"),
        ("at_least", ["minimum=-1"], "a minimum of 0 or more, got -1"),
        ("nowhere/my_rule.py", [], "policy file nowhere/my_rule.py does not exist"),
    ],
)
def test_what_is_wrong_is_named(name, options, message):
    with pytest.raises(ValueError) as caught:
        choose("policy", name, options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(): pass", "must define a function my_rule()"),
        ("x = 1\ny = 1 / 0", "my_rule.py:2: ZeroDivisionError"),
        ("def my_rule(:", "my_rule.py:1: SyntaxError"),
        ("def my_rule(): return 3", "must return a StoppingPolicy, got int"),
        ("def my_rule(size): return 3", "missing 1 required positional argument: 'size'"),
        (
            "from specdec_jax.stopping import static\n"
            "def my_rule(): return static()._replace(init=lambda batch, size: size)",
            "missing 1 required positional argument: 'size'",
        ),
    ],
)
def test_a_users_file_that_fails_is_one_message(tmp_path, text, message):
    path = tmp_path / "my_rule.py"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        choose("policy", str(path))
    assert message in str(caught.value) and "policy" in str(caught.value)
