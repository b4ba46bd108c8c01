"""`doctor`: whether a pair will work and pay, what it answers with, and that its numbers are those of replays."""

import contextlib
import io
import json
import shlex

import numpy as np
import pytest
from tiny_pair import ONE_LAYER, write_pair
from tiny_weights import weights, write_folder

from experiments.lib.rules import rule
from experiments.lib.trace_runs import replay_rule
from specdec_jax import kernels
from specdec_jax.app import cli, doctor
from specdec_jax.costs.cost_model import cost_model, load_cost_model, save_cost_model
from specdec_jax.loading import for_target, load_model
from specdec_jax.loading.across import probability_shared
from specdec_jax.metrics.judging import answers
from specdec_jax.replay.tracing import trace_texts
from specdec_jax.stopping import static, survival
from specdec_jax.text.strategies import names

TEXTS = ["hello", "one two three four", "a b", "12 34"]
DRAFTS, TOKENS = 3, 24
SHORT = ["--no-chat", "--dtype", "float32", "--max-new-tokens", str(TOKENS), "--max-draft-length", str(DRAFTS)]
TIMES = {1: 1.0, 2: 1.0, 3: 1.01, 4: 1.2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a pair, prompts, and the costs of a machine on which drafts are cheap and of one where not."""
    folder = tmp_path_factory.mktemp("doctor")
    write_pair(folder)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in TEXTS))
    for name, c in (("cheap", 0.05), ("expensive", 2.0)):
        save_cost_model(folder / f"{name}.json", cost_model(c, TIMES, device="made up"))
    return folder


def examined(place, *more):
    """(exit code, page, what is on standard error, report)."""
    report, out, err = place / "report.json", io.StringIO(), io.StringIO()
    report.unlink(missing_ok=True)
    models = ["--target", str(place / "target"), "--drafter", str(place / "drafter")]
    words = ["doctor", *models, *SHORT, "--prompts", str(place / "prompts.jsonl"), "--json", str(report), *more]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return code, out.getvalue(), err.getvalue(), json.loads(report.read_text())


@pytest.fixture(scope="module")
def page(place):
    return examined(place, "--costs", str(place / "cheap.json"))


@pytest.fixture(scope="module")
def paying(page):
    return page[3]


def trace_of(place, temperature=0.0, seed=0):
    target, drafter = (load_model(str(place / part), dtype="float32") for part in ("target", "drafter"))
    prompts = [target.tokenizer.encode(text, add_special=True) for text in TEXTS]
    options = {"warp": {"temperature": temperature}, "seed": [seed + index for index in range(len(TEXTS))]}
    texts = list(zip(prompts, answers(target, prompts, max_new_tokens=TOKENS, **options), strict=True))
    models, params = (target.model, drafter.model), (target.params, drafter.params)
    return trace_texts(models, params, texts, limit=TOKENS, max_draft_length=DRAFTS, **options)


def check_acceptance(report, trace):
    """The figures are those of the trace, a draft for every one that it can tell of."""
    found = report["acceptance"]
    assert (found["texts"], found["tokens"]) == (trace.num_texts, trace.num_positions)
    assert found["measured_by_draft"][0][0] == pytest.approx(trace.accepted.sum() / trace.num_positions)
    assert len(found["measured_by_draft"]) == DRAFTS


def speedups(report):
    return {line["policy"]: line["predicted_speedup"] for line in report["rules"]}


def test_a_pair_that_pays_ends_with_the_command_to_decode_with(place, page):
    code, out, err, report = page
    assert code == 0 and err == "" and "\x1b" not in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert report["acceptance"]["measured_probability_shared"] is None
    assert report["products"] == kernels.products() and f"are computed by: {kernels.products()}." in out
    why, line = report["conclusion"]["why"], report["conclusion"]["command"]
    assert why.startswith("Drafting pays: ") and out.splitlines()[-1] == line
    parsed, best = cli._parsed(shlex.split(line)[3:]), report["rules"][0]
    assert parsed.rules.policy == best["policy"] and f"{best['predicted_speedup'][0]:.2f}" in why
    assert (parsed.models.target, parsed.models.drafter) == (str(place / "target"), str(place / "drafter"))
    assert (parsed.models.dtype, parsed.max_draft_length, parsed.decoding.chat) == ("float32", DRAFTS, False)
    assert parsed.models.costs == str(place / "cheap.json") and parsed.decoding.temperature == 0


def test_every_rule_is_predicted_and_the_fastest_come_first(paying):
    found, others = speedups(paying), {"at_least", "update_every", "static", "comb", "survival_tree"}
    lengths = {f"static(draft_length={length})" for length in range(1, DRAFTS + 1)}
    assert set(found) == {*names("policy")} - others | lengths
    estimates = [estimate for estimate, _, _ in found.values()]
    assert estimates == sorted(estimates, reverse=True) and len(set(estimates)) > 5
    marked = [line["as_fast_as_best"] for line in paying["rules"]]
    assert marked[0] and not marked[-1]


def test_the_numbers_are_those_of_an_experiment_on_a_trace_of_the_pair(place, paying):
    trace, costs = trace_of(place), load_cost_model(place / "cheap.json")
    widths = paying["costs"]["widths"]  # the pair's own: a draft is verified in the narrowest that holds it
    costs = costs._replace(widths=tuple(widths), target_pass=tuple(TIMES[width] for width in widths))
    for name, policy in (("survival", "survival"), ("static-3", "static(draft_length=3)")):
        found = replay_rule(trace, rule(name), costs, DRAFTS)
        (line,) = [line for line in paying["rules"] if line["policy"] == policy]
        np.testing.assert_allclose(line["predicted_seconds"], found.seconds(costs)[0], rtol=1e-6)
        assert line["predicted_speedup"][0] == pytest.approx(float(found.total_speedup(costs)[0]))
        assert line["acceptance_rate"] == pytest.approx(float(found.acceptance_rate[0]))
    check_acceptance(paying, trace)


def test_a_pair_that_does_not_pay_says_what_would_have_to_be_otherwise(place, paying):
    code, out, _, report = examined(place, "--costs", str(place / "expensive.json"))
    said = report["conclusion"]
    assert code == 1 and (said["works"], said["pays"], said["command"]) == (True, False, None)
    assert "Drafting will not pay: " in out and "generate" not in out
    assert all(estimate <= 1 for estimate, _, _ in speedups(report).values())
    even = max(line["break_even"] for line in report["rules"] if line["break_even"] is not None)
    assert f"It would pay with c below {even:.3f}." in said["why"]
    # With the same rounds, a static length takes as long as plain decoding where a drafter step costs that much.
    lines = [line for found in (report, paying) for line in found["rules"]]
    line, cheap = (line for line in lines if line["policy"] == "static(draft_length=1)")
    assert line["break_even"] == pytest.approx(cheap["break_even"]) and line["break_even"] < 1
    assert report["rules"][0]["predicted_speedup"][0] <= 1 < report["costs"]["ratio"]


def test_the_probability_of_the_tokens_that_both_have(place, tmp_path, monkeypatch):
    """The drafter lacks six letters."""
    other = write_folder(tmp_path / "other", weights(ONE_LAYER), ONE_LAYER)
    known = json.loads((other / "tokenizer.json").read_text())
    vocabulary = known["model"]["vocab"]
    lacks = sorted(vocabulary[letter] for letter in "tirasn")
    known["model"]["vocab"] = {f"{word}#" if number in lacks else word: number for word, number in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(known))
    monkeypatch.setattr(doctor, "every_rule", lambda longest: [survival(), static(draft_length=longest)])
    *_, report = examined(place, "--drafter", f"{other}@tokens", "--costs", str(place / "cheap.json"))
    target, drafter = (load_model(name, dtype="float32") for name in (str(place / "target"), f"{other}@tokens"))
    expected = probability_shared(target, for_target(target, drafter).params)  # of tests/loading/test_vocabularies.py
    assert 0.1 < expected < 0.99
    assert report["acceptance"]["measured_probability_shared"] == pytest.approx(expected, rel=1e-4)


def test_a_drafter_that_cannot_draft_ends_the_page_before_weights_are_read(place, tmp_path, monkeypatch):
    few = ONE_LAYER | {"vocab_size": 200}
    other = write_folder(tmp_path / "other", weights(few), few)
    monkeypatch.setattr(doctor, "build", lambda *_: pytest.fail("weights were read"))
    code, out, err, report = examined(place, "--drafter", str(other))
    why = report["conclusion"]["why"]
    assert code == 1 and err == "" and f"drafter {str(other)!r} has 200 embeddings for 263 tokens" in why
    assert set(report) == {"pair", "conclusion"} and report["pair"]["refusal"] == why
    assert not report["conclusion"]["works"]


def test_weights_that_do_not_fit_end_the_page_before_they_are_read(place, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "free_memory", lambda: 300_000)
        patched.setattr(doctor, "build", lambda *_: pytest.fail("weights were read"))
        code, out, _, report = examined(place)
    taken = report["memory"]["predicted_weights"]["float32"]
    assert code == 1 and taken["target"] + taken["drafter"] == 4 * 48320 * 2
    assert "386.6 kB" in out and "300.0 kB" in out and "loaded" not in report["memory"]
    small = report["memory"]["predicted_weights"]["int8"]
    assert 48320 < small["target"] < 48320 * 1.2 and small["target"] == small["drafter"]


def test_caches_that_do_not_fit_end_the_page(place, monkeypatch):
    free = iter([10**9, 100_000])
    monkeypatch.setattr(doctor, "free_memory", lambda: next(free))
    code, out, _, report = examined(place, "--context", "120")
    loaded = report["memory"]["loaded"]
    assert code == 1 and loaded["measured_weights"] == {"target": 4 * 48320, "drafter": 4 * 48320}
    # two buffers of one layer, of 120 slots, 2 heads and 16 numbers, for either model; and some counts
    assert 0 <= loaded["predicted_row"] - 2 * 2 * 120 * 2 * 16 * 4 < 64 and loaded["predicted_rows"] == 0
    assert "120 cache slots" in report["conclusion"]["why"] and "Costs" not in out


def test_costs_that_are_estimated_are_called_predicted_and_a_temperature_arrives(place, monkeypatch):
    monkeypatch.setattr(doctor, "every_rule", lambda longest: [survival(), static(draft_length=longest)])
    more = ["--costs", "estimated", "--temperature", "0.7", "--seed", "3"]
    _, out, _, report = examined(place, *more)
    assert report["costs"]["how"] == "predicted" and report["costs"]["ratio"] == pytest.approx(1.0)
    assert report["costs"]["target_pass"] == [1.0, 1.0]  # as large as its target, and verification for nothing
    check_acceptance(report, trace_of(place, temperature=0.7, seed=3))


def test_rules_take_what_a_calibration_has_learnt(place, paying):
    path = place / "calibration.json"
    models = {part: {"name": part, "parameters": 48320, "scale": 0.24} for part in ("target", "drafter")}
    learnt = {"policy": {"cumulative_confidence": {"threshold": 0.0}}}  # drafts on, however unsure
    content = {**models, "hyperparameters": {"greedy": learnt, "sampled": {}}, "figures": {}, "format": 2}
    path.write_text(json.dumps(content))
    _, _, _, report = examined(place, "--costs", str(place / "cheap.json"), "--calibration", str(path))
    before, now = speedups(paying), speedups(report)
    assert before["cumulative_confidence"] != before[f"static(draft_length={DRAFTS})"]
    assert now["cumulative_confidence"] == now[f"static(draft_length={DRAFTS})"] and now["svip"] == before["svip"]
    assert f"--calibration {path}" in report["conclusion"]["command"]
