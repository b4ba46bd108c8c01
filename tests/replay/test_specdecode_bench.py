"""Logs of accepted lengths: rules that decide by lengths are replayed, others are refused."""

import json

import numpy as np
import pytest

from experiments.lib.rules import rule
from experiments.policies import main, replays_lengths
from specdec_jax.costs.cost_model import flat
from specdec_jax.metrics.foresight import with_foresight
from specdec_jax.replay.acceptance_log import trace_of_runs
from specdec_jax.replay.readers import load_specdecode_bench
from specdec_jax.replay.replay import oracle, replay
from specdec_jax.stopping import adaedl, goodput, static

LENGTHS = {"a": [4, 1, 2, 1, 3, 2, 1], "b": [1, 1, 9, 2]}  # tokens that a round would emit, the target's own among them


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "combined_gsm8k.jsonl"
    lines = [
        {"id": name, "acc_eagle": {"acc_len": lengths}, "acc_ngram": {"acc_len": [1] * len(lengths)}}
        for name, lengths in LENGTHS.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def walked(lengths, most):
    """(rounds, drafts) of a text by hand, at a fixed draft length."""
    at, rounds, drafted = 0, 0, 0
    while at < len(lengths):
        length = min(most, len(lengths) - at - 1)
        at, rounds, drafted = at + min(lengths[at], length + 1), rounds + 1, drafted + length
    return rounds, drafted


@pytest.mark.parametrize("length", (0, 1, 3))
def test_a_fixed_length_is_replayed_as_by_hand(log, length):
    trace = load_specdecode_bench(log)
    found = replay(trace, static(), {"draft_length": length})
    for text, lengths in enumerate(LENGTHS.values()):
        assert (found.rounds[0, text], found.drafted[0, text]) == walked(lengths, length)
    assert found.emitted.sum() == sum(map(len, LENGTHS.values()))
    assert load_specdecode_bench(log, "acc_ngram").run.max() == 0


def test_the_oracle_drafts_what_is_accepted(log):
    found = oracle(load_specdecode_bench(log))
    assert (found.rounds[0].tolist(), found.drafted[0].tolist()) == ([2, 3], [5, 1])


def test_rules_that_read_distributions_are_refused(log):
    trace = load_specdecode_bench(log)
    with pytest.raises(ValueError, match=r"reads the drafter's distributions \(entropy\)"):
        replay(trace, adaedl())
    with pytest.raises(ValueError, match="lengths only"):
        with_foresight(trace, flat(0.1, 8))
    assert replay(trace, goodput()).rounds.min() > 0
    assert replays_lengths(rule("static")) and not replays_lengths(rule("survival"))


def test_the_command_compares_the_rules_that_go_by_lengths(log, tmp_path):
    assert main([str(log), "--ratio", "0.1", "--max-draft-length", "3", "--out", str(tmp_path / "out")]) in (0, None)
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| goodput |" in table and "adaedl" not in table and "| oracle |" in table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"id": "1"}', ":1: no record of SpecDecode-Bench (KeyError: 'acc_eagle')"),
        ("no json", ":1: not JSON"),
        ('{"id": "1", "acc_eagle": {"acc_len": [1, 0]}}', "lengths of 1 or more"),
        ('{"id": "1", "acc_eagle": {"acc_len": []}}', "lengths of 1 or more"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, text, says):
    path = tmp_path / "log.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ValueError) as error:
        load_specdecode_bench(path)
    assert says in str(error.value) and str(path) in str(error.value)
    with pytest.raises(FileNotFoundError, match="no acceptance log"):
        load_specdecode_bench(tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match="every text at least one position"):
        trace_of_runs([[1], []], {})


def test_a_folder_of_logs_is_one_trace(log):
    log.with_name("combined_cnn.jsonl").write_text(log.read_text())
    trace = load_specdecode_bench(log.parent)
    assert trace.num_texts == 2 * len(LENGTHS) and trace.about["tasks"] == ["cnn"] * 2 + ["gsm8k"] * 2
    with pytest.raises(FileNotFoundError, match="no acceptance log"):
        load_specdecode_bench(log.parent / "..")


def test_nothing_is_accepted_beyond_the_end_of_a_text():
    np.testing.assert_array_equal(trace_of_runs([[9, 9, 0], [2]], {}).run, [[3, 2, 0, 0], [1, 0, 0, 0]])
