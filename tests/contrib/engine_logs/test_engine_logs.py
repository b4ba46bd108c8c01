"""Logs of other engines: our traces degraded to each format and read back, and the advice that comes of them."""

import json
import shlex
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from refusals import stored_refusals

from experiments.lib.rules import rule
from experiments.lib.smoke import made_up_trace
from experiments.policies import main as policies_main
from experiments.policies import replays_lengths
from specdec_jax.app.cli import main
from specdec_jax.contrib.engine_logs import advise, costs_named, engine_options, log_of_trace, read_log
from specdec_jax.contrib.engine_logs.advice import best_threshold, schedule, static_rounds
from specdec_jax.contrib.engine_logs.published import H100, SPECBUNDLE
from specdec_jax.contrib.engine_logs.readers import load_aiperf, load_specdecode_bench
from specdec_jax.contrib.engine_logs.rounds import ACCEPTED, OPEN, REJECTED, Steps, log_of_steps, trace_of_runs
from specdec_jax.costs.cost_model import cost_model, flat, save_cost_model
from specdec_jax.metrics.foresight import with_foresight
from specdec_jax.replay.replay import oracle, replay
from specdec_jax.replay.trace import save_trace
from specdec_jax.stopping import adaedl, goodput, hf_confidence, hf_heuristic, static
from specdec_jax.text.json_lines import json_text


def write_lines(path, entries):
    path.write_text("".join(json_text(entry) + "\n" for entry in entries))


def aiperf(steps):
    """AIPerf's acceptance record; an answer's first token comes from prefill."""
    sums = {"num_accepted_draft_tokens": sum(steps.accepted), "num_draft_tokens": sum(steps.drafted)}
    rounds = {"per_step_accepted": list(steps.accepted), "per_step_drafted": list(steps.drafted)}
    return {"id": steps.id, "completion_tokens": steps.emitted + 1} | sums | rounds


def spec_bench(steps):
    """An answer of Spec-Bench: tokens emitted by every round, of which the last may have been cut."""
    emitted = [count + 1 for count in steps.accepted]
    emitted[-1] -= sum(emitted) - steps.emitted
    return {"question_id": steps.id, "category": steps.task, "choices": [{"accept_lengths": emitted}]}


def test_lengths_and_oracle_are_those_of_a_replay():
    trace, costs = made_up_trace(), costs_named("0.07,0.02")
    advice = advise(log_of_trace(trace), costs, 6)
    played = replay(trace._replace(limit=trace.length), static(), {"draft_length": np.arange(7)}, max_draft_length=6)
    speedups = [choice.speedup.estimate for choice in advice.lengths]
    np.testing.assert_allclose(speedups, played.total_speedup(costs))
    slow = costs._replace(target_pass=tuple(2 * time for time in costs.target_pass))  # rounds, not plain decoding
    assert [choice.speedup.estimate for choice in advise(log_of_trace(trace), slow, 1).lengths][0] == 1
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
        (str(tmp_path / "c.json"), 4, "batch of 2, got 4"),
        ("kimi-k2-eagle3-sglang", 1, "batch of 8, got 1"),
    ):
        with pytest.raises(ValueError, match=says):
            costs_named(words, batch)


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


COSTS = costs_named("0.1,0.01")


def whole(trace):
    return advise(log_of_trace(trace), COSTS, 8)


def vllm(steps):
    """A response of vLLM: the block sits beside other things."""
    block = {name: value for name, value in aiperf(steps).items() if name != "id"}
    return {"choices": [{"text": "..."}], "metrics": {"time_to_first_token_ms": 3.0, "speculative_decoding": block}}


WRITERS = {"aiperf.jsonl": aiperf, "vllm.jsonl": vllm, "spec_bench.jsonl": spec_bench}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("drafted", (3, 5))
def test_a_degraded_trace_bounds_what_the_whole_one_says(tmp_path, name, drafted):
    """Exact where k + 1 divides the log's, and the truth within the bounds for every other length."""
    trace = made_up_trace(0.0, texts=30)
    write_lines(tmp_path / name, [WRITERS[name](steps) for steps in static_rounds(trace, drafted)])
    log, truth = read_log(tmp_path / name), whole(trace)
    assert 0 < log.num_open < trace.num_positions and not log.exact
    found, bounds = advise(log, COSTS, 8), [whole(each) for each in (log.low, log.high)]
    for length, choice in enumerate(truth.lengths):
        low, high = (each.lengths[length].speedup.estimate for each in bounds)
        exact = choice.speedup.estimate
        assert low - 1e-9 <= exact <= high + 1e-9
        aligned = (drafted + 1) % (length + 1) == 0
        assert (high - low < 1e-9) == aligned, (length, low, high)
        assert found.lengths[length].speedup.low <= exact <= found.lengths[length].speedup.high
    assert abs(found.lengths[4].speedup.estimate / truth.lengths[4].speedup.estimate - 1) < 0.03


def test_a_report_of_dflash_is_read_as_answers_of_spec_bench(tmp_path):
    steps = static_rounds(made_up_trace(0.0, texts=4), 3)
    answers = [spec_bench(each._replace(id=f"toys-{number}", task="toys")) for number, each in enumerate(steps, 1)]
    samples = [{"acceptance_lengths": answer["choices"][0]["accept_lengths"]} for answer in answers]
    (tmp_path / "report.json").write_text(json.dumps({"config": {"dataset": "toys"}, "per_sample": samples}))
    write_lines(tmp_path / "answers.jsonl", answers)
    log, wanted = (read_log(tmp_path / name) for name in ("report.json", "answers.jsonl"))
    assert log.num_open == wanted.num_open and log.likely.about["ids"] == wanted.likely.about["ids"]
    assert log.likely.about["drafter"] == "block" and set(log.likely.about["tasks"]) == {"toys"}
    np.testing.assert_array_equal(log.low.run, wanted.low.run)
    (tmp_path / "report.json").write_text('{"per_sample": []}')
    with pytest.raises(ValueError, match=r"report.json: no report of DFlash \(KeyError: 'config'\)"):
        read_log(tmp_path / "report.json")


def test_every_decided_position_is_the_traces(tmp_path):
    trace = made_up_trace(1.0)
    played = replay(trace, hf_heuristic(), record=True, max_draft_length=6)
    path = tmp_path / "log.jsonl"
    lines = zip(played.record[0], trace.about["ids"], trace.length.tolist(), strict=True)
    steps = [Steps(*rounds[rounds[:, 2] >= 0, :2].T.tolist(), length, name) for rounds, name, length in lines]
    write_lines(path, map(aiperf, steps))
    log = load_aiperf(path)
    assert log.about["ids"] == trace.about["ids"]
    for bits, accepted, length in zip(log.bits, trace.accepted, trace.length, strict=True):
        assert len(bits) == length and set(bits.tolist()) == {ACCEPTED, REJECTED, OPEN}
        known = bits != OPEN
        np.testing.assert_array_equal(bits[known] == ACCEPTED, accepted[:length][known])
    # With the open positions answered as the trace has them, any rule by lengths makes the trace's own rounds.
    pairs = zip(log.bits, trace.accepted, strict=True)
    answered = [np.where(bits == OPEN, row[: len(bits)], bits) for bits, row in pairs]
    again = log._replace(bits=answered).filled()
    for policy in (static(), goodput(), hf_heuristic()):
        one, other = (replay(each, policy, max_draft_length=6) for each in (again, trace._replace(limit=trace.length)))
        np.testing.assert_array_equal(one.rounds, other.rounds)


def test_by_hand():
    """Two of two, and the bonus is open; one of two; none of none; two of two, whose bonus a stop cut off."""
    log = log_of_steps([Steps([2, 2, 0, 2], [2, 1, 0, 2], 8)], {})
    assert log.bits[0].tolist() == [1, 1, -1, 1, 0, -1, 1, 1]
    assert log.filled(REJECTED).run[0, :8].tolist() == [2, 1, 0, 1, 0, 0, 2, 1]
    assert log.filled(ACCEPTED).run[0, :8].tolist() == [4, 3, 2, 1, 0, 3, 2, 1]
    assert log.chance == 2 / 3  # of three rounds that came to their last draft
    np.testing.assert_array_equal(trace_of_runs([[9, 9, 0], [2]], {}).run, [[3, 2, 0, 0], [1, 0, 0, 0]])


def test_a_histogram_is_read_where_all_drafts_have_one_length(tmp_path):
    block = {"acceptance_histogram": [2, 1, 0, 1], "num_spec_tokens": 3, "num_draft_tokens": 12}
    path = tmp_path / "summary.jsonl"
    write_lines(path, [{"metrics": {"speculative_decoding": block | {"num_accepted_draft_tokens": 4}}}])
    log = read_log(path)
    assert log.likely.length.tolist() == [8] and log.num_open == 1 and "no order" in log.notes[0]
    write_lines(path, [block | {"num_draft_tokens": 11}])
    with pytest.raises(ValueError, match=r"summary\.jsonl:1: .*draft lengths vary"):
        read_log(path)


def test_parquet(tmp_path):
    trace = made_up_trace()
    rows = [{"request": steps.id, "metrics": json.dumps(vllm(steps)["metrics"])} for steps in static_rounds(trace, 4)]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:5]), tmp_path / "part-0.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows[5:]), tmp_path / "part-1.parquet")
    np.testing.assert_array_equal(read_log(tmp_path).likely.length, trace.length)


def test_without_pyarrow_a_table_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"pip install 'specdec-jax\[parquet\]'"):
        read_log(tmp_path / "t.parquet")


test_what_is_no_log_is_refused_by_name = stored_refusals("engine_logs", lambda path: read_log(path), "log.jsonl")


def test_a_draft_length_says_whether_the_last_round_was_cut(tmp_path):
    write_lines(tmp_path / "a.jsonl", [spec_bench(Steps([5], [3], 4))])
    assert read_log(tmp_path / "a.jsonl", draft_length=5).num_open == 0
    assert read_log(tmp_path / "a.jsonl").num_open == 1
    with pytest.raises(ValueError, match="rounds of 1 to 3 tokens"):
        read_log(tmp_path / "a.jsonl", draft_length=2)


LENGTHS = {"a": [4, 1, 2, 1, 3, 2, 1], "b": [1, 1, 9, 2]}  # tokens that a round would emit, the target's own among them


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "combined_gsm8k.jsonl"
    both = {name: ({"acc_len": each}, {"acc_len": [1] * len(each)}) for name, each in LENGTHS.items()}
    lines = [{"id": name, "acc_eagle": eagle, "acc_ngram": ngram} for name, (eagle, ngram) in both.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("length", (0, 1, 3))
def test_a_fixed_length_is_replayed_as_by_hand(log, length):
    trace = load_specdecode_bench(log)
    found = replay(trace, static(), {"draft_length": length})
    for text, lengths in enumerate(LENGTHS.values()):
        at, rounds, drafted = 0, 0, 0
        while at < len(lengths):
            drafts = min(length, len(lengths) - at - 1)
            at, rounds, drafted = at + min(lengths[at], drafts + 1), rounds + 1, drafted + drafts
        assert (found.rounds[0, text], found.drafted[0, text]) == (rounds, drafted)
    assert found.emitted.sum() == sum(map(len, LENGTHS.values()))
    assert load_specdecode_bench(log, "acc_ngram").run.max() == 0


def test_rules_that_read_distributions_are_refused(log):
    trace = load_specdecode_bench(log)
    with pytest.raises(ValueError, match=r"reads the drafter's distributions \(entropy\)"):
        replay(trace, adaedl())
    with pytest.raises(ValueError, match="lengths only"):
        with_foresight(trace, flat(0.1, 8))
    assert replay(trace, goodput()).rounds.min() > 0
    assert replays_lengths(rule("static")) and not replays_lengths(rule("survival"))


def test_the_command_compares_the_rules_that_go_by_lengths(log, tmp_path):
    words = ["--ratio", "0.1", "--max-draft-length", "3", "--out", str(tmp_path / "out")]
    assert policies_main([str(log), *words]) in (0, None)
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| goodput |" in table and "adaedl" not in table and "| oracle |" in table


def test_a_folder_of_logs_is_one_trace(log):
    log.with_name("combined_cnn.jsonl").write_text(log.read_text())
    trace = load_specdecode_bench(log.parent)
    assert trace.num_texts == 2 * len(LENGTHS) and trace.about["tasks"] == ["cnn"] * 2 + ["gsm8k"] * 2
    with pytest.raises(FileNotFoundError, match="no acceptance log"):
        load_specdecode_bench(log.parent / "..")
    with pytest.raises(ValueError, match="every text at least one position"):
        trace_of_runs([[1], []], {})
