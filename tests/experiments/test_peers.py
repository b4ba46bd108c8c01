"""Sides of experiments.peers: what they answer, how they fail, and what the table makes of it."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import peers
from experiments.lib import peer_processes
from experiments.lib.peer_processes import Failed, LlamaCpp, Process, plain_figures, speculative_figures
from experiments.lib.peer_report import agreement, report

ECHO = """
import json, sys, time
print("a library says something")
print(json.dumps({"ready": "echo"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["mode"] == "die":
        print("ValueError: no such mode", file=sys.stderr)
        sys.exit(3)
    if request["mode"] == "sleep":
        time.sleep(60)
    figures = {"seconds": 0.5, "passes": 2, "peak_kb": 1000, "base_kb": 0}
    print(json.dumps({"tokens": request["ids"][::-1], **figures}), flush=True)
"""
COMPLETION = """
common_perf_print: prompt eval time =     200.00 ms /    11 tokens (   18.18 ms per token,    55.00 tokens per second)
common_perf_print:        eval time =     800.00 ms /    31 runs   (   25.81 ms per token,    38.75 tokens per second)
"""
SPECULATIVE = """
encoded   11 tokens in    0.250 seconds, speed:   44.000 t/s
decoded   33 tokens in    0.750 seconds, speed:   44.000 t/s
n_draft   = 3
n_predict = 33
n_drafted = 40
n_accept  = 20
"""


def side(tmp_path, seconds=30.0):
    return Process([sys.executable, "-c", ECHO], tmp_path / "side.log", seconds)


def test_a_side_answers_a_request_a_line(tmp_path):
    one = side(tmp_path)
    assert one.answer({"ids": [1, 2, 3], "mode": "plain"})["tokens"] == [3, 2, 1]
    assert one.answer({"ids": [4], "mode": "plain"})["tokens"] == [4]
    one.close()


def test_a_side_that_ends_or_takes_too_long_says_why(tmp_path):
    with pytest.raises(Failed, match="ended with 3: ValueError: no such mode"):
        side(tmp_path).answer({"ids": [], "mode": "die"})
    slow = side(tmp_path, seconds=0.3)
    with pytest.raises(Failed, match="no answer in 0 s"):
        slow.answer({"ids": [], "mode": "sleep"})
    with pytest.raises(Failed, match="ended with 1: NameError"):
        Process([sys.executable, "-c", "nothing"], tmp_path / "side.log", 5.0)


def test_llama_cpps_reports_are_read():
    assert plain_figures(COMPLETION, 32) == {"seconds": 1.0, "passes": 32, "count": 32}
    assert speculative_figures(SPECULATIVE, 32) == {"seconds": 1.0, "passes": 13, "count": 33}
    for read in (plain_figures, speculative_figures):
        with pytest.raises(Failed, match="reported no times"):
            read("error: no model", 32)


def test_llama_cpp_is_told_the_request(tmp_path, monkeypatch):
    ran = []

    def run(command, seconds):
        ran.append(command)
        said = (SPECULATIVE if "-md" in command else COMPLETION) + "\npeak_kb 4321\n"
        return SimpleNamespace(stdout="the text", stderr=said, returncode=0)

    monkeypatch.setattr(peer_processes, "run_group", run)
    one = LlamaCpp(tmp_path, tmp_path / "t.gguf", tmp_path / "d.gguf", 2, tmp_path / "log", 5.0)
    request = {"text": "Hi", "new": 32, "temperature": 0.0, "seed": 0, "slots": 256}
    answer = one.answer({**request, "mode": "plain"})
    assert answer["text"] == "the text" and answer["peak_kb"] == 4321
    assert one.answer({**request, "mode": "draft-3"})["count"] == 33
    plain, draft = ran
    assert "-md" not in plain and draft[draft.index("--spec-draft-n-max") + 1] == "3"
    assert all("--ignore-eos" in command and command[command.index("-t") + 1] == "2" for command in ran)


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    program = tmp_path / "llama-completion"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 60 & wait\n")
    program.chmod(0o755)
    one = LlamaCpp(tmp_path, tmp_path / "t", tmp_path / "d", 2, tmp_path / "log", 2.0)
    with pytest.raises(Failed, match="no answer in 2 s"):
        one.answer({"text": "Hi", "new": 3, "temperature": 0.0, "seed": 0, "slots": 64, "mode": "plain"})
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail("it goes on")


def test_agreement_is_the_share_before_the_first_difference():
    assert agreement("abcd", "abcd") == 1 and agreement(" abxd", "abcd ") == 0.5 and agreement("", "abcd") == 0


def rows_of(name, peer, mode, speed, text="same"):
    return [
        {
            "prompt_id": prompt, "temperature": 0.0, "name": name, "dtype": "bfloat16", "peer": peer, "mode": mode,
            "num_emitted_tokens": 64, "seconds": 64 / speed, "passes": 32, "peak_kb": 5e5, "base_kb": 3e5, "text": text,
        }
        for prompt in ("a", "b")
    ]  # fmt: skip


def test_the_table_has_ratios_of_neighbours_and_a_row_for_who_failed():
    every = peers.contenders_of("bfloat16", "d", "reader@8")
    wanted = [one for one in every if one.peer != "vllm" and one.dtype == "bfloat16"]
    rows = rows_of("specdec_jax plain", "specdec_jax", "plain", 30) + rows_of(
        "specdec_jax survival", "specdec_jax", "survival", 45
    )
    rows += rows_of("transformers plain", "transformers", "plain", 20)
    rows += rows_of("transformers assisted-3", "transformers", "assisted-3", 15, text="sane")
    rows += rows_of("specdec_jax survival, reader@8", "specdec_jax", "survival", 60)
    config = SimpleNamespace(target="t", drafter="d", max_new_tokens=64, dtype="bfloat16", temperatures=(0.0,))
    table = report(
        config, rows, wanted, {"llama.cpp plain, bfloat16": "does not compile: no | compiler"}, [10**8, 10**7]
    )
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if line.startswith("| ")}
    assert "| 1.50 | 1.00 | 0.50 | 100% | 500 | 1.8 |" in lines["specdec_jax survival"]
    assert "| 2.00 | 0.75 | 0.50 |" in lines["specdec_jax survival, reader@8"]
    assert "| 1.00 | 1.50 |" in lines["transformers plain"]
    assert "| 0.75 | 3.00 | 0.50 | 50% |" in lines["transformers assisted-3"]
    assert "does not compile: no / compiler" in lines["llama.cpp plain"] and "not run" in lines["llama.cpp draft-2"]


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_and_lists_who_failed(tmp_path, monkeypatch, capsys, smollm2):
    asked = []

    class Fake:
        def __init__(self, contender):
            self.contender = contender

        def answer(self, request):
            asked.append((self.contender.name, request["mode"]))
            if request["mode"] == "assisted-5":
                raise Failed("no answer in 300 s")
            return {"tokens": request["ids"][:4], "seconds": 0.1, "passes": 3, "peak_kb": 1, "base_kb": 0}

        def close(self):
            pass

    monkeypatch.setattr(peers.Sides, "_start", lambda self, contender: Fake(contender))
    monkeypatch.setattr(peers, "export", lambda *_: {})
    out = tmp_path / "run"
    options = ["--only", "transformers", "--limit", "1", "--temperatures", "0", "--out", str(out)]
    assert peers.main(options) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    wanted = [one for one in peers.contenders_of("bfloat16") if one.peer in ("specdec_jax", "transformers")]
    assert len(rows) == len(wanted) - 2 and all(row["num_emitted_tokens"] == 4 for row in rows)
    assert json.loads((out / "failed.json").read_text()) == {
        f"transformers assisted-5, {dtype}": "no answer in 300 s" for dtype in ("bfloat16", "float32")
    }
    assert "no answer in 300 s" in (out / "table.md").read_text()
    before = len(asked)
    assert peers.main(options) == 0
    assert {mode for _, mode in asked[before:]} == {"assisted-5"}, "what is known is not decoded again"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        peers.main(["--only", "lama.cpp"])
    assert "unknown peer 'lama.cpp'" in capsys.readouterr().err
