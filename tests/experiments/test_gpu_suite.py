"""The GPU's suite on a CPU: it measures, goes on inside a part, and reads profiles by the parts of a round."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax

from experiments import gpu_suite
from specdec_jax.text.strategies import choose


def test_the_suite_measures_and_goes_on_inside_a_part(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--smoke", "--max-new-tokens", "8", "--batches", "2", "--repeats", "2", "--out", str(out), "--only"]
    assert gpu_suite.main([*options, "bandwidth", "graph", "profile", "smollm2", "trees"]) == 0
    lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    times = {(row["part"], row["what"], row["temperature"]): row["figures"] for row in rows}
    assert times["bandwidth", "copy", None]["GB/s"] > 0
    assert times["graph", "without graphs", 0.7]["the same tokens"] == 1
    kernels = {what: figures for (part, what, at), figures in times.items() if (part, at) == ("profile", 0.7)}
    assert {"draft step", "draft feed", "commit"} < kernels.keys() and any("verify" in name for name in kernels)
    assert kernels["draft step"]["kernels a round"] > 10 and kernels["commit"]["µs a round"] > 0
    for part, rule in (("smollm2", gpu_suite.PRICE), ("trees", "survival_tree(siblings=3)")):
        assert rule in (out / part / "table.md").read_text()
    del lines[max(index for index, row in enumerate(rows) if row["part"] == "graph")]  # as if it was stopped before
    (out / "results.jsonl").write_text("".join(lines))
    assert gpu_suite.main([*options, "bandwidth", "graph"]) == 0
    assert (out / "results.jsonl").read_text().splitlines(keepends=True)[:-1] == lines
    assert gpu_suite.main(["--out", str(tmp_path / "real")]) == 2
    assert "there is no accelerator here" in capsys.readouterr().err


def test_a_part_by_batch_has_its_pair_and_rules_that_exist(tmp_path, monkeypatch):
    passed = {}
    monkeypatch.setattr(gpu_suite, "batches", lambda config, console: passed.update({Path(config.out).name: config}))
    parts = ["smollm2", "coder", "coder-smollm2", "coder-reading", "trees", "block"]
    assert gpu_suite.main(["--smoke", "--batches", "16", "64", "--out", str(tmp_path), "--only", *parts]) == 0
    assert list(passed) == parts and all(config.batches == (16, 64) for config in passed.values())
    assert [config.target == gpu_suite.CODER for config in passed.values()] == ["coder" in part for part in parts]
    assert len({(config.target, config.drafter) for config in passed.values()}) == 5  # trees have smollm2's
    assert all(choose("policy", words) for config in passed.values() for words in config.policies)
    monkeypatch.setattr(gpu_suite, "batches", mock.Mock(side_effect=FileNotFoundError("no such model")))
    assert gpu_suite.main(["--smoke", "--batches", "16", "64", "--out", str(tmp_path), "--only", "coder"]) == 2


def test_kernels_of_a_profile_are_the_devices_own_and_no_loops(monkeypatch):
    def plane(name, *events):
        made = [SimpleNamespace(stats=stats.items(), duration_ns=7.0) for stats in events]
        return SimpleNamespace(name=name, lines=[SimpleNamespace(events=made)])

    dot, branch, other = ({"hlo_module": "jit_run", "hlo_op": name} for name in ("dot.1", "cond.2", "add.3"))
    gpu = plane("/device:GPU:0", dot, branch, other, dot | {"hlo_module": "jit_step"})
    text = """HloModule jit_run, is_scheduled=true
  %dot.1 = f32[8] dot(%a), metadata={op_name="jit(run)/commit/dot"}
  ROOT %cond.2 = (f32[8], s32[]) conditional(%b, %t), metadata={op_name="jit(run)/verify/cond"}"""
    profile = SimpleNamespace(planes=[plane("/host:CPU", dot, {}), gpu])
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda name: profile)
    assert gpu_suite.kernels_of("profile", text) == [("jit(run)/commit/dot", 7), ("", 7)]
    profile.planes.pop()
    assert gpu_suite.kernels_of("profile", text) == [("jit(run)/commit/dot", 7)]
