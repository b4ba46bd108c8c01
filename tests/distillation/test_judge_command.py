"""experiments.distill judge: a drafter judged without its training, by the same figures."""

import json
from pathlib import Path

import pytest
from tiny_pair import write_pair

from experiments import distill
from specdec_jax.loading import load_model
from specdec_jax.metrics.judging import answers
from specdec_jax.metrics.judging import judge as judge_texts
from specdec_jax.text.generation import encode


def test_a_drafter_is_judged_as_the_library_does(tmp_path, capsys):
    names = write_pair(tmp_path)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": text, "category": "code"}) for text in ("hello", "one two")))
    command = ["--target", names[0], "--drafter", names[1], "--prompts", str(prompts), "--temperatures", "0"]
    command += ["--max-new-tokens", "8", "--dtype", "float32", "--out", str(tmp_path / "run")]
    assert distill.main(["judge", *command]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    target, drafter = (load_model(name, dtype="float32") for name in names)
    tokens = [encode(target, text, chat=True, system=None) for text in ("hello", "one two")]
    texts = list(zip(tokens, answers(target, tokens, max_new_tokens=8), strict=True))
    expected = judge_texts(target, drafter, texts).agreement.mean()
    code = next(row for row in rows if row["task"] == "code")
    assert code["agreement"][0] == pytest.approx(expected, abs=1e-6) and code["texts"] == 2
    assert "answers at 0" in (tmp_path / "run" / "table.md").read_text()


def test_by_output_position_answers_go_on_and_every_span_sees_what_was_before(tmp_path):
    names = write_pair(tmp_path)
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "hello", "category": "code"}))
    first = load_model(names[0], dtype="float32")
    early = answers(first, [encode(first, "hello", chat=True, system=None)], max_new_tokens=4)[0][-1]
    path = Path(names[0]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": early}))
    command = ["--target", names[0], "--drafter", names[1], "--prompts", str(tmp_path / "p.jsonl"), "--temperatures"]
    command += ["0", "--max-new-tokens", "20", "--span", "8", "--past-end", "--dtype", "float32"]
    assert distill.main(["judge", *command, "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    target, drafter = (load_model(name, dtype="float32") for name in names)
    asked = encode(target, "hello", chat=True, system=None)
    answer = answers(target, [asked], max_new_tokens=20, past_end=True)[0]
    assert len(answer) == 20 and len(answers(target, [asked], max_new_tokens=20)[0]) <= 4
    texts = [([*asked, *answer[:start]], answer[start : start + 8]) for start in (0, 8, 16)]
    expected = judge_texts(target, drafter, texts).agreement
    found = {row["task"]: row["agreement"][0] for row in rows}
    assert [found[f"from {start}"] for start in (0, 8, 16)] == pytest.approx(expected, abs=1e-6)


def test_bad_input_is_one_line(tmp_path, capsys):
    assert distill.main(["judge", "--prompts", "nowhere.jsonl", "--out", str(tmp_path / "run")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err and not (tmp_path / "run").exists()
