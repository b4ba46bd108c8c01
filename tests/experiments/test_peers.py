"""Sides of experiments.peers: what they answer, how they fail, and what the table makes of it."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import peers
from experiments.lib import engines
from experiments.lib.engines import Failed, LlamaCpp, Process, figures_of
from experiments.peers import agreement, report

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


def test_a_side_answers_a_request_a_line_and_says_why_it_ends_or_takes_too_long(tmp_path):
    def side(seconds=30.0, code=ECHO):
        return Process([sys.executable, "-c", code], tmp_path / "side.log", seconds)

    one = side()
    assert one.answer({"ids": [1, 2, 3], "mode": "plain"})["tokens"] == [3, 2, 1]
    assert one.answer({"ids": [4], "mode": "plain"})["tokens"] == [4]
    with pytest.raises(Failed, match="ended with 3: ValueError: no such mode"):
        one.answer({"ids": [], "mode": "die"})
    slow = side(seconds=0.3)
    with pytest.raises(Failed, match="no answer in 0 s"):
        slow.answer({"ids": [], "mode": "sleep"})
    with pytest.raises(Failed, match="ended with 1: NameError"):
        side(5.0, "nothing")


def test_llama_cpp_is_told_the_request_and_its_reports_are_read(tmp_path, monkeypatch):
    ran = []

    def run(command, seconds):
        ran.append(command)
        said = (SPECULATIVE if "-md" in command else COMPLETION) + "\npeak_kb 4321\n"
        return SimpleNamespace(stdout="the text", stderr=said, returncode=0)

    monkeypatch.setattr(engines, "run_group", run)
    one = LlamaCpp(tmp_path, tmp_path / "t.gguf", tmp_path / "d.gguf", 2, tmp_path / "log", 5.0)
    request = {"text": "Hi", "new": 32, "temperature": 0.0, "seed": 0, "slots": 256}
    plain, draft = (one.answer({**request, "mode": mode}) for mode in ("plain", "draft-3"))
    assert plain["text"] == "the text" and plain["peak_kb"] == 4321
    assert plain.items() >= {"seconds": 1.0, "passes": 32, "count": 32}.items()
    assert draft.items() >= {"seconds": 1.0, "passes": 13, "count": 33}.items()
    one.answer({**request, "mode": "tree-3"})
    plain, draft, tree = ran
    assert str(tmp_path / "llama-speculative") in tree and "--spec-type" not in tree
    assert "-md" not in plain and draft[draft.index("--spec-draft-n-max") + 1] == "3"
    assert all("--ignore-eos" in command and command[command.index("-t") + 1] == "2" for command in ran)
    for kind in ("plain", "draft"):
        with pytest.raises(Failed, match="reported no times"):
            figures_of(kind, "error: no model", 32)


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    program = tmp_path / "llama-completion"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 60 & wait\n")
    program.chmod(0o755)
    one = LlamaCpp(tmp_path, tmp_path / "t", tmp_path / "d", 2, tmp_path / "log", 2.0)
    with pytest.raises(Failed, match="no answer in 2 s"):
        one.answer({"text": "Hi", "new": 3, "temperature": 0.0, "seed": 0, "slots": 64, "mode": "plain"})
    process, until = Path("/proc", (tmp_path / "pid").read_text().strip()), time.monotonic() + 5
    while process.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not process.exists(), "it goes on"


def rows_of(name, mode, speed, text="same"):
    row = {"temperature": 0.0, "name": name, "dtype": "bfloat16", "peer": name.split()[0], "mode": mode, "text": text}
    row |= {"num_emitted_tokens": 64, "seconds": 64 / speed, "passes": 32, "peak_kb": 5e5, "base_kb": 3e5}
    return [row | {"prompt_id": prompt} for prompt in ("a", "b")]


def test_the_table_has_ratios_of_neighbours_and_a_row_for_who_failed():
    assert agreement("abcd", "abcd") == 1 and agreement(" abxd", "abcd ") == 0.5 and agreement("", "abcd") == 0
    every = peers.contenders_of("bfloat16", "d", "reader@8")
    wanted = [one for one in every if one.peer != "vllm" and one.dtype == "bfloat16"]
    rows = rows_of("specdec_jax plain", "plain", 30) + rows_of("specdec_jax survival", "survival", 45)
    rows += rows_of("specdec_jax survival, reader@8", "survival", 60)
    rows += rows_of("transformers plain", "plain", 20)
    rows += rows_of("transformers assisted-3", "assisted-3", 15, text="sane")
    config = SimpleNamespace(target="t", drafter="d", max_new_tokens=64, dtype="bfloat16", temperatures=(0.0,))
    failed = {"llama.cpp plain, bfloat16": "does not compile: no | compiler"}
    table = report(config, rows, wanted, failed, [10**8, 10**7])
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
    assert peers.main(["--only", "lama.cpp"]) == 2
    assert "unknown peer 'lama.cpp'" in capsys.readouterr().err
