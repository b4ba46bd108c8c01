"""Every declared range: its ends are accepted, and what lies beside them, or is no number, is refused by name."""

import inspect
from typing import Annotated

import numpy as np
import pytest
from refusals import refusals

from specdec_jax import hyperparameters, stopping
from specdec_jax.contrib.trees import comb
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.ranges import Between, check_fields, ranges_of
from specdec_jax.strategy import strategy
from specdec_jax.text.options import Drafting
from specdec_jax.text.request_file import check_fields as check_request
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.strategies import TYPES, choose, find_factory, names
from specdec_jax.types import StoppingPolicy

OTHERS = {"enter": {"leave": 0.0}}  # hyperparameters without which an end would be refused for another reason


def beside(end, direction, within, kind):
    return end + direction if within.whole else float(np.nextafter(kind(end), kind(direction * np.inf)))


def inside(within, kind):
    """The finite ends, or the numbers next to open ones."""
    ends = (("low", within.low, 1), ("high", within.high, -1))
    finite = [end for end in ends if abs(end[1]) < np.inf]
    return [beside(end, way, within, kind) if within.open in (name, "both") else end for name, end, way in finite]


def outside(within, kind):
    ends = (("low", within.low, -1), ("high", within.high, 1))
    finite = [end for end in ends if abs(end[1]) < np.inf]
    found = [end if within.open in (name, "both") else beside(end, way, within, kind) for name, end, way in finite]
    return [*found, *((-np.inf, np.inf) if not within.whole else (1.5,)), np.nan, "text"]


HYPERPARAMETERS = [
    (kind, name, key, within)
    for kind in ("policy", "verifier", "monitor")
    for name in names(kind)
    for key, within in ranges_of(find_factory(kind, name)().init).items()
]
OPTIONS = [
    (kind, name, key, within)
    for kind in TYPES
    for name in names(kind)
    for key, within in ranges_of(find_factory(kind, name)).items()
]


def test_ranges_are_declared():
    print(f"{len(HYPERPARAMETERS)} hyperparameters and {len(OPTIONS)} options")
    assert len(HYPERPARAMETERS) > 80 and len(OPTIONS) > 20
    for kind in ("policy", "verifier", "monitor"):
        for name in names(kind):
            init = find_factory(kind, name)().init
            assert {*inspect.signature(init).parameters} - {"batch", "hyperparameters"} == {*ranges_of(init)}, name


@pytest.mark.parametrize(("kind", "name", "key", "within"), HYPERPARAMETERS)
def test_a_hyperparameter_is_checked_at_both_ends(kind, name, key, within):
    made, others = find_factory(kind, name)(), OTHERS.get(key, {})
    default = made.hyperparameters[key]

    def given(number):
        vector = [1.0] if default is None else list(default)[:-1] if within.entries is not None else []
        return {key: number if within.entries is None else [*vector, number], **others}

    for number in inside(within, np.float32):
        made.init(2, **given(number))
    for number in [*outside(within, np.float32), *([2**40] if within.whole else [1e60, -1e60])]:
        with pytest.raises(ValueError, match=rf"^{key} must (lie in|be a)"):
            made.init(2, **given(number))
    wrong = [0.5] * 3 if within.entries is None else 0.5
    with pytest.raises(ValueError, match=rf"^{key} must be"):
        made.init(2, **{key: wrong})
    if default is not None:
        with pytest.raises(ValueError, match=rf"^{key} must "):
            find_factory(kind, name)(**{key: None})


@pytest.mark.parametrize(("kind", "name", "key", "within"), OPTIONS)
def test_an_option_is_checked_at_both_ends(kind, name, key, within):
    factory = find_factory(kind, name)
    parameters = inspect.signature(factory).parameters.values()
    required = {each.name: object() for each in parameters if each.default is each.empty}
    for number in inside(within, float):
        within.check(key, number)
    for number in [*outside(within, float), True]:
        with pytest.raises(ValueError, match=rf"^{key} must (lie in|be a)"):
            factory(**{**required, key: number if within.entries is None else [number]})


@pytest.mark.parametrize("name", ranges_of(SamplingParams))
def test_a_request_is_checked_at_both_ends_with_one_message(name):
    within = ranges_of(SamplingParams)[name]
    checks = [lambda value: SamplingParams(**{name: value}), lambda value: check_request({"prompt": "x", name: value})]
    if name in inspect.signature(make_warp).parameters:
        checks.append(lambda value: make_warp(1, **{name: value}))
    for number in inside(within, np.float32):
        for check in checks:
            check(number)
    for number in outside(within, np.float32):
        messages = set()
        for check in checks:
            with pytest.raises(ValueError, match=rf"^{name} must ") as caught:
                check(number)
            messages.add(str(caught.value))
        assert len(messages) == 1


def test_fields_are_checked_unless_they_are_the_default():
    check_fields(Drafting())
    with pytest.raises(ValueError, match=r"^max_draft_length must lie in \[1, 64\], got 65$"):
        check_fields(Drafting(65))


def test_a_hyperparameter_is_checked_once_where_a_rule_is_chosen(monkeypatch):
    checked, in_rows = [], hyperparameters.in_rows
    monkeypatch.setattr(hyperparameters, "in_rows", lambda *given: checked.append(given[2]) or in_rows(*given))
    choose("policy", "update_every(policy=adaedl(threshold=0.5))")
    assert checked.count("threshold") == 1


def test_a_range_in_text_annotations_is_read():
    """As `from __future__ import annotations` leaves them."""

    def init(batch, floor: "Annotated[float, Between(0, 1)]" = 0.5):
        return floor

    assert ranges_of(init) == {"floor": Between(0, 1)}
    rule = strategy(lambda: StoppingPolicy(init), "rule")
    np.testing.assert_array_equal(rule(floor=0.25).init(2), np.float32([0.25, 0.25]))
    with pytest.raises(ValueError, match=r"floor must lie in \[0, 1\], got 2"):
        rule(floor=2)


test_what_else_stopping_rules_refuse = refusals(
    (lambda: stopping.survival().init(2, greedy=[1.0, 2.0]), r"greedy.*3 numbers.*\(2,\)"),
    (lambda: stopping.goodput(most=4).init(2, least=5), r"least.*\[0, 4\].*5"),
    (lambda: stopping.bandit(lengths=7), "7"),
    (lambda: stopping.accepted_length_ema(tiers=(3, 1)), r"\(3, 1\)"),
    (lambda: stopping.policy_bandit(method="ucb"), "thompson.*'ucb'"),
    (lambda: stopping.policy_bandit([stopping.svip()]), "at least two"),
    (lambda: stopping.policy_bandit([stopping.svip(), comb()]), "rules of chains, and comb drafts trees"),
    (lambda: stopping.policy_bandit(stopping.svip()), "StoppingPolicy"),
    (lambda: stopping.policy_bandit((stopping.svip(), "adaedl")), "'adaedl'"),
    (lambda: stopping.update_every(stopping.update_every()), "update_every.*rounds"),
    (lambda: stopping.max_confidence(adaptive=False).init(1, step=0.1), "has no hyperparameter .step."),
    (lambda: stopping.draft_and_verify(adaptive=False).init(1, step=0.1), "has no hyperparameter .step."),
    (
        lambda: choose("policy", "survival(siblings=3)"),
        "survival has no option 'siblings'.*; survival_tree has 'siblings'$",
    ),
    (lambda: choose("policy", "survival(nothing=3)"), "no option 'nothing'[^;]*$"),
)
