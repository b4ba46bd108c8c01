"""experiments.accuracy: what counts as right, and a run that goes on where it stopped."""

import json

import pytest
from tiny_pair import write_chat_pair

from experiments import accuracy
from experiments.accuracy import is_right

TWICE = {"prompt": "def twice(x):\n    '''Twice x.'''\n", "entry_point": "twice"}
TWICE["test"] = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n"
SUM = {"answer": "1000 * 3 = <<1000*3=3000>>3000\n#### 3,000"}


@pytest.mark.parametrize(
    ("row", "answer", "right"),
    [
        (SUM, "He pays 3 * 1,000 = 3,000 dollars.", True),
        (SUM, "3000 of 4000 are left", False),
        (SUM, "It is $3000.00.", True),
        (SUM, "none", False),
        (SUM, "-3000", False),
        (TWICE, "Sure:\n```python\ndef twice(x):\n    return x + x\n```\nIt adds. `x`", True),
        (TWICE, "```\ndef twice(x):\n    return x + x", True),  # cut off after the function
        (TWICE, "def twice(x): return 2 * x", True),
        (TWICE, "```python\ndef twice(x):\n    return x * x\n```", False),
        (TWICE, "```python\ndef twice(x):\n    while True: pass\n```", False),
        (TWICE, "```python\ndef twice(x):\n    return [0] * 2**40\n```", False),
        (TWICE, "I cannot.", False),
    ],
)
def test_the_last_number_is_the_answer_and_a_function_is_right_if_its_tests_pass(row, answer, right, monkeypatch):
    monkeypatch.setattr(accuracy, "LIMITS", accuracy.LIMITS.replace("(10, 10)", "(1, 1)"))
    assert is_right(answer, row) is right


def test_a_run_goes_on_and_compares_with_the_first_verifier(tmp_path, capsys):
    target, drafter = write_chat_pair(tmp_path)
    file = tmp_path / "test.jsonl"
    rows = ({"question": text, "answer": "#### 7"} for text in ("abc", "de", "a", "bc"))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--target", target, "--drafter", drafter, "--max-new-tokens", "4", "--batch", "2", "--dtype", "float32"]
    options += ["--verifiers", "rejection", "typical", "--out", str(tmp_path / "out")]
    assert accuracy.main([f"hub:gsm8k@{file}", *options]) == 0
    results = tmp_path / "out" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines].count("1") == 2 and len(lines) == 8
    results.write_text("".join(lines[:-2]))
    assert accuracy.main([f"hub:gsm8k@{file}", *options]) == 0
    assert sorted(results.read_text().splitlines(keepends=True)) == sorted(lines)
    assert "| math_reasoning | rejection | 0.00 " in (tmp_path / "out" / "table.md").read_text()
    capsys.readouterr()
    dolly = tmp_path / "dolly.jsonl"
    dolly.write_text('{"instruction": "abc", "context": "", "category": "creative_writing"}\n')
    assert accuracy.main([f"hub:databricks-dolly-15k@{dolly}", *options]) == 2
    assert "has no answers to compare with" in capsys.readouterr().err
    assert accuracy.main([f"hub:gsm8k@{file}", f"hub:gsm8k@{file}:2", *options]) == 2
    assert "is a second set of math_reasoning" in capsys.readouterr().err
    file.write_text('{"question": "abc"}\n')
    assert accuracy.main([f"hub:gsm8k@{file}", *options]) == 2
    assert "row 0 has no text 'answer'" in capsys.readouterr().err
