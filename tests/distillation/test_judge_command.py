"""experiments.judge: a drafter judged without its training, by the same figures."""

import json

import pytest
from tiny_pair import write_pair

from experiments import judge
from specdec_jax.distillation.judging import answers
from specdec_jax.distillation.judging import judge as judge_texts
from specdec_jax.loading import load_model
from specdec_jax.text.generation import encode

pytestmark = pytest.mark.slow


def test_a_drafter_is_judged_as_the_library_does(tmp_path, capsys):
    names = write_pair(tmp_path)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": text, "category": "code"}) for text in ("hello", "one two")))
    command = ["--target", names[0], "--drafter", names[1], "--prompts", str(prompts), "--temperatures", "0"]
    command += ["--max-new-tokens", "8", "--dtype", "float32", "--out", str(tmp_path / "run")]
    assert judge.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    target, drafter = (load_model(name, dtype="float32") for name in names)
    tokens = [encode(target, text, chat=True, system=None) for text in ("hello", "one two")]
    texts = list(zip(tokens, answers(target, tokens, max_new_tokens=8), strict=True))
    expected = judge_texts(target, drafter, texts).agreement.mean()
    code = next(row for row in rows if row["task"] == "code")
    assert code["agreement"][0] == pytest.approx(expected, abs=1e-6) and code["texts"] == 2
    assert "answers at 0" in (tmp_path / "run" / "table.md").read_text()


def test_bad_input_is_one_line(tmp_path, capsys):
    assert judge.main(["--prompts", "nowhere.jsonl", "--out", str(tmp_path / "run")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err and not (tmp_path / "run").exists()
