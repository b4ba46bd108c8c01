"""Advice: the best length and its interval, costs in words, tables, thresholds and options to paste."""

import json
import shlex

import numpy as np
import pytest
from engine_logs import aiperf

from experiments.lib.smoke import made_up_trace
from specdec_jax.app.cli import main
from specdec_jax.contrib.engine_logs import advise, costs_named, engine_options, log_of_trace, read_log
from specdec_jax.contrib.engine_logs.advice import best_threshold, schedule, static_rounds
from specdec_jax.contrib.engine_logs.published import H100, SPECBUNDLE
from specdec_jax.contrib.engine_logs.rounds import write_lines
from specdec_jax.costs.cost_model import cost_model, save_cost_model
from specdec_jax.replay.replay import oracle, replay
from specdec_jax.replay.trace import save_trace
from specdec_jax.stopping import hf_confidence, static


def test_lengths_and_oracle_are_those_of_a_replay():
    trace, costs = made_up_trace(), costs_named("0.07,0.02")
    advice = advise(log_of_trace(trace), costs, 6)
    played = replay(trace._replace(limit=trace.length), static(), {"draft_length": np.arange(7)}, max_draft_length=6)
    speedups = [choice.speedup.estimate for choice in advice.lengths]
    np.testing.assert_allclose(speedups, played.total_speedup(costs))
    assert speedups[0] == 1 and advice.best.setting == int(np.argmax(speedups))
    np.testing.assert_allclose(advice.oracle.estimate, oracle(trace, 6).total_speedup(costs)[0])
    assert advice.best.speedup.low < advice.best.speedup.estimate < advice.best.speedup.high
    assert advice.best.setting in advice.as_good and advice.verdict == "speculate"
    rounds = static_rounds(trace, int(advice.best.setting))
    assert [len(steps.drafted) for steps in rounds] == played.rounds[int(advice.best.setting)].tolist()
    full = [a for s in rounds for d, a in zip(s.drafted, s.accepted, strict=True) if d == advice.best.setting]
    shares = [np.mean(np.array(full) > place) for place in range(int(advice.best.setting))]
    np.testing.assert_allclose(advice.curve, shares)  # unconditional, of rounds that no end cut short
    assert 0 < shares[-1] < shares[0] < 1 and len(full) < sum(len(steps.drafted) for steps in rounds)


def test_open_positions_are_no_reason_to_draft_more(tmp_path):
    """Length 8 has the highest estimate, from accepted drafts that the log does not show."""
    write_lines(tmp_path / "log.jsonl", [{"per_step_drafted": [5, 5, 5], "per_step_accepted": [5, 2, 0]}] * 4)
    advice, none = (advise(read_log(tmp_path / "log.jsonl"), costs_named(words), 16) for words in ("0.33,0.01", "3"))
    assert max(advice.lengths, key=lambda choice: choice.speedup.estimate).setting == 8
    assert advice.best.setting == 5 and advice.best.speedup.low == advice.best.speedup.high and none.best.setting == 0
    assert advice.as_good == [*range(4, 17)]


def test_costs_in_words(tmp_path):
    two = costs_named("0.1,0.02", 4, 3)
    np.testing.assert_allclose([two.ratio * two.plain_pass, *two.pass_times(3)], [0.1, 1.06, 1.14, 1.22, 1.30])
    h100 = costs_named(H100, 16)
    assert h100.batch == 16 and h100.widths[-1] == 6 and 1.2 < h100.verification_times(5)[5] < 1.6
    for name in SPECBUNDLE:
        costs = costs_named(name)
        times = costs.pass_times(7) + np.arange(8) * costs.drafter_step
        np.testing.assert_allclose(times[[0, 7]], [1, SPECBUNDLE[name].fixed + 7 * SPECBUNDLE[name].step])
    save_cost_model(tmp_path / "c.json", cost_model(1.0, {1: 10.0, 8: 12.0}, batch=2))
    assert costs_named(str(tmp_path / "c.json")).batch == 2
    for words, batch, says in (
        ("-0.1", None, "got '-0.1'"),
        ("0.1,2,3", None, "got '0.1,2,3'"),
        ("llama-3.1-8b", None, "no costs 'llama-3.1-8b'"),
        (str(tmp_path / "c.json"), 4, "batch of 2, got 4"),
        ("kimi-k2-eagle3-sglang", 1, "batch of 8, got 1"),
    ):
        with pytest.raises(ValueError, match=says):
            costs_named(words, batch)
    with pytest.raises(FileNotFoundError, match="no cost model"):
        costs_named(str(tmp_path / "none.json"))


def test_a_table_by_batch_covers_every_batch_once():
    log = log_of_trace(made_up_trace())
    advices = [advise(log, costs_named("0.05,0.03", batch), 8) for batch in (1, 4, 64, 512)]
    lengths = [int(advice.best.setting) for advice in advices]
    assert lengths[0] > lengths[-1] == 0  # wider batches pay for every token
    table = schedule(advices)
    assert table[0][0] == 1 and table[-1][1:] == [512, 0]
    assert all(one[1] + 1 == other[0] and one[2] != other[2] for one, other in zip(table, table[1:], strict=False))
    for advice in advices:
        assert [k for first, last, k in table if first <= advice.batch <= last] == [advice.best.setting]
    words = shlex.split(engine_options(lengths[0], table)["vLLM"])[1]
    assert json.loads(words) == {"num_speculative_tokens": lengths[0], "num_speculative_tokens_per_batch_size": table}


def test_a_threshold_is_judged_on_texts_that_did_not_choose_it():
    trace, costs = made_up_trace(texts=20), costs_named("0.2")
    choice = best_threshold(trace, costs, hf_confidence(refit=False), 8)
    played = replay(trace, hf_confidence(refit=False), {"threshold": choice.setting}, max_draft_length=8)
    assert choice.speedup.estimate <= played.total_speedup(costs)[0] + 1e-9  # the best of all for all
    with pytest.raises(ValueError, match="one text is too few"):
        best_threshold(made_up_trace(texts=1), costs, hf_confidence(refit=False), 8)


def test_the_command(tmp_path, capsys):
    save_trace(tmp_path / "t.npz", made_up_trace())
    report = tmp_path / "advice.json"
    options = ["--costs", "0.05,0.03", "--batch-sizes", "1", "512", "--json", str(report)]
    assert main(["advise", str(tmp_path / "t.npz"), *options]) == 0
    page, numbers = " ".join(capsys.readouterr().out.split()), json.loads(report.read_text())
    assert "not at a batch of 512." in page and "--speculative-config '{" in page and "Thresholds" in page
    assert [advice["batch"] for advice in numbers["advice"]] == [1, 512]
    rates = [round(rate, 4) for rate in numbers["advice"][0]["curve"]]
    assert f'"synthetic_acceptance_rates": {json.dumps(rates)}}}' in page
    assert f"llama.cpp: --spec-draft-n-max {len(rates)} --spec-synth-rates {','.join(map(str, rates))}" in page
    write_lines(tmp_path / "steps.jsonl", map(aiperf, static_rounds(made_up_trace(), 3)))
    assert "?" not in page and main(["advise", str(tmp_path / "steps.jsonl"), "--costs", "0.01"]) == 0
    page = capsys.readouterr().out
    assert [f"?{length} " in page for length in range(1, 8)] == [length > 3 for length in range(1, 8)]
    assert "? longer than any draft of the log (3 tokens): extrapolated" in page and "* intervals reach" in page
    assert main(["advise", str(tmp_path / "t.npz"), "--costs", "3"]) == 1
    assert "Do not speculate" in capsys.readouterr().out and engine_options(0) == {}
    for words in ("--costs much", "--max-draft-length 0", "--costs 0.1 0.2", "--drafter x", "--batch-sizes 0"):
        assert main(["advise", str(tmp_path / "t.npz"), *words.split()]) == 2
        assert capsys.readouterr().err.startswith("error: ")
