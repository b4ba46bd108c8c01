"""Predictions beside measured runs: a replay has the hyperparameters that decoded, the run's calibration included."""

import json
from pathlib import Path

import pytest
from tiny_compare import write_config

from experiments import compare, record
from experiments.lib.measured import measured_points
from experiments.lib.run_folder import read_rows
from specdec_jax.costs.cost_model import flat
from specdec_jax.loading import load_model
from specdec_jax.replay.trace import load_trace
from specdec_jax.text.calibration import fingerprint

pytestmark = pytest.mark.slow

LONGEST = 5
COSTS = flat(0.1, LONGEST)
HYPERPARAMETERS = {
    "policy": {
        "static": {"draft_length": 2},
        "survival": {"greedy": [0.5, 1.0, 0.5], "drafter_cost": 0.02},
        "phase_length": {"routine_length": 1, "reasoning_length": 4},
    },
    "verifier": {},
    "monitor": {"phases": {"enter": 9.0, "leave": 9.0}},  # the default calls these texts reasoning after eight tokens
}
OTHERS = {"policy": {"static": {"draft_length": 4}}, "verifier": {}, "monitor": {}}
CASES = """Method("static", static()), Method("static-3", static(draft_length=3)),
    Method("survival", survival(verification_times=(1.0, 1.0, 1.0, 9.0, 9.0, 9.0))),
    Method("phase-length", phase_length()),"""
OPTIONS = "temperatures=(0.0,), max_new_tokens=24, max_draft_length=5, verification_widths=(6,), calibration={!r}"
METHODS = ["static", "static-3", "survival", "phase-length"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder of a calibrated greedy run, traces of the same pair and prompts)."""
    folder = tmp_path_factory.mktemp("measured")
    path = str(folder / "calibration.json")
    config = write_config(folder, CASES, OPTIONS.format(path), texts=("hello", "a b a b", "why?"))
    content = {
        name: {"name": name, **fingerprint(load_model(str(folder / name), dtype="float32").params)}
        for name in ("target", "drafter")
    }
    content |= {"hyperparameters": {"greedy": HYPERPARAMETERS, "sampled": OTHERS}, "figures": {}}
    Path(path).write_text(json.dumps(content))
    assert compare.main([str(config), "--out", str(folder / "run")]) == 0
    options = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), "--temperatures", "0"]
    options += ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "traces"), "--dtype", "float32"]
    lengths = ["--max-new-tokens", "24", "--max-draft-length", str(LONGEST)]
    assert record.main([*options, "--no-chat", *lengths]) == 0
    return folder / "run", {0.0: load_trace(folder / "traces" / "trace-0.npz")}


def described(name, **hyperparameters):
    """A strategy as a manifest has it."""
    factory = f"specdec_jax.{name}:{name.rpartition('.')[2]}"
    return {"strategy": factory, "options": {}, "hyperparameters": hyperparameters}


def changed(run, folder, methods=None, without=(), **entries):
    """A copy of a run folder whose config, or whose methods by name, say otherwise; its rows lack some keys."""
    folder.mkdir()
    rows = [{key: row[key] for key in row if key not in without} for row in read_rows(run)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["config"] |= entries
    for method in manifest["config"]["methods"]:
        method |= (methods or {}).get(method["name"], {})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def live(run, method):
    """(accepted over drafted, speed-up by COSTS) of the live rounds, from what every row counted."""
    rows = [row for row in read_rows(run) if row["method"] == method]
    total = {name: sum(row[name] for row in rows) for name in rows[0] if name.startswith("num_") or "passes" in name}
    seconds = total["num_rounds"] * COSTS.plain_pass + total["drafter_passes"] * COSTS.drafter_step
    rate = total["num_accepted_tokens"] / total["num_draft_tokens"]
    return rate, total["num_emitted_tokens"] * COSTS.plain_pass / seconds


def found(run, traces):
    return {point.method: point for point in measured_points(run, traces, COSTS)}


@pytest.mark.seldom
def test_greedy_predictions_are_the_live_rounds(ran):
    """Every pass costs the same, so that a prediction is the rounds and the passes that were counted."""
    run, traces = ran
    points = found(run, traces)
    assert list(points) == METHODS
    for name, point in points.items():
        rate, speedup = live(run, name)
        assert (point.acceptance, point.predicted_acceptance) == pytest.approx((rate, rate)), name
        assert point.predicted.estimate == pytest.approx(speedup) and point.same_prompts, name


def test_rows_hold_the_hyperparameters_that_decoded(ran, tmp_path):
    """Without the calibration file; a drafter of no trace is left out, rows of an earlier version are refused."""
    run, traces = ran
    assert found(run, traces) == found(changed(run, tmp_path / "run", calibration=None), traces)
    other = traces[0.0]._replace(about=traces[0.0].about | {"drafter": "another"})
    with pytest.raises(ValueError, match="has no method that traces"):
        measured_points(run, {0.0: other}, COSTS)
    older = changed(run, tmp_path / "older", without=("monitor_hyperparameters",))
    with pytest.raises(ValueError, match="is of an earlier version"):
        measured_points(older, traces, COSTS)


BLOCK = {"verifier": described("verification.block")}


@pytest.mark.parametrize(
    ("entries", "temperature", "played"),
    [
        ({"drafter": "prompt_lookup"}, 0.0, False),
        ({"drafter": ["smollm2-drafter", "prompt_lookup"]}, 0.0, False),
        ({"verifier": described("verification.lenience")}, 0.0, False),
        ({"verifier": {"strategy": "my_verifier:mine", "options": {}, "hyperparameters": {}}}, 0.0, False),
        (BLOCK, 0.0, True),
        (BLOCK, 0.05, False),
        ({"drafter": None}, 0.0, True),  # the config's
    ],
)
def test_what_no_trace_can_play_is_left_out(ran, tmp_path, entries, temperature, played):
    run, traces = ran
    copy = changed(run, tmp_path / "run", {"static": entries})
    lines = (copy / "results.jsonl").read_text().replace('"temperature": 0.0', f'"temperature": {temperature}')
    (copy / "results.jsonl").write_text(lines)
    assert list(found(copy, traces)) == METHODS[0 if played else 1 :]


def test_the_rounds_are_not_trivial(ran):
    run, _ = ran
    rates = {name: round(live(run, name)[0], 6) for name in METHODS}
    assert min(rates.values()) > 0 and max(rates.values()) < 1 and len(set(rates.values())) >= 3, rates
