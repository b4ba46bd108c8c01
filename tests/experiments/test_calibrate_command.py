"""Calibrations: what separates rejected tokens, the file and its pair, and its hyperparameters in generate."""

import json

import numpy as np
import pytest

from experiments.calibrate import main, phase_hyperparameters, positions_of
from experiments.lib.smoke import made_up_traces
from specdec_jax.metrics.separation import acceptance_curve, separate
from specdec_jax.stopping import phase_length
from specdec_jax.text import calibration as calibrations
from specdec_jax.text.calibration import calibration_of, fingerprint, hyperparameters_for, read_calibration
from specdec_jax.text.generation import build_pair, generate, prepare
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.strategies import build
from specdec_jax.verification import easd

pytestmark = pytest.mark.slow


def test_thresholds_and_curves_of_what_separates():
    rng = np.random.default_rng(0)
    accepted = rng.random(400) < 0.6
    values = np.round(np.where(accepted, rng.gamma(2, 0.5, 400), rng.gamma(4, 0.6, 400)), 1)  # with ties
    found = separate(values, accepted)
    above = {value: values > value for value in np.unique(values)}
    tried = {value: over[~accepted].mean() - over[accepted].mean() for value, over in above.items()}
    assert found.youden == pytest.approx(max(tried.values())) == pytest.approx(tried[found.threshold])
    pairs = values[~accepted][:, None] - values[accepted][None, :]
    assert found.area == pytest.approx(np.mean(np.sign(pairs)) / 2 + 0.5)
    for of_one_kind in (np.ones(5, bool), np.zeros(5, bool)):
        with pytest.raises(ValueError, match="accepted and rejected tokens"):
            separate(np.arange(5.0), of_one_kind)
    values, accepted = np.random.default_rng(2).random(101), np.arange(101) % 3 == 0
    curve = acceptance_curve(values, accepted, bins=8)
    assert sum(curve.count) == 101 and curve.value == sorted(curve.value)
    assert np.dot(curve.acceptance, curve.count) == pytest.approx(accepted.sum())


def test_phases_lie_around_what_separates_best_and_of_sampled_distributions_are_learnt_from_those():
    trace = made_up_traces()[0.0]
    hyperparameters = phase_hyperparameters(trace)
    _, _, accepted, running = positions_of(trace)
    middle = separate(running, accepted).threshold
    assert hyperparameters["leave"] < middle < hyperparameters["enter"]
    assert hyperparameters["enter"] - middle == pytest.approx(running.std() / 4)
    trace = made_up_traces()[1.0]
    warped = trace._replace(target_entropy=trace.target_entropy * 0.5)
    raw, other = phase_hyperparameters(warped), phase_hyperparameters(warped, raw_entropy=False)
    assert raw == phase_hyperparameters(trace) and other["enter"] == pytest.approx(raw["enter"] / 2, rel=1e-4)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, tiny_folders, models):
    """A tiny pair and the calibration that the command writes for it."""
    folder = tmp_path_factory.mktemp("calibrated")
    prompts = folder / "p.jsonl"
    texts = [("a", "one two three"), ("a", "four five"), ("b", "six seven"), ("b", "eight nine ten")]
    prompts.write_text("".join(json.dumps({"turns": [text], "category": name}) + "\n" for name, text in texts))
    out = folder / "out"
    command = [*models, "--prompts", str(prompts), "--dtype", "float32"]
    options = ["--split", "None", "--max-new-tokens", "24", "--max-deviation", "0.3", "--out", str(out)]
    assert main([*command, *options]) == 0
    return *tiny_folders, out / "calibration.json"


def test_the_command_writes_every_part(calibrated):
    found, out = json.loads(calibrated[2].read_text()), calibrated[2].parent
    table = (out / "table.md").read_text()
    assert set(found["hyperparameters"]) == {"greedy", "sampled"} and (out / "curves.png").stat().st_size > 10_000
    for kind, hyperparameters in found["hyperparameters"].items():
        policy, phases = hyperparameters["policy"], hyperparameters["monitor"]["phases"]
        assert {"static", "adaedl", "survival", "phase_length"} <= set(policy)
        assert len(policy["survival"].get("prior", ())) == (2 if kind == "sampled" else 0)
        assert hyperparameters["verifier"].keys() == {"lenience", "by_phase", "easd"}
        assert phases["leave"] <= phases["enter"]
        figures = found["figures"][kind]
        measured = {float(name): mean for name, mean in figures["lenience"]["by_lenience"].items()}
        bound = min((name for name, mean in measured.items() if mean <= 0.3), default=1.0)
        assert figures["lenience"]["bound"] == bound
        values = [measured[name] for name in sorted(measured)]
        assert values == sorted(values, reverse=True), "less lenience deviates less"
        assert f"(Youden's J {figures['rejection']['youden']:.2f}, area {figures['rejection']['area']:.2f})" in table


def test_its_hyperparameters_reach_policy_verifier_and_monitor(calibrated):
    target, drafter, path = calibrated
    learnt = read_calibration(path).hyperparameters
    for kind, entries in ((kind, entries) for one in learnt.values() for kind, entries in one.items()):
        for name, found in entries.items():
            build(kind, name, found)  # which refuses what a strategy does not have
    rule = phase_length()
    pair = build_pair(target, drafter, policy=rule, verifier=easd(), dtype="float32")
    for temperature, kind in ((0.0, "greedy"), (0.7, "sampled")):
        options = prepare(pair, ["one"], SamplingParams(temperature=temperature), calibration=path).options
        assert options["policy_hyperparameters"] == learnt[kind]["policy"]["phase_length"]
        assert options["verifier_hyperparameters"] == learnt[kind]["verifier"]["easd"]
        assert options["monitor_hyperparameters"] == learnt[kind]["monitor"]["phases"]
    given = prepare(pair.using(rule.but(routine_length=6)), ["one"], calibration=path).options
    lengths = learnt["greedy"]["policy"]["phase_length"]
    assert given["policy_hyperparameters"] == {"reasoning_length": lengths["reasoning_length"]}
    assert given["policy"].given == {"routine_length": 6}
    assert "policy_hyperparameters" not in prepare(pair, ["one"]).options
    result = generate("one", SamplingParams(max_new_tokens=8), pair=pair, calibration=path, record=True)
    assert len(result.tokens) == 8


def test_every_calibrated_variant_gets_its_hyperparameters(calibrated):
    calibration = read_calibration(calibrated[2])
    assert calibration.any_static_options == calibrations.ANY_STATIC_OPTIONS
    for decoding, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        names = [(found["kind"], found["name"]) for found in calibration.variants[decoding]]
        policies = {("policy", name) for name in ("adaedl", "at_least", "max_confidence", "phase_length")}
        assert set(names) == {*policies, ("monitor", "phases")}
        for found in calibration.variants[decoding]:
            strategy = build(found["kind"], found["name"], found["static_options"])
            learnt = hyperparameters_for(calibration, found["kind"], strategy, temperature)
            assert found["hyperparameters"].items() <= learnt.items()
            inside = found["name"] == "phase_length" and decoding == "sampled"
            assert ("prior" in learnt) == inside, "the survival rule inside has its prior"


def test_another_pair_is_refused(calibrated, tmp_path):
    target, drafter, path = calibrated
    found, other = json.loads(path.read_text()), tmp_path / "other.json"
    larger = {"drafter": found["drafter"] | {"parameters": found["drafter"]["parameters"] + 1}}
    scaled = {"target": found["target"] | {"scale": found["target"]["scale"] * 1.1}}
    for changed, source, message in (
        (larger, other, r"belongs to another pair: its drafter is drafter of [\d,]+ parameters"),
        (scaled, other, "its target is target .* other weights of that size"),
        ({}, "built-in", "no built-in calibration"),
    ):
        other.write_text(json.dumps(found | changed))
        with pytest.raises(ValueError, match=message):
            generate("one", target=target, drafter=drafter, dtype="float32", calibration=source)
    pair = build_pair(target, drafter, dtype="bfloat16")
    assert calibration_of(path, pair).source == str(path), "another dtype is the same pair"
    assert fingerprint(pair.params.target)["parameters"] == found["target"]["parameters"]


def test_a_file_that_is_no_calibration_is_refused(tmp_path):
    for text, message in (
        ("[1]", "is no calibration"),
        ('{"target": {}}', "is no calibration: drafter is missing"),
        ("{", "is no calibration"),
        ('{"target": {}, "drafter": {}, "hyperparameters": {}, "figures": {}}', "target.name is missing"),
        ('{"format": 7}', "format 7, and this version reads 2"),
    ):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_calibration(tmp_path / "c.json")
    with pytest.raises(FileNotFoundError, match=r"python -m experiments\.calibrate writes one"):
        read_calibration(tmp_path / "none.json")


def test_plain_decoding_needs_none_and_still_refuses_what_is_none(calibrated):
    target, _, path = calibrated
    options = {"target": target, "drafter": None, "dtype": "float32"}
    assert generate("one", SamplingParams(max_new_tokens=2), calibration=path, **options).tokens
    with pytest.raises(FileNotFoundError, match="no calibration at nowhere"):
        generate("one", calibration="nowhere", **options)
