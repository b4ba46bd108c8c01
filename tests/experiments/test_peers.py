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

    def run(command, *_, **__):
        ran.append(command)
        return "the text", (SPECULATIVE if "-md" in command else COMPLETION) + "\npeak_kb 4321\n"

    monkeypatch.setattr(engines, "run", run)
    one = LlamaCpp(tmp_path, tmp_path / "t.gguf", tmp_path / "d.gguf", 2, tmp_path / "log", 5.0)
    request = {"text": "Hi", "new": 32, "temperature": 0.0, "seed": 0, "slots": 256}
    found = [one.answer({**request, "mode": mode}) for mode in ("plain", "draft-3", "tree-3")]
    assert found[0] == {"seconds": 1.0, "passes": 32, "count": 32, "text": "the text", "peak_kb": 4321, "base_kb": 0}
    assert found[1].items() >= {"seconds": 1.0, "passes": 13, "count": 33}.items()
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
    with pytest.raises(Failed, match="llama-completion: not within 2 s"):
        one.answer({"text": "Hi", "new": 3, "temperature": 0.0, "seed": 0, "slots": 64, "mode": "plain"})
    process, until = Path("/proc", (tmp_path / "pid").read_text().strip()), time.monotonic() + 5
    while process.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not process.exists(), "it goes on"


def test_the_table_has_ratios_of_neighbours_and_a_row_for_who_failed(monkeypatch, stored):
    monkeypatch.setattr(peers, "device", lambda: "a machine")
    assert agreement("abcd", "abcd") == 1 and agreement(" abxd", "abcd ") == 0.5 and agreement("", "abcd") == 0
    every = peers.contenders_of("bfloat16", "d", "reader@8")
    wanted, rows = [each for each in every if each.peer != "vllm" and each.dtype == "bfloat16"], []
    speeds = {"specdec_jax plain": 30, "specdec_jax survival": 45, "specdec_jax survival, reader@8": 60}
    for name, speed in (speeds | {"transformers plain": 20, "transformers assisted-3": 15}).items():
        text, mode = "sane" if "assisted" in name else "same", name.partition(", ")[0].split()[1]
        row = {"temperature": 0.0, "name": name, "dtype": "bfloat16", "peer": name.split()[0], "mode": mode}
        row |= {"num_emitted_tokens": 64, "seconds": 64 / speed, "passes": 32, "peak_kb": 5e5, "base_kb": 3e5}
        rows += [row | {"text": text, "prompt_id": prompt} for prompt in ("a", "b")]
    config = SimpleNamespace(target="t", drafter="d", max_new_tokens=64, dtype="bfloat16", temperatures=(0.0,))
    failed = {"llama.cpp plain, bfloat16": "does not compile: no | compiler"}
    stored("peers.md", report(config, rows, wanted, failed, [10**8, 10**7]), units=1.5)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_and_lists_who_failed(tmp_path, monkeypatch, smollm2):
    asked = []

    def start(self, contender):
        def answer(request):
            asked.append(request["mode"])
            if request["mode"] == "assisted-5":
                raise Failed("no answer in 300 s")
            return {"tokens": request["ids"][:4], "seconds": 0.1, "passes": 3, "peak_kb": 1, "base_kb": 0}

        return SimpleNamespace(answer=answer, close=lambda: None)

    monkeypatch.setattr(peers.Sides, "_start", start)
    monkeypatch.setattr(peers, "export", lambda *_: {})
    out = tmp_path / "run"
    options = ["--only", "transformers", "--limit", "1", "--temperatures", "0", "--out", str(out)]
    assert peers.main(options) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    wanted = [one for one in peers.contenders_of("bfloat16") if one.peer in ("specdec_jax", "transformers")]
    assert len(rows) == len(wanted) - 2 and all(row["num_emitted_tokens"] == 4 for row in rows)
    failed = {f"transformers assisted-5, {dtype}": "no answer in 300 s" for dtype in ("bfloat16", "float32")}
    assert json.loads((out / "failed.json").read_text()) == failed
    assert "no answer in 300 s" in (out / "table.md").read_text()
    before = len(asked)
    assert peers.main(options) == 0 and {*asked[before:]} == {"assisted-5"}, "what is known is not decoded again"
