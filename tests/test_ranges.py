"""Every declared range: its ends are accepted, and what lies beside them, or is no number, is refused by name."""

import inspect
from typing import Annotated

import numpy as np
import pytest
from refusals import refusals

from specdec_jax import hyperparameters, stopping
from specdec_jax.app.file_command import check_fields
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.ranges import Between, ranges_of
from specdec_jax.strategy import strategy
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.strategies import TYPES, choose, find_factory, names
from specdec_jax.types import StoppingPolicy

OTHERS = {"enter": {"leave": 0.0}}  # hyperparameters without which an end would be refused for another reason
STRATEGIES = [(kind, name) for kind in TYPES for name in names(kind)]
OPTIONS = [(*each, *option) for each in STRATEGIES for option in ranges_of(find_factory(*each)).items()]
HYPERPARAMETERS = [
    (*each, *declared)
    for each in STRATEGIES
    if each[0] != "drafter"
    for declared in ranges_of(find_factory(*each)().init).items()
]


def ends(within, kind):
    """What lies at both finite ends, inside and outside of them, and what lies nowhere."""
    good, bad = [], [np.nan, "text", *([1.5] if within.whole else [-np.inf, np.inf])]
    for name, end, way in (("low", within.low, 1), ("high", within.high, -1)):
        if abs(end) < np.inf:
            beside = [
                end + step if within.whole else float(np.nextafter(kind(end), kind(step * np.inf)))
                for step in (way, -way)
            ]
            good.append(beside[0] if name in within.open else end)
            bad.append(end if name in within.open else beside[1])
    return good, bad


@pytest.mark.parametrize(("kind", "name", "key", "within"), HYPERPARAMETERS)
def test_a_hyperparameter_is_checked_at_both_ends(kind, name, key, within):
    made = find_factory(kind, name)()
    assert {*inspect.signature(made.init).parameters} - {"batch", "hyperparameters"} == {*ranges_of(made.init)}
    default, (good, bad) = made.hyperparameters[key], ends(within, np.float32)
    begin = [] if within.entries is None else list(default or [1.0, 1.0])[:-1]
    for number in good:
        made.init(2, **{key: number if within.entries is None else [*begin, number]}, **OTHERS.get(key, {}))
    for number in [*bad, 2**40 if within.whole else 1e60]:
        with pytest.raises(ValueError, match=rf"^{key} must (lie in|be a)"):
            made.init(2, **{key: number if within.entries is None else [*begin, number]}, **OTHERS.get(key, {}))
    for wrong in ([0.5] * 3 if within.entries is None else 0.5, None):
        if wrong is not None or default is not None:
            with pytest.raises(ValueError, match=rf"^{key} must "):
                made.init(2, **{key: wrong})


@pytest.mark.parametrize(("kind", "name", "key", "within"), OPTIONS)
def test_an_option_is_checked_at_both_ends(kind, name, key, within):
    factory, (good, bad) = find_factory(kind, name), ends(within, float)
    parameters = inspect.signature(factory).parameters.values()
    required = {each.name: object() for each in parameters if each.default is each.empty}
    for number in good:
        within.check(key, number)
    for number in [*bad, True]:
        with pytest.raises(ValueError, match=rf"^{key} must (lie in|be a)"):
            factory(**{**required, key: number if within.entries is None else [number]})


@pytest.mark.parametrize(("name", "within"), ranges_of(SamplingParams).items())
def test_a_request_is_checked_at_both_ends_with_one_message(name, within):
    checks = [lambda value: SamplingParams(**{name: value}), lambda value: check_fields({"prompt": "x", name: value})]
    checks += [lambda value: make_warp(1, **{name: value})] * (name in inspect.signature(make_warp).parameters)
    good, bad = ends(within, np.float32)
    for check in checks:
        for number in good:
            check(number)
    for number in bad:
        messages = set()
        for check in checks:
            with pytest.raises(ValueError, match=rf"^{name} must ") as caught:
                check(number)
            messages.add(str(caught.value))
        assert len(messages) == 1


def test_a_hyperparameter_is_checked_once_where_a_rule_is_chosen(monkeypatch):
    checked, in_rows = [], hyperparameters.in_rows
    monkeypatch.setattr(hyperparameters, "in_rows", lambda *given: checked.append(given[2]) or in_rows(*given))
    choose("policy", "update_every(policy=adaedl(threshold=0.5))")
    assert checked.count("threshold") == 1


def test_ranges_are_read_from_text_too():
    """As `from __future__ import annotations` leaves them."""

    def init(batch, floor: "Annotated[float, Between(0, 1)]" = 0.5):
        return floor

    rule = strategy(lambda: StoppingPolicy(init), "rule")
    np.testing.assert_array_equal(rule(floor=0.25).init(2), np.float32([0.25, 0.25]))
    with pytest.raises(ValueError, match=r"^floor must lie in \[0, 1\], got 2$"):
        rule(floor=2)


test_what_else_stopping_rules_refuse = refusals(
    (lambda: stopping.policy_bandit(stopping.svip()), "StoppingPolicy"),
    (lambda: stopping.policy_bandit((stopping.svip(), "adaedl")), "'adaedl'"),
)
