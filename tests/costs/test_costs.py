"""Costs of the machine at hand: measured once, kept on disk, and given to rules that weigh them."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib.smoke import tiny_pair
from specdec_jax.costs import choices, machine, step_cost, this_machine
from specdec_jax.costs.choices import VARIABLE, costs_asked, costs_for, longest_draft, weighs_costs, widths_for
from specdec_jax.costs.cost_model import (
    RuleCost,
    between,
    cost_model,
    decoding_seconds,
    load_cost_model,
    passes_disagree,
    save_cost_model,
)
from specdec_jax.costs.step_cost import Cost
from specdec_jax.decoding.statistics import no_counts
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.kernels import compiled
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
from specdec_jax.strategy import strategy
from specdec_jax.text import generation
from specdec_jax.text.generation import SamplingParams, build_pair, decode, prepare
from specdec_jax.text.pair import measure_costs, measured_pair
from specdec_jax.types import Drafter

TIMES = {1: 1.0, 2: 1.0, 4: 1.01, 6: 1.1, 8: 1.2, 12: 1.21, 16: 1.5}


def measured(*models, **options):
    return this_machine.measured(*(models or tiny_pair()), drafter_of=drafter_of, **options)


class Made(list):
    """Measurements that were made, by what is in each, and `series`: quartiles by time for those to come."""

    def __init__(self):
        super().__init__()
        self.series = []


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """Every measurement that is made, by what is in it, with made-up times; a home of its own, a quiet machine."""
    made = Made()

    def pass_programs(target, drafter, widths, **options):
        """Nothing is compiled; sampled passes take a quarter longer, and drafter steps twice as long."""
        times = {f"pass of {width} tokens": TIMES[width] for width in widths} | {"plain pass": TIMES[1]}
        times = {f"{at} {name}": 1.25 ** (at > 0) * value for at in (0, 0.7) for name, value in times.items()}
        times |= {"0 drafter step": 0.13, "0.7 drafter step": 0.26} if drafter is not None else {}
        now = made.series.pop(0) if made.series and set(made.series[0]) <= set(times) else {}
        return times, lambda spent: {name: Cost(*now.get(name, [value] * 3)) for name, value in times.items()}

    def turns(programs, repeats, seconds):
        """A busy machine: the second turn takes ten times as long, the third is disturbed in its middle."""
        made.append(sorted(programs))
        time.sleep(0.05)
        assert repeats >= 5
        return {"many": [1.0, 10.0, 1.0, 1.0, 1.0], "few": [0.616, 6.16, 1.5, 0.616, 0.616]}

    def time_policy(target, drafter, policy, **options):
        made.append([repr(policy)])
        return RuleCost(repr(policy.bare), 0.01, 0.02, 0.03, 0.04), {}

    monkeypatch.setattr(this_machine, "pass_programs", pass_programs)
    monkeypatch.setattr(this_machine, "timed_rounds", lambda *args, **options: lambda temperature: None)
    monkeypatch.setattr(this_machine, "time_policy", time_policy)
    monkeypatch.setattr(this_machine, "turns", turns)
    monkeypatch.setattr(step_cost, "load_average", lambda: 0.0)
    monkeypatch.setenv("HOME", str(tmp_path))
    another_process()
    return made


def another_process():
    """The measurements that a process remembers are forgotten."""
    this_machine.tables.clear()


def test_a_pair_is_measured_once_and_its_costs_are_printed(measuring, tmp_path, capsys):
    """Threads that come second wait for the first."""
    with ThreadPoolExecutor(3) as pool:
        (found,) = {*pool.map(lambda _: measured(), range(3))}
    assert "0.130" in (printed := capsys.readouterr().err) and "1.20 at 8" in printed
    assert measured() == found and len(measuring) == 1 and capsys.readouterr().err == ""
    assert found.ratio == 0.13 and dict(zip(found.widths, found.target_pass, strict=True)) == TIMES
    (file,) = (tmp_path / ".cache/specdec_jax/costs").glob("*.json")
    assert load_cost_model(file) == found


def test_in_a_batch_cache_slots_cost_time_and_rules_get_it(measuring, capsys):
    """(1 - 0.616) / (512 - 128): a thousandth of a pass each; alone they cost nothing and are not measured."""
    target, drafter = tiny_pair()
    alone, four = measured(), measured(batch=4)
    assert alone.at(64) == alone and measuring[1] == ["few", "many"] and len(measuring) == 3
    assert "every hundred cache slots 100.0 ms" in capsys.readouterr().err
    assert four.slots == 512 and four.slot_time == pytest.approx(0.001) and four.at(512) == four
    few = four.at(192)
    assert few.plain_pass == pytest.approx(0.68) and few.drafter_step == four.drafter_step
    np.testing.assert_allclose(np.subtract(four.target_pass, few.target_pass), 0.32)
    assert four._replace(slot_time=0.1).at(0).plain_pass == pytest.approx(0.25), "never below a quarter"
    pair = build_pair(target, drafter, policy=survival(), costs=four)
    for prompt in ("a", "a" * 150):
        request = prepare(pair, [prompt], SamplingParams(max_new_tokens=8), chat=False)
        hyperparameters, slots = request.options["policy_hyperparameters"], request.options["slots"]
        assert hyperparameters["drafter_cost"] == pytest.approx(0.13 / four.at(slots).plain_pass)
        widest = pair.costs.at(slots).verification_times(9)[9]
        assert hyperparameters["verification_times"][9] == pytest.approx(widest)


def test_other_shapes_dtypes_devices_and_versions_are_other_measurements(measuring, monkeypatch, tmp_path):
    target, drafter = tiny_pair()
    measured()
    measured(drafter, drafter)
    measured(target._replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)), None)
    assert len(measuring) == 3 and "0 drafter step" not in measuring[-1]
    monkeypatch.setattr(this_machine, "device", lambda: "64 cores of another processor")
    measured()
    monkeypatch.setattr(jax, "__version__", "99.0")
    measured()
    (tmp_path / "products.cc").write_text("other products of few rows")
    monkeypatch.setattr(compiled, "SOURCE", tmp_path / "products.cc")
    measured()
    assert len(measuring) == 6


def test_a_file_that_is_damaged_is_measured_again(measuring, tmp_path, capsys):
    measured()
    (file,) = (tmp_path / ".cache/specdec_jax/costs").glob("*.json")
    file.write_text('{"drafter_step": ')
    another_process()
    measured()
    assert len(measuring) == 2 and "is not a cost model" in capsys.readouterr().err
    load_cost_model(file)


@pytest.mark.parametrize(
    "series, load, doubts",
    [
        ({}, 2.1, ["the load average was 2.1 on 2 cores"]),
        ({"0 pass of 8 tokens": (1.2, 1.1, 1.4)}, 1.9, []),  # median and quartiles
        (
            {"0 pass of 8 tokens": (1.2, 0.9, 1.6)},
            0.0,
            ["a pass of 8 tokens at temperature 0 took 900.0 to 1600.0 ms (quartiles)"],
        ),
        (
            {"0.7 drafter step": (0.13, 0.1, 0.2)},
            0.0,
            ["a drafter step at temperature 0.7 took 100.0 to 200.0 ms (quartiles)"],
        ),
    ],
)
def test_what_looks_measured_on_a_busy_machine_is_doubtful_and_measured_again(
    series, load, doubts, measuring, monkeypatch, tmp_path, capsys
):
    """By the next process in a quiet moment: doubts stand in the costs, their file and the line."""
    monkeypatch.setattr(step_cost, "load_average", lambda: load)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    measuring.series.append(series)
    found = measured()
    assert list(found.doubts) == doubts and len(measuring) == 1
    (file,) = (tmp_path / ".cache/specdec_jax/costs").glob("costs-*.json")
    printed = capsys.readouterr().err
    assert load_cost_model(file) == found and printed.count("\n") == 2
    assert ("doubtful" in printed) == bool(doubts) and all(clause in printed for clause in doubts)
    assert measured() == found and len(measuring) == 1, "the same process goes by it"
    if load > 2:
        another_process()
        assert measured() == measured() == found and len(measuring) == 1
        assert capsys.readouterr().err.count("since this machine is busy now") == 1
    monkeypatch.setattr(step_cost, "load_average", lambda: 0.0)
    another_process()
    assert not measured().doubts and not load_cost_model(file).doubts
    assert ("are doubtful (" in capsys.readouterr().err) == bool(doubts)


COUNTS = no_counts(1, 5)._replace(  # 20 rounds: 8 without drafts, 5 of one draft, 4 of three and 3 of five
    num_rounds=np.array([20], np.int32),
    drafted_at=np.array([[12, 7, 7, 3, 3]], np.int32),
    drafter_passes=np.array([33], np.int32),
)
COUNTS = COUNTS._replace(num_draft_tokens=COUNTS.drafted_at.sum(axis=1))
EXPECTED = 13 * 1.0 + 4 * 1.01 + 3 * 1.1 + 33 * 0.13


def test_the_time_of_rounds_is_predicted_by_their_widths(measuring):
    costs = between(measured(), (2, 4, 6))
    assert decoding_seconds(costs, COUNTS) == pytest.approx(EXPECTED)
    several = jax.tree.map(lambda leaf: np.repeat(leaf, 2, axis=0), COUNTS)
    trees = COUNTS._replace(num_draft_tokens=COUNTS.num_draft_tokens + 1)
    assert decoding_seconds(costs, several) is decoding_seconds(costs, trees) is None
    plain = no_counts(1, 0)._replace(num_rounds=np.array([20], np.int32))
    assert decoding_seconds(between(cost_model(0.1, {1: 1.0, 8: 2.0}), (4, 8)), plain) == 20.0


def test_sampled_requests_go_by_sampled_costs(measuring, capsys):
    target, drafter = tiny_pair()
    pair = measured_pair(target, drafter, costs="measured", max_draft_length=3)
    assert "; sampled, 0.208 of 1250.0 ms" in capsys.readouterr().err
    greedy, sampled = (
        prepare(pair, ["ab"], SamplingParams(temperature=temperature)).options["policy_hyperparameters"]
        for temperature in (0.0, 1.0)
    )
    assert (greedy["drafter_cost"], sampled["drafter_cost"]) == (0.13, 0.26 / 1.25)
    assert greedy["verification_times"] == pytest.approx(sampled["verification_times"]) == [1.01] * 4
    at_one = pair.costs.at(temperature=1.0)
    assert (at_one.drafter_step, at_one.plain_pass, at_one.target_pass[0]) == (0.26, 1.25, 1.25 * 1.01)
    assert at_one.at(temperature=1.0) == at_one and pair.costs.at(temperature=0.0) == pair.costs


def test_a_rules_own_computation_is_measured_once_and_predicted(measuring, tmp_path):
    target, drafter = tiny_pair()
    options = {"costs": "measured", "rule_cost": True}
    pair = measured_pair(target, drafter, policy=survival(rate_weight=3.0), **options)
    assert pair.costs.rules == (RuleCost("survival", 0.01, 0.02, 0.03, 0.04),) and len(measuring) == 2
    another_process()
    assert measured_pair(target, drafter, policy=survival(), **options).costs == pair.costs and len(measuring) == 2
    both = measured_pair(target, drafter, policy=adaedl(), **options).costs
    assert [rule.policy for rule in both.rules] == ["survival", "adaedl"]
    assert len(measured_pair(target, drafter, policy=static(), **options).costs.rules) == 2, "static adds nothing"
    edited = strategy(adaedl.__wrapped__, "mine.py")()
    rules = measured_pair(target, drafter, policy=edited, **options).costs.rules
    assert [rule.policy for rule in rules] == ["survival", "adaedl", "mine.py"]
    (file,) = (tmp_path / ".cache/specdec_jax/costs").glob("*.json")
    assert load_cost_model(file).rules == both.rules, "a user's file may be edited"
    rounds, passes = COUNTS.num_rounds[0], COUNTS.drafter_passes[0]
    for temperature, step, each in ((0.0, 0.01, 0.02), (0.7, 0.03, 0.04)):
        alone = decoding_seconds(both.at(temperature=temperature), COUNTS)
        assert decoding_seconds(both.at(temperature=temperature, policy=static(draft_length=2)), COUNTS) == alone
        costs = both.at(temperature=temperature, policy=survival(drafter_cost=0.5))
        assert decoding_seconds(costs, COUNTS) == pytest.approx(alone + rounds * each + passes * step)
        assert costs.plain_pass == both.at(temperature=temperature).plain_pass


def test_costs_of_earlier_versions_serve_for_every_temperature_and_say_so(tmp_path):
    old = {"drafter_step": 0.1, "widths": [2, 8], "target_pass": [1.0, 1.5], "plain_pass": 1.0, "batch": 1}
    (tmp_path / "old.json").write_text(json.dumps(old))
    costs = load_cost_model(tmp_path / "old.json")
    assert costs.at(temperature=0.7, policy=survival()) == costs.at(temperature=0.0)._replace(rules=())
    assert "; at other temperatures taken to be the same" in this_machine.sentence(costs)
    assert "last as long as greedy ones and the rules' own" in costs.left_out(0.7)
    assert costs.left_out(0.0) == "the rules' own computation is not counted"
    sampled = {"sampled_step": 0.2, "sampled_pass": [1.2, 1.1], "sampled_plain": 1.1}
    (tmp_path / "new.json").write_text(json.dumps(old | sampled | {"rules": [["svip", 1.0, 2.0, 3.0, 4.0]]}))
    new = load_cost_model(tmp_path / "new.json")
    assert new.sampled_pass == (1.2, 1.2) and new.rules[0].sampled_step == 3.0
    assert new.left_out(0.7) == "the rules' own computation is only counted for svip"
    assert between(new, (2, 5)).sampled_pass == pytest.approx((1.2, 1.2)) and {new}
    (tmp_path / "new.json").write_text(json.dumps(old | sampled | {"sampled_pass": [1.2]}))
    with pytest.raises(ValueError, match="sampled_plain and sampled_pass need 1 and 2 times"):
        load_cost_model(tmp_path / "new.json")


def test_passes_of_one_target_that_took_other_times_are_doubtful():
    first, close, other = (cost_model(0.1, {1: milliseconds / 1e3}) for milliseconds in (6.77, 7.1, 8.4))
    expected = "passes of plain decoding of one target took 6.77 and 8.40 ms"
    assert passes_disagree([("a", first), ("b", close), ("a", other), ("a", first)]) == expected
    assert passes_disagree([("a", first), ("a", close), ("b", other)]) is passes_disagree([]) is None


def test_differences_that_a_busy_machine_made_negative_are_doubtful_costs():
    seconds = {f"{at} {name}": Cost(*[1.0] * 3) for at in ("0", "0.7") for name in ("plain pass", "pass of 2 tokens")}
    seconds |= {f"{at} drafter step": Cost(-0.1, -0.2, 0.1) for at in ("0", "0.7")}
    seconds["0 pass of 2 tokens"] = Cost(-1, 1, 1)
    costs = step_cost.costs_of(seconds, doubts=step_cost.spread_doubts(seconds))
    assert costs.drafter_step == costs.sampled_step == costs.target_pass[0] == 0.001 and costs.sampled_pass == (1.0,)
    assert costs.doubts == ("0 drafter step took -200.0 to 100.0 ms (quartiles)",)


def test_times_are_those_at_the_median_speed_of_the_first_program():
    """It is called before each other one; the third turn is ten times as slow, and in the first one call of it is."""
    times = {"plain": [9.0, 20.0, 2.0, 2.0, *[2.0] * 3, *[20.0] * 3], "pass": [9.0, 3.0, 3.0, 30.0]}
    times |= {"long": [9.0, 4.5, 4.5, 45.0], "step": [9.0, 1.0, 1.0, 10.0]}
    even = step_cost.turns({name: iter(each).__next__ for name, each in times.items()}, 3)
    assert even == {"plain": [2.0, 2.0, 20.0], "pass": [3.0] * 3, "long": [4.5] * 3, "step": [1.0] * 3}


@pytest.mark.parametrize("one_pass", [False, True])
def test_passes_steps_and_a_rules_work_are_told_apart(one_pass, monkeypatch):
    """Rounds take made-up seconds instead of being decoded: passes, drafter steps and the work of a rule."""
    target, drafter = tiny_pair()
    options = {"batch": 1, "slots": 64, "rounds": 2}
    kind = type("Kind", (Drafter,), {"num_passes": lambda self, drafts: min(drafts, 1)} if one_pass else {})

    def timed_rounds(target, drafter, params, policy, widths, **options):
        def at(temperature, draft_length=0):
            width = next(width for width in widths if width > draft_length)
            passes = drafter.num_passes(draft_length)
            own = 0.0 if policy == static() else 0.3 + 0.05 * passes
            return lambda: (1 + temperature) * (10.0 + width + passes * 1.5 + own) + (0.5 if widths != (1,) else 0.0)

        return at

    monkeypatch.setattr(step_cost, "timed_rounds", timed_rounds)

    def as_one_pass(model, longest):
        usual = drafter_of(model, longest)
        return kind(usual.init, usual.source, usual.commit, min(longest, 7), usual.model)

    widths = (1, 2, 8)
    programs, seconds_of = step_cost.pass_programs(target, drafter, (1, 2, 12), drafter_of=as_one_pass, **options)
    costs = step_cost.costs_of(seconds_of(step_cost.turns(programs, 3)))
    assert (costs.drafter_step, costs.plain_pass) == pytest.approx((1.5, 11.0))
    assert (costs.sampled_step, costs.sampled_plain) == pytest.approx((1.7 * 1.5, 1.7 * 11.0))
    assert costs.target_pass == pytest.approx((11.5, 12.5, 18.5)) and costs.widths == widths
    assert costs.sampled_pass == pytest.approx([1.7 * (10 + width) + 0.5 for width in widths])
    rule, shares = step_cost.time_policy(target, drafter, adaedl(), drafter_of=as_one_pass, repeats=3, **options)
    assert rule[0] == "adaedl" and rule[1:] == pytest.approx((0.05, 0.3, 1.7 * 0.05, 1.7 * 0.3))
    passes = 1 if one_pass else 7
    round_time = 18.0 + 1.5 * passes + 0.5
    assert shares["0"].median == pytest.approx((0.3 + 0.05 * passes) / round_time)


def test_an_overruled_policy_drafts_to_the_static_length_and_does_its_work():
    target, drafter = tiny_pair()
    rule = step_cost.overruled(survival())
    pair = build_pair(target, drafter, costs="estimated", max_draft_length=3)
    states = []
    for policy in (static(), rule):
        request = prepare(pair.using(policy), ["ab"], SamplingParams(max_new_tokens=12, stop_ids=()), chat=False)
        request.options["policy_hyperparameters"] = {"draft_length": 2}
        states.append(generation.decode(pair.using(policy), request).state)
    first, other = (jax.device_get(state.statistics) for state in states)
    jax.tree.map(np.testing.assert_array_equal, first, other)
    assert first.num_draft_tokens[0] > first.num_drafts[0] > 5
    learnt, begun = states[1].policy.policy, survival().init(1)
    assert learnt.verified[0, 0] > begun.verified[0, 0] and learnt.time[0] > begun.time[0]


def test_without_a_writable_home_nothing_is_cached(measuring, monkeypatch, tmp_path, capsys):
    (tmp_path / ".cache").write_text("a file where the folder would be")
    for _ in range(2):
        measured()
    assert len(measuring) == 2 and "kept nowhere" in capsys.readouterr().err


def test_a_pair_decodes_by_what_was_measured(measuring):
    target, drafter = tiny_pair()
    pair = measured_pair(target, drafter, costs="measured")
    assert pair.decoder.parts.drafter.max_draft_length == 9
    assert pair.decoder.parts.widths == (4, 6, 10) and pair.drafter_cost == 0.13
    hyperparameters = prepare(pair, ["ab"], calibration=None).options["policy_hyperparameters"]
    # of the widths that it decodes with: even no draft at all is verified in four tokens
    assert hyperparameters["verification_times"] == pytest.approx([1.01] * 4 + [1.1] * 2 + [1.205] * 4)
    request = prepare(pair, ["ab"], SamplingParams(max_new_tokens=8), chat=False, record=True)
    (result,), state = decode(pair, request)
    assert len(result.tokens) == 8
    # what costs predict of what was decoded: every round in the width that it was verified in
    passes = dict(zip(pair.costs.widths, pair.costs.target_pass, strict=True))
    predicted = sum(passes[int(played["width"])] + 0.13 * int(played["drafter_passes"]) for played in result.rounds)
    assert decoding_seconds(pair.costs, jax.device_get(state.statistics)) == pytest.approx(predicted)
    assert measured_pair(target, drafter, costs="measured", max_draft_length=3).decoder.parts.widths == (4,)
    within = measured_pair(target, drafter, costs="measured", verification_widths=(5,)).decoder.parts
    assert within.widths == (5,) and within.drafter.max_draft_length == 4
    assert len(measuring) == 1


def test_building_a_pair_measures_prints_and_writes_nothing(measuring, tiny_folders, monkeypatch, tmp_path, capfd):
    """Until `measure_costs` is called: then the draft length and the widths are those that were measured."""
    target, drafter = tiny_folders
    monkeypatch.delenv("SPECDEC_JAX_COSTS")  # as users have it: costs are measured by default
    before = sorted(tmp_path.rglob("*"))
    pair = build_pair(target, drafter)
    assert pair.target.dtype == "bfloat16" and pair.costs is None
    assert not measuring and sorted(tmp_path.rglob("*")) == before and capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="build_pair measures nothing: measure_costs"):
        build_pair(target, drafter, costs="measured")
    found = measure_costs(pair.using(adaedl()))
    assert len(measuring) == 1 and "measuring" in capfd.readouterr().err
    assert found.target.dtype == found.drafters[0].dtype == "bfloat16" and found.policy.name == "adaedl"
    assert found.decoder.parts.drafter.max_draft_length == 9 and found.decoder.parts.widths == (4, 6, 10)
    same = measured_pair(target, drafter, policy=adaedl())
    assert same.costs == found.costs and same.decoder is found.decoder and len(measuring) == 1
    with pytest.raises(ValueError, match="only a pair of build_pair can be measured"):
        measure_costs(pair._replace(arguments=None))


def test_every_model_among_several_drafters_is_measured(measuring):
    """By its bytes a small one would be too cheap, and the others, whose costs are relative to it, too dear."""
    target, drafter = tiny_pair()
    several = measured_pair(target, ("prompt_lookup", drafter, target), costs="measured")
    assert several.decoder.parts.drafter.options["costs"] == (0.0, 0.13, 0.13) and len(measuring) == 2
    assert several.costs.ratio == several.drafter_cost == 0.13


def test_costs_that_are_given_overrule_measured_ones_and_a_rules_own_overrule_both(measuring):
    target, drafter = tiny_pair()
    given = cost_model(0.5, {2: 1.0, 16: 3.0})
    pair = build_pair(target, drafter, costs=given, max_draft_length=7)
    hyperparameters = prepare(pair, ["ab"]).options["policy_hyperparameters"]
    assert hyperparameters["drafter_cost"] == 0.5 and not measuring
    expected = between(given, pair.decoder.parts.widths).verification_times(7)
    assert hyperparameters["verification_times"] == pytest.approx(expected)
    other = prepare(pair.using(survival(drafter_cost=0.2)), ["ab"]).options["policy_hyperparameters"]
    assert "drafter_cost" not in other and "verification_times" in other
    assert not prepare(pair.using(adaedl()), ["ab"]).options.get("policy_hyperparameters")


def test_a_lookup_gets_the_costs_of_verification_and_plain_decoding_is_not_measured(measuring):
    target, _ = tiny_pair()
    assert measured_pair(target, None, costs="measured").costs is None and not measuring
    pair = measured_pair(target, "prompt_lookup", costs="measured")
    assert prepare(pair, ["ab"]).options["policy_hyperparameters"].keys() == {"verification_times"}
    assert pair.drafter_cost is None and "0 drafter step" not in measuring[0]


STEPS = cost_model(0.13, {2: 1.0, 4: 1.01, 6: 1.1, 8: 1.2, 12: 1.21, 16: 1.5})
FLAT = cost_model(0.05, {2: 1.0, 4: 1.0, 8: 1.01, 16: 1.02})


@pytest.mark.widths
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
    assert longest_draft(FLAT._replace(doubts=("busy",))) == 7 < longest_draft(FLAT)


def test_rules_get_the_costs_they_take_and_lack():
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


def test_costs_come_from_words_a_file_or_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    assert costs_asked() == "measured"
    assert costs_asked("estimated") == "estimated" and costs_asked(STEPS) is STEPS
    save_cost_model(tmp_path / "here.json", STEPS)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here.json"))
    assert costs_asked() == STEPS and costs_asked("measured") == "measured"
    monkeypatch.setattr(choices, "spans_processes", lambda: True)
    monkeypatch.delenv(VARIABLE)
    assert costs_asked() == "estimated"
    with pytest.raises(ValueError, match="costs are measured by one process"):
        costs_asked("measured")


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
