"""docs/first_generation.md, docs/every_rule.md and docs/training.md are run as a reader would, on tiny models."""

import json
import re
import shlex
from importlib import import_module

import jax
import pytest
from pages import ROOT, blocks, documented_columns
from tiny_pair import write_pair

from experiments.lib.run_folder import read_rows


@pytest.fixture
def models(tmp_path, monkeypatch):
    prompts = tmp_path / "configs" / "prompts" / "demo.jsonl"  # short ones: the tiny target reads 128 tokens
    prompts.parent.mkdir(parents=True)
    texts = ["hello", "why?", "the end", "one two"]
    lines = [{"id": text, "category": text[0], "text": text} for text in texts]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return write_pair(tmp_path)


def test_the_first_generation(models, capsys):
    code = "\n".join(blocks("first_generation.md", "python"))
    assert code.count('"smollm2", "smollm2-drafter"') == 1
    code = code.replace(
        '"smollm2", "smollm2-drafter"',
        f'{models[0]!r}, {models[1]!r}, dtype="float32", policy=sd.stopping.static(draft_length=3)',
    )
    exec(compile(code, "first_generation.md", "exec"), seen := {})
    assert re.search(r"\d\.\d\d times plain decoding", capsys.readouterr().out)
    assert seen["seen"]["num_draft_tokens"] > seen["seen"]["num_accepted_tokens"] > 0, "else the page shows nothing"
    shares = {"num_drafts", "num_draft_tokens"}  # follow from others
    text = (ROOT / "docs" / "first_generation.md").read_text(encoding="utf-8")
    assert [name for name in {*seen["seen"]} - shares if name not in text] == []


def test_every_rule_on_one_recording(models, capsys):
    pytest.importorskip("pandas")
    commands = [shlex.split(line[2:]) for line in blocks("every_rule.md", "console")[0].splitlines()]
    short = ["--target", models[0], "--drafter", models[1], "--max-new-tokens", "24", "--no-chat"]
    for command, more in zip(commands, [[*short, "--dtype", "float32"], []], strict=True):
        assert command[:2] == ["python", "-m"]
        assert import_module(command[2]).main([*command[3:], *more]) == 0
    exec(compile("\n".join(blocks("every_rule.md", "python")), "every_rule.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"lambda 0\.\d\d: \d\.\d\d times plain decoding, \d\.\d\d tokens a pass", out)
    assert "adaedl-keep" in out and "0.7" in out, "the table by rule and temperature"
    columns = documented_columns("Replays (`policies`")
    assert all(columns == {*row} for row in read_rows("runs/demo-rules"))


@pytest.mark.seldom
def test_sampling_in_a_training_loop(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("training.md", "python"))
    assert code.count("STEPS = 32, 24, 64, 300") == 1
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python numbers
        exec(compile(code.replace("64, 300", "8, 3"), "training.md", "exec"), seen := {})
    assert len(seen["curves"]) == 2 and capsys.readouterr().out.count("of drafts accepted at the end") == 2
    assert seen["step"]._cache_size() == 3, "refreshed parameters compiled"
    assert (tmp_path / "drift.png").stat().st_size > 10_000
