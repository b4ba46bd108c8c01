"""Costs of the machine at hand: measured once, kept on disk, given to whoever weighs them."""

import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib.smoke import tiny_pair
from specdec_jax.costs import at_hand
from specdec_jax.costs.choices import told
from specdec_jax.costs.cost_model import between, cost_model, load_cost_model
from specdec_jax.costs.step_cost import Cost
from specdec_jax.stopping import adaedl, survival
from specdec_jax.text.generation import SamplingParams, build_pair, generate, prepare

TIMES = {1: 1.0, 2: 1.0, 4: 1.01, 6: 1.1, 8: 1.2, 12: 1.21, 16: 1.5}


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    """Every measurement that is made, by what is in it, with made-up times; a home of its own."""
    made = []

    def alternate(programs, repeats, per, seconds):
        made.append(sorted(programs))
        time.sleep(0.05)
        known = {str(width): value for width, value in TIMES.items()}
        known |= {"drafter": 0.13, "bfloat16": 2.0, "float32": 1.5}
        return {name: Cost(known[name], known[name], known[name]) for name in programs}

    def turns(programs, repeats, per, seconds):
        """A busy machine: the second turn takes ten times as long, the third is disturbed in its middle."""
        made.append(sorted(programs))
        assert sorted(programs) == sorted(per) == ["few", "many"] and repeats >= 5
        return {"many": [1.0, 10.0, 1.0, 1.0, 1.0], "few": [0.616, 6.16, 1.5, 0.616, 0.616]}

    monkeypatch.setattr(at_hand, "alternate", alternate)
    monkeypatch.setattr(at_hand, "turns", turns)
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


def test_a_pair_is_measured_once_and_what_was_found_is_said(measuring, tmp_path, capsys):
    target, drafter = tiny_pair()
    found = at_hand.measured(target, drafter)
    said = capsys.readouterr().err
    assert at_hand.measured(target, drafter) == found and len(measuring) == 1
    assert capsys.readouterr().err == ""
    assert found.ratio == 0.13 and dict(zip(found.widths, found.target_pass, strict=True)) == TIMES
    assert "a drafter step is 0.130 of a pass" in said and "1.20 at 8" in said and "~/.cache/specdec_jax/costs" in said
    (file,) = (tmp_path / ".cache/specdec_jax/costs").glob("*.json")
    assert load_cost_model(file) == found


def test_in_a_batch_cache_slots_cost_time_and_rules_are_told(measuring, capsys):
    """(1 - 0.616) / (512 - 128): a thousandth of a pass each; alone they cost nothing and are not measured."""
    target, drafter = tiny_pair()
    alone, four = at_hand.measured(target, drafter), at_hand.measured(target, drafter, batch=4)
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
        known, slots = request.options["policy_hyperparameters"], request.options["slots"]
        # half more than it costs alone: rows that decide for themselves wait for each other
        assert known["drafter_cost"] == pytest.approx(1.5 * 0.13 / four.at(slots).plain_pass)
        least, widest = pair.costs.at(slots).verification_times(9)[[0, 9]]
        assert known["verification_times"][9] == pytest.approx(least + 1.5 * (widest - least))
        together = told(survival(together=True), pair.costs.at(slots), 9)
        assert together["drafter_cost"] == pytest.approx(0.13 / four.at(slots).plain_pass)
        assert together["verification_times"][9] == pytest.approx(widest)
        assert told(survival(), pair.costs.at(slots)._replace(batch=1), 9) == together


def test_other_shapes_dtypes_devices_and_versions_are_other_measurements(measuring, monkeypatch):
    target, drafter = tiny_pair()
    at_hand.measured(target, drafter)
    at_hand.measured(drafter, drafter)
    at_hand.measured(target._replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)), None)
    assert len(measuring) == 3 and "drafter" not in measuring[-1]
    monkeypatch.setattr(at_hand, "device", lambda: "64 cores of another processor")
    at_hand.measured(target, drafter)
    monkeypatch.setattr(jax, "__version__", "99.0")
    at_hand.measured(target, drafter)
    assert len(measuring) == 5


def test_a_file_that_is_damaged_is_measured_again(measuring, tmp_path, capsys):
    target, drafter = tiny_pair()
    at_hand.measured(target, drafter)
    (file,) = (tmp_path / ".cache/specdec_jax/costs").glob("*.json")
    file.write_text('{"drafter_step": ')
    at_hand.measured(target, drafter)
    assert len(measuring) == 2 and "is not a cost model" in capsys.readouterr().err
    load_cost_model(file)


@pytest.mark.parametrize("was, now, again", [(1.0, 1.0, False), (1.0, 2.0, False), (2.0, 1.0, True)])
def test_what_was_measured_in_a_busy_moment_is_measured_again(
    was, now, again, measuring, tmp_path, monkeypatch, capsys
):
    """One pass at another moment tells: much faster, and all is anew; as long, and nobody looks again."""
    target, drafter = tiny_pair()
    monkeypatch.setitem(TIMES, 1, was)
    first = at_hand.measured(target, drafter)
    (file,) = (tmp_path / ".cache/specdec_jax/costs").glob("*.json")
    monkeypatch.setitem(TIMES, 1, now)
    assert at_hand.measured(target, drafter) == first and len(measuring) == 1, "the same moment"
    for age in (7200, 3600):
        if not (tmp_path / file).with_suffix(".agreed").exists():
            os.utime(file, (time.time() - age, time.time() - age))
        found = at_hand.measured(target, drafter)
    assert measuring[1] == ["1"] and found.plain_pass == (now if again else was)
    looks = [made for made in measuring if made == ["1"]]
    assert len(looks) == (2 if now > was else 1), "looked at after one had agreed, or not"
    assert ("busy then" in capsys.readouterr().err) == again and len(measuring) == 1 + len(looks) + again
    file.write_text("damaged")
    assert at_hand.measured(target, drafter).plain_pass == now
    os.utime(file, (time.time() + 3600 - at_hand.MOMENT * 10,) * 2)
    count = len(measuring)
    if file.with_suffix(".agreed").exists():
        os.utime(file.with_suffix(".agreed"), (time.time() - 7200,) * 2)
    os.utime(file, (time.time() - 3600,) * 2)
    at_hand.measured(target, drafter)
    assert measuring[count:] == [["1"]], "a new file was not looked at"


def test_who_comes_second_waits_for_the_first(measuring):
    target, drafter = tiny_pair()
    threads = [threading.Thread(target=at_hand.measured, args=(target, drafter)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measuring) == 1


def test_without_a_home_that_can_be_written_nothing_is_kept(measuring, monkeypatch, tmp_path, capsys):
    (tmp_path / ".cache").write_text("a file where the folder would be")
    target, drafter = tiny_pair()
    for _ in range(2):
        at_hand.measured(target, drafter)
    assert len(measuring) == 2 and "kept nowhere" in capsys.readouterr().err


def test_the_faster_dtype_is_taken_where_both_fit(measuring, monkeypatch):
    target, _ = tiny_pair("bfloat16")
    loaded = []
    load = lambda dtype: loaded.append(dtype) or tiny_pair(dtype)[0]  # noqa: E731
    assert at_hand.faster_dtype(target, load) == "float32"
    assert at_hand.faster_dtype(target, load) == "float32" and loaded == ["float32"]
    monkeypatch.setattr(at_hand, "LARGEST", 10.0)
    assert at_hand.faster_dtype(target, load) == "bfloat16"
    monkeypatch.setattr(at_hand, "LARGEST", 4e9)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert at_hand.faster_dtype(target, load) == "bfloat16" and len(loaded) == 1


def test_a_pair_decodes_by_what_was_measured(measuring):
    target, drafter = tiny_pair()
    pair = build_pair(target, drafter, costs="measured")
    assert pair.decoder.parts.drafter.max_draft_length == 9
    assert pair.decoder.parts.widths == (4, 6, 10) and pair.drafter_cost == 0.13
    told = prepare(pair, ["ab"], calibration=None).options["policy_hyperparameters"]
    # of the widths that it decodes with: even no draft at all is verified in four tokens
    assert told["verification_times"] == pytest.approx([1.01] * 4 + [1.1] * 2 + [1.205] * 4)
    result = generate("ab", SamplingParams(max_new_tokens=8), pair=pair, chat=False)
    assert len(result.tokens) == 8
    assert build_pair(target, drafter, costs="measured", max_draft_length=3).decoder.parts.widths == (4,)
    within = build_pair(target, drafter, costs="measured", verification_widths=(5,)).decoder.parts
    assert within.widths == (5,) and within.drafter.max_draft_length == 4
    assert len(measuring) == 1


def test_costs_that_are_given_overrule_measured_ones_and_a_rules_own_overrule_both(measuring):
    target, drafter = tiny_pair()
    given = cost_model(0.5, {2: 1.0, 16: 3.0})
    pair = build_pair(target, drafter, costs=given, max_draft_length=7)
    told = prepare(pair, ["ab"]).options["policy_hyperparameters"]
    assert told["drafter_cost"] == 0.5 and not measuring
    assert told["verification_times"] == pytest.approx(between(given, pair.decoder.parts.widths).verification_times(7))
    own = prepare(pair.using(survival(drafter_cost=0.2)), ["ab"]).options["policy_hyperparameters"]
    assert "drafter_cost" not in own and "verification_times" in own
    assert not prepare(pair.using(adaedl()), ["ab"]).options.get("policy_hyperparameters")


def test_a_lookup_is_told_what_verification_costs_and_nobody_measures_for_plain_decoding(measuring):
    target, _ = tiny_pair()
    assert build_pair(target, None, costs="measured").costs is None and not measuring
    pair = build_pair(target, "prompt_lookup", costs="measured")
    assert prepare(pair, ["ab"]).options["policy_hyperparameters"].keys() == {"verification_times"}
    assert pair.drafter_cost is None and "drafter" not in measuring[0]
