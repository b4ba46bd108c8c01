"""Head-room on logs, and advice judged on a published sweep."""

import json

import pytest

from experiments.lib.headroom import main, predictions, read_sweep, sweep_table
from experiments.lib.smoke import made_up_trace
from specdec_jax.metrics.acceptance import expected_tokens
from specdec_jax.replay.trace import save_trace

RATES = {"gsm8k": 0.8, "mtbench": 0.6, "financeqa": 0.4}
FIXED, STEP = 1.2, 0.1


def sweep(path, slow=()):
    """A sweep as SpecBundle has it, whose rounds take FIXED + STEP k passes, on `slow` sets twice as much."""
    benchmarks = {}
    for name, rate in RATES.items():
        results = []
        for steps, topk in ((3, 1), (5, 1), (5, 3), (7, 1)):
            tokens, time = float(expected_tokens(rate, steps)), (FIXED + STEP * steps) * (2 if name in slow else 1)
            plain = {"Name": "plain", "output_throughput": 200.0, "accept_length": 1.0}
            drafter = {"Name": "eagle", "output_throughput": 200 * tokens / time, "accept_length": tokens}
            results.append({"batch_size": 8, "steps": steps, "topk": topk, "metrics": [plain, drafter]})
        benchmarks[name] = {"results": results}
    path.write_text(json.dumps({"target": benchmarks}))
    return path


def test_a_sweep_that_follows_the_law_is_predicted_exactly_and_a_slower_set_is_an_error(tmp_path):
    measured = read_sweep(sweep(tmp_path / "data.json"))
    assert len(measured) == 9  # trees are left out
    here = {entry.drafts: entry for entry in measured if entry.benchmark == "gsm8k"}
    for guessed in predictions(here, [entry for entry in measured if entry.benchmark != "gsm8k"]).values():
        assert {k: here[k].speedup for k in guessed} == pytest.approx(guessed, rel=2e-3)
    table = sweep_table(measured)
    assert "| the measured tokens a round | 0.0 % | 0.0 % | 0.00 % | 0.0 % | 3 |" in table
    always = next(line for line in table.splitlines() if "always 7" in line)
    assert "0.00 %" not in always  # the best length differs between the sets
    table = sweep_table(read_sweep(sweep(tmp_path / "data.json", slow=("mtbench",))))
    line = next(line for line in table.splitlines() if "measured tokens" in line)
    assert float(line.split("|")[3].strip(" %")) > 50


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    log, out = tmp_path / "combined_cnn.jsonl", tmp_path / "out"
    lengths = [[4, 1, 2, 1, 3, 2, 1] * 3, [1, 1, 9, 2] * 4, [2, 2, 1, 5, 1, 1]]
    entries = [{"id": str(i), "acc_eagle": {"acc_len": n}, "acc_ngram": {"acc_len": n}} for i, n in enumerate(lengths)]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    save_trace(tmp_path / "t.npz", made_up_trace(0.7))
    words = [str(log), str(tmp_path / "t.npz"), "--ratios", "0.1", "--slopes", "0.05", "--max-draft-length", "3"]
    assert main([*words, "--out", str(out)]) in (0, None)
    table = (out / "table.md").read_text()
    wanted = "eagle | greedy | all | 3 | c = 0.1 |", "n-gram lookup | greedy | all | 3 | slope 0.05 |", "drafter | "
    assert all(f"| {line}" in table for line in wanted) and (out / "headroom.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["what"] for row in rows if row["group"].startswith("drafter")} >= {"survival", "oracle", "static"}
    assert "survival" not in {row["what"] for row in rows if row["group"].startswith("eagle")}
    assert main(["--sweep", str(log)]) == 2 and "no sweep of SpecBundle" in capsys.readouterr().err
