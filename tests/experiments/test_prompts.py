"""Where prompts come from: the project's own sets, files by n-ths and halves, and sets of the hub by name."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from experiments.lib.prompts import DATASETS, HALVES, Prompt, load_prompts, read_prompts

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "prompts"
SUMMARISE = "Summarise the following text in two or three sentences.\n\n"
COMPLETE = "Complete the following Python function.\n\n"
HUMANEVAL = '\n\ndef one():\n    """1"""\n'
ROWS = {  # as the hub has them, with texts of our own, by short name
    "cnn_dailymail": [{"article": " (CNN) A dam broke.\n", "highlights": "A dam broke.", "id": "f00"}],
    "databricks-dolly-15k": [
        {"instruction": "Write a limerick", "context": "", "response": "r", "category": "creative_writing"},
        {"instruction": "Who is it?", "context": "It is Ann.", "response": "Ann", "category": "closed_qa"},
        {"instruction": "Go on", "context": "Once upon", "response": "r", "category": "creative_writing"},
    ],
    "wmt19/de-en": [{"translation": {"de": "Guten Tag.", "en": "Good day."}}, {"translation": {"de": "", "en": ""}}],
    "gsm8k": [{"question": "What is 2 + 2?", "answer": "It is 4.\n#### 4"}],
    "openai_humaneval": [{"task_id": "HumanEval/0", "prompt": HUMANEVAL, "canonical_solution": "    return 1\n"}],
}
ASKED = {  # the ids, category and texts of their prompts
    "cnn_dailymail": ["f00", "summarization", f"{SUMMARISE}(CNN) A dam broke."],
    "databricks-dolly-15k": ["0 2", "instructions", "Write a limerick", "Go on\n\nOnce upon"],
    "wmt19/de-en": ["0", "translation", "Translate the following German text to English.\n\nGuten Tag."],
    "gsm8k": ["0", "math_reasoning", "What is 2 + 2?\nWork it out step by step."],
    "openai_humaneval": ["HumanEval/0", "code", f"{COMPLETE}```python\n{HUMANEVAL.strip()}\n```"],
}


def triples(prompts):
    return [(prompt.id, prompt.category, *prompt.turns) for prompt in prompts]


def check_prompts(name, source):
    ids, category, *texts = ASKED[name]
    assert triples(load_prompts(source)) == [
        (each, category, text) for each, text in zip(ids.split(), texts, strict=True)
    ]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


CATEGORIES = {"code": "code", "math": "math_reasoning", "summarise": "summarization", "german": "translation"}
CATEGORIES |= {"instructions": "instructions"}


def test_our_own_sets_have_two_halves_and_no_prompt_twice():
    for name, category in CATEGORIES.items():
        prompts, count = load_prompts(FOLDER / f"{name}.jsonl"), 24 if name in ("code", "math") else 12
        assert len(prompts) == count and {prompt.category for prompt in prompts} == {category}
        assert Counter(prompt.split for prompt in prompts) == {half: count // 2 for half in HALVES}
        assert [prompt.id for prompt in prompts] == [f"{name}-{number:02d}" for number in range(1, count + 1)]
        passages = [prompt.turns[0].split("\n\n", 1)[1] for prompt in prompts if name == "summarise"]
        assert all(120 <= len(passage.split()) <= 220 for passage in passages)
    prompts = [prompt for path in sorted(FOLDER.glob("*.jsonl")) for prompt in read_prompts(path)]
    assert len(prompts) == 108 == len({prompt.turns[0] for prompt in prompts})
    assert all(len(prompt.turns) == 1 for prompt in prompts)


def test_prompt_shapes(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = (
        '{"question_id": 81, "category": "writing", "turns": ["a", "b"]}',
        "",
        '{"prompt": "c\u2028d"}',
        '{"text": "e"}',
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    expected = [("81", "writing", "a", "b"), ("3", "none", "c\u2028d"), ("4", "none", "e")]
    assert triples(read_prompts(path)) == expected and triples(read_prompts(path, limit=1)) == expected[:1]


def test_split_then_every_nth_then_limit(tmp_path):
    """Six prompts a to f: a, c, e to calibrate, the others to judge."""
    rows = [{"id": letter, "split": HALVES[n % 2], "text": letter} for n, letter in enumerate("abcdef")]
    letters = write_lines(tmp_path / "letters.jsonl", rows)
    for more, limit, split, expected in (
        *(("", None, None, "abcdef"), ("", 2, None, "ab"), (":2", None, None, "ace"), ("", None, "judge", "bdf")),
        *(("", 2, "judge", "bd"), (":2", None, "judge", "bf"), (":2", 1, "calibrate", "a")),
    ):
        assert "".join(p.id for p in load_prompts(f"{letters}{more}", limit, split)) == expected
        assert more or "".join(p.id for p in read_prompts(letters, limit, split)) == expected


def test_a_source_without_splits_is_halved_within_each_category(tmp_path):
    rows = [{"question_id": n, "category": c, "turns": ["x", "y"]} for n, c in enumerate("aabbba")]
    path = write_lines(tmp_path / "bench.jsonl", rows)
    halves = {split: [p.id for p in load_prompts(path, split=split)] for split in HALVES}
    assert halves == {"calibrate": ["0", "2", "4", "5"], "judge": ["1", "3"]}
    assert load_prompts(path)[0] == Prompt("0", "a", ("x", "y"), None)
    # A limit takes from a half; it does not halve what it took.
    assert [p.id for p in load_prompts(path, limit=3, split="calibrate")] == ["0", "2", "4"]
    # Where somebody chose the halves, those without one are in neither.
    write_lines(path, [{"text": "a"}, {"text": "b", "split": "calibrate"}, {"text": "c"}])
    assert [p.id for p in load_prompts(path, split="calibrate")] == ["2"]


FINE = '{"text": "fine", "id": "1", "split": "judge"}\n'
REFUSED = [  # lines of FILE, a source, options, and what is said
    (FINE, "FILE:0", {}, "'.*p.jsonl:0'"),
    (FINE, "FILE", {"limit": 0}, "got 0"),
    (FINE, "FILE", {"split": "juge"}, r"p.jsonl: no prompt of the split 'juge' \(there are: 'judge'\)"),
    ('{"text": "x", "split": 3}', "FILE", {}, r"p.jsonl:1: 'split' must be a name, got 3"),
    (FINE + "{not json}", "FILE", {}, r":2: not JSON"),
    (FINE + "[1, 2]", "FILE", {}, r":2: expected an object, got list"),
    (FINE + '{"promt": "x"}', "FILE", {}, r":2: none of the keys turns, prompt, text in it, only 'promt'"),
    (FINE + '{"turns": []}', "FILE", {}, r":2: 'turns' must be text that is not empty, got \[\]"),
    (FINE + '{"turns": ["a", ""]}', "FILE", {}, r":2: 'turns'"),
    (FINE + '{"prompt": 3}', "FILE", {}, r":2: 'prompt' .* got 3"),
    (FINE + '{"turns": "hi"}', "FILE", {}, r":2: 'turns' must be a list of texts, such as ..hi.., got 'hi'"),
    (FINE + '{"id": "1", "text": "x"}', "FILE", {}, r":2: the id '1' occurs a second time"),
    ("\n\n", "FILE", {}, "no prompts"),
    ('{"text": "\udce4"}\n', "FILE", {}, "not UTF-8"),
    ("", "nowhere.jsonl", {}, "nowhere"),
    ("", "hub:gsm8", {}, "no data set 'gsm8' .*did you mean 'gsm8k'"),
    ("", "hub:gsm8k", {}, r"hub:gsm8k@FILE.* needs the package 'datasets'.*pip install datasets"),
    ("", "hub:gsm8k@nowhere", {}, "no file '.*nowhere' of the split 'test' of openai/gsm8k"),
    ('{"question": "x"}\n{"text": "x"}', "hub:gsm8k@FILE", {}, r"row 1 has no column 'question' \(it has: text\)"),
    ('{"question": 5}', "hub:gsm8k@FILE", {}, "row 0 has another shape"),
    ("{", "hub:gsm8k@FILE", {}, r"p.jsonl:1: not JSON"),
    ('{"question": " "}', "hub:gsm8k@FILE", {}, "no row to make a prompt of"),
]


@pytest.mark.parametrize(("lines", "source", "options", "message"), REFUSED)
def test_what_cannot_be_read_is_one_error(tmp_path, monkeypatch, lines, source, options, message):
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / "p.jsonl"
    path.write_text(lines, encoding="utf-8", errors="surrogateescape")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_prompts(source.replace("FILE", str(path)), **options)


@pytest.mark.parametrize("name", DATASETS)
def test_rows_of_the_hub_become_prompts_from_a_local_copy_and_from_the_right_split(tmp_path, monkeypatch, name):
    """By a stand-in for the package `datasets`."""
    dataset, calls = DATASETS[name], []
    file = write_lines(tmp_path / "copy.jsonl", ROWS[name])
    package = SimpleNamespace(load_dataset=lambda *words, split: calls.append((*words, split)) or iter(ROWS[name]))
    monkeypatch.setitem(sys.modules, "datasets", package)
    for source in (f"{name}@{file}", f"{name}@{file}:1", f"{dataset.hub_id}@{file}", name):
        check_prompts(name, f"hub:{source}")
    if dataset.config:
        check_prompts(name, f"hub:{dataset.hub_id}/{dataset.config}")
    splits = {"cnn_dailymail": ("3.0.0", "test"), "databricks-dolly-15k": (None, "train"), "gsm8k": ("main", "test")}
    splits |= {"wmt19/de-en": ("de-en", "validation"), "openai_humaneval": (None, "test")}
    assert {*calls} == {(dataset.hub_id, *splits[name])}


def test_a_hub_that_cannot_be_reached_is_one_error(monkeypatch):
    def load_dataset(*_, **__):
        raise RuntimeError("no network\nat all")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="cannot load openai/gsm8k from the hub: no network"):
        load_prompts("hub:gsm8k")


def test_parquet_is_read_with_pyarrow(tmp_path, monkeypatch):
    file = tmp_path / "test.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS["gsm8k"]), file)
    check_prompts("gsm8k", f"hub:gsm8k@{file}")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"needs the package 'pyarrow', which is optional: pip install pyarrow"):
        load_prompts(f"hub:gsm8k@{file}")
