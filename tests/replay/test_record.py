"""experiments.record: traces of a pair of models from prompt to file, interrupted and whole."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments import record
from experiments.lib.rules import rule
from experiments.lib.trace_runs import replay_rule
from specdec_jax import SamplingParams, build_pair, generate, load_model
from specdec_jax.costs.choices import widths_for
from specdec_jax.costs.cost_model import between, cost_model
from specdec_jax.replay.trace import load_trace
from specdec_jax.stopping import survival

TEXTS = ["hello", "one two three four " * 4, "a b", "some more words here", "12"]


@pytest.fixture(scope="module")
def place(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("record")
    lines = [json.dumps({"id": f"p{i}", "category": "code", "text": text}) for i, text in enumerate(TEXTS)]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    options = [*models, "--prompts", str(path / "prompts.jsonl")]
    options += ["--dtype", "float32", "--no-chat", "--max-new-tokens", "20", "--max-draft-length", "5", "--batch", "2"]
    return path, options


@pytest.fixture(scope="module")
def recorded(place):
    path, options = place
    out = path / "whole"
    assert record.main([*options, "--temperatures", "0", "0.9", "--out", str(out)]) == 0
    return out


def test_a_trace_a_temperature_in_the_order_of_the_prompts(recorded):
    names = sorted(entry.name for entry in recorded.iterdir())
    assert names == ["manifest.json", "trace-0.9.npz", "trace-0.npz"]
    for name, temperature in (("trace-0.npz", 0.0), ("trace-0.9.npz", 0.9)):
        trace = load_trace(recorded / name)
        assert trace.about["ids"] == [f"p{i}" for i in range(len(TEXTS))]
        assert trace.about["tasks"] == ["code"] * len(TEXTS) and trace.about["batch"] == 2
        np.testing.assert_allclose(trace.temperature, temperature)
        assert trace.max_draft_length == 5 and (trace.limit == 20).all()
        assert trace.about["warp"]["temperature"] == temperature and trace.about["versions"]["jax"]


def test_greedy_rounds_of_a_rule_that_weighs_costs_are_live_in_the_widths_of_its_costs(tiny_folders, recorded):
    """What tables of replays say (`trace_runs.about`): here decoding would merge widths 1 and 2."""
    models = [load_model(folder, dtype="float32") for folder in tiny_folders]
    trace, costs = load_trace(recorded / "trace-0.npz"), cost_model(0.5, {1: 1.0, 2: 1.03, 4: 1.4, 6: 1.8})
    merged = between(costs, widths_for(costs, 5))
    assert merged.widths == (2, 4, 6)
    rounds = {}
    for widths, weighed in ((costs.widths, costs), (None, merged)):
        pair = build_pair(*models, policy=survival(), max_draft_length=5, verification_widths=widths, costs=costs)
        assert pair.costs == weighed
        counts = generate(list(TEXTS), SamplingParams(max_new_tokens=20), pair=pair, chat=False)
        texts = zip(trace.tokens, trace.length, strict=True)
        assert [text[:length].tolist() for text, length in texts] == [row.tokens for row in counts]
        live = [[row.statistics[name] for row in counts] for name in ("num_rounds", "num_draft_tokens")]
        found = replay_rule(trace, rule("survival"), weighed, 5)
        assert live == [found.rounds[0].tolist(), found.drafted[0].tolist()]
        rounds[weighed.widths] = live
    assert rounds[1, 2, 4, 6] != rounds[2, 4, 6]


def assert_same_trace(path, other):
    for name in ("path", "accepted", "tails", "tokens", "overlap"):
        np.testing.assert_array_equal(*(getattr(load_trace(each), name) for each in (path, other)))


def test_a_stopped_recording_goes_on_to_the_same_traces(place, recorded, monkeypatch):
    path, options = place
    out, batches = path / "stopped", []
    whole = record._batch

    def twice(*arguments):
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(arguments[3])
        return whole(*arguments)

    monkeypatch.setattr(record, "_batch", twice)
    command = [*options, "--temperatures", "0.9", "--out", str(out)]
    assert record.main(command) == 130
    batches.clear()
    assert record.main(command) == 0 and len(batches) == 1
    assert_same_trace(out / "trace-0.9.npz", recorded / "trace-0.9.npz")
    assert record.main([*command, "--limit", "1"]) == 2  # a trace has all prompts or is another


@pytest.mark.seldom
@pytest.mark.optimised  # as the processes are, whose traces are compared bit by bit
def test_processes_share_the_batches_and_leave_those_of_one(place, recorded):
    path, options = place
    out = path / "shared"
    words = [sys.executable, "-m", "experiments.record", *options, "--temperatures", "0", "0.9", "--out", str(out)]
    shared = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in shared]
    assert [process.returncode for process in shared] == [0, 0], said
    assert sorted(entry.name for entry in out.iterdir()) == ["manifest.json", "trace-0.9.npz", "trace-0.npz"]
    for name in ("trace-0.npz", "trace-0.9.npz"):
        assert_same_trace(out / name, recorded / name)
