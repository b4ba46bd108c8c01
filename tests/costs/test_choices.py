"""What a machine's costs decide: widths, the longest draft, and what rules are told."""

import jax
import numpy as np
import pytest

from specdec_jax.costs import choices, machine
from specdec_jax.costs.choices import VARIABLE, costs_asked, costs_for, longest_draft, weighs_costs, widths_for
from specdec_jax.costs.cost_model import cost_model, save_cost_model
from specdec_jax.stopping import (
    adaedl,
    at_least,
    bandit,
    goodput,
    phase_length,
    policy_bandit,
    static,
    survival,
    update_every,
)

STEPS = cost_model(0.13, {2: 1.0, 4: 1.01, 6: 1.1, 8: 1.2, 12: 1.21, 16: 1.5})
FLAT = cost_model(0.05, {2: 1.0, 4: 1.0, 8: 1.01, 16: 1.02})


@pytest.mark.parametrize(
    ("costs", "most", "widths"),
    [
        (STEPS, 7, (4, 6, 8)),  # 2 saves nothing over 4
        (STEPS, 11, (4, 6, 12)),  # nor does 8 over 12
        (STEPS, 6, (4, 6, 7)),  # 7 costs half-way between 6 and 8
        (STEPS, 3, (4,)),
        (FLAT, 7, (8,)),
        (FLAT, 0, (1,)),
        (FLAT._replace(doubts=("busy",)), 0, (1,)),
        (FLAT._replace(doubts=("busy",)), 5, (1, 2, 4, 6)),
        (STEPS, 40, (4, 6, 12, 16, 41)),  # beyond what was measured the last step goes on
    ],
)
def test_widths_are_the_steps_of_the_staircase(costs, most, widths):
    assert widths_for(costs, most) == widths


def test_several_processes_do_not_measure(monkeypatch):
    monkeypatch.setattr(choices, "spans_processes", lambda: True)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert costs_asked() == "estimated"
    with pytest.raises(ValueError, match="costs are measured by one process"):
        costs_asked("measured")


def test_the_longest_draft_is_the_best_static_length_on_predictable_text():
    def best(costs, lengths):
        def rate(k):
            tokens = sum(0.9**index for index in range(k + 1))
            verifying = np.interp(k + 1, costs.widths, costs.target_pass) / costs.plain_pass
            return tokens / (verifying + k * costs.ratio)

        return max(lengths, key=rate)

    for costs in (STEPS, FLAT, cost_model(0.5, {2: 1.0, 16: 3.0}), cost_model(0.0, {2: 1.0, 16: 1.0})):
        assert longest_draft(costs) == best(costs, range(1, 16))
    assert longest_draft(cost_model(0.5, {2: 1.0, 16: 3.0})) < longest_draft(STEPS) < longest_draft(FLAT)


def test_rules_are_told_what_they_take_and_were_not_given():
    verification = tuple(STEPS.verification_times(7).tolist())
    assert costs_for(survival(), STEPS, 7) == {"drafter_cost": 0.13, "verification_times": verification}
    assert costs_for(at_least(1, survival()), STEPS, 7) == costs_for(survival(), STEPS, 7)
    assert costs_for(phase_length(survival()), STEPS, 7) == costs_for(survival(), STEPS, 7)
    assert costs_for(survival(drafter_cost=0.4), STEPS, 7) == {"verification_times": verification}
    for rule in (goodput(), bandit(), policy_bandit()):
        found = costs_for(rule, STEPS, 7)
        assert found.keys() == {"drafter_cost", "verification_cost"}
        assert found["verification_cost"] == pytest.approx(0.2 / 7)
    assert costs_for(adaedl(), STEPS, 7) == costs_for(static(), STEPS, 7) == {}
    assert "drafter_cost" not in costs_for(survival(), cost_model(0.0, {2: 1.0, 8: 1.2}), 7), "what drafts is no model"
    assert weighs_costs(survival()) and weighs_costs(goodput()) and not weighs_costs(adaedl())


def test_rules_that_decide_for_all_rows_do_so_whatever_is_wrapped_around_them():
    joined = survival(together=True)
    several = policy_bandit([joined, survival()])
    wrapped = joined, at_least(1, joined), phase_length(joined), update_every(policy=joined), several
    for rule in wrapped:
        assert rule.joins_rows and costs_for(rule, STEPS, 7) != {}
    assert not any(rule.joins_rows for rule in (survival(), at_least(1, survival()), policy_bandit()))


def test_costs_are_asked_for_in_words_by_file_or_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    assert costs_asked() == "measured"
    assert costs_asked("estimated") == "estimated" and costs_asked(STEPS) is STEPS
    save_cost_model(tmp_path / "here.json", STEPS)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here.json"))
    assert costs_asked() == STEPS and costs_asked("measured") == "measured"
    with pytest.raises(FileNotFoundError, match="no cost model 'mesured'; did you mean 'measured'"):
        costs_asked("mesured")


def test_free_memory_is_the_least_that_is_said(monkeypatch, tmp_path):
    if jax.default_backend() != "cpu" or machine.free_memory() is None:
        pytest.skip("the device says its own")
    monkeypatch.setattr(machine, "GROUPS", {tmp_path: ("memory.max", "memory.current")})
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nfile 9\ninactive_file 100\nactive_file 30\n")
    assert machine.free_memory() == 2000 + 130  # files that were read are no reason to refuse anything
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() > 1e6
