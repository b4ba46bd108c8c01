"""Where prompts come from: the project's own sets, files by n-ths and halves, and sets of the hub by name."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from experiments.lib.datasets_by_name import DATASETS, as_entries
from experiments.lib.prompts import HALVES, Prompt, load_prompts, read_prompts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "prompts"
# Rows as the hub has them, with texts of our own: columns by short name.
ROWS = {
    "cnn_dailymail": [{"article": " (CNN) A dam broke.\n", "highlights": "A dam broke.", "id": "f00"}],
    "databricks-dolly-15k": [
        {"instruction": "Write a limerick", "context": "", "response": "r", "category": "creative_writing"},
        {"instruction": "Who is it?", "context": "It is Ann.", "response": "Ann", "category": "closed_qa"},
        {"instruction": "Go on", "context": "Once upon", "response": "r", "category": "creative_writing"},
    ],
    "wmt19/de-en": [{"translation": {"de": "Guten Tag.", "en": "Good day."}}, {"translation": {"de": "", "en": ""}}],
    "gsm8k": [{"question": "What is 2 + 2?", "answer": "It is 4.\n#### 4"}],
    "openai_humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": '\n\ndef one():\n    """1"""\n',
            "canonical_solution": "    return 1\n",
            "test": "",
            "entry_point": "one",
        }
    ],
}
PROMPTS = {
    "cnn_dailymail": [
        ("f00", "summarization", "Summarise the following text in two or three sentences.\n\n(CNN) A dam broke.")
    ],
    "databricks-dolly-15k": [("0", "instructions", "Write a limerick"), ("2", "instructions", "Go on\n\nOnce upon")],
    "wmt19/de-en": [("0", "translation", "Translate the following German text to English.\n\nGuten Tag.")],
    "gsm8k": [("0", "math_reasoning", "What is 2 + 2?\nWork it out step by step.")],
    "openai_humaneval": [
        ("HumanEval/0", "code", 'Complete the following Python function.\n\n```python\ndef one():\n    """1"""\n```')
    ],
}


def triples(prompts):
    return [(prompt.id, prompt.category, *prompt.turns) for prompt in prompts]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "category", "count"),
    [
        ("code", "code", 24),
        ("math", "math_reasoning", 24),
        ("summarise", "summarization", 12),
        ("german", "translation", 12),
        ("instructions", "instructions", 12),
    ],
)
def test_our_own_sets_have_two_halves(name, category, count):
    prompts = load_prompts(FOLDER / f"{name}.jsonl")
    assert len(prompts) == count and {prompt.category for prompt in prompts} == {category}
    assert Counter(prompt.split for prompt in prompts) == {half: count // 2 for half in HALVES}
    assert len({prompt.turns for prompt in prompts}) == count and all(len(prompt.turns) == 1 for prompt in prompts)
    assert [prompt.id for prompt in prompts] == [f"{name}-{number:02d}" for number in range(1, count + 1)]


def test_passages_are_long_enough_to_be_summarised():
    words = [len(prompt.turns[0].split("\n\n", 1)[1].split()) for prompt in read_prompts(FOLDER / "summarise.jsonl")]
    assert all(120 <= number <= 220 for number in words)


def test_no_prompt_is_in_two_sets():
    texts = [turn for path in sorted(FOLDER.glob("*.jsonl")) for p in read_prompts(path) for turn in p.turns]
    assert len(texts) == 108 == len(set(texts))


@pytest.fixture
def letters(tmp_path):
    """Six prompts a to f: a, c, e to calibrate, the others to judge."""
    rows = [{"id": letter, "split": HALVES[n % 2], "text": letter} for n, letter in enumerate("abcdef")]
    return write_lines(tmp_path / "letters.jsonl", rows)


@pytest.mark.parametrize(
    ("more", "limit", "split", "expected"),
    [
        ("", None, None, "abcdef"),
        ("", 2, None, "ab"),
        (":2", None, None, "ace"),
        ("", None, "judge", "bdf"),
        ("", 2, "judge", "bd"),
        (":2", None, "judge", "bf"),
        (":2", 1, "calibrate", "a"),
    ],
)
def test_split_then_every_nth_then_limit(letters, more, limit, split, expected):
    assert "".join(p.id for p in load_prompts(f"{letters}{more}", limit, split)) == expected
    if not more:
        assert "".join(p.id for p in read_prompts(letters, limit, split)) == expected


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


@pytest.mark.parametrize(
    ("more", "arguments", "message"),
    [
        (":0", {}, "'.*letters.jsonl:0'"),
        ("", {"limit": 0}, "got 0"),
        ("", {"split": "juge"}, r"letters.jsonl: no prompt of the split 'juge' \(there are: 'calibrate', 'judge'\)"),
    ],
)
def test_a_bad_request_is_named(letters, more, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(f"{letters}{more}", **arguments)


def test_a_bad_split_is_named(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"text": "x", "split": 3}])
    with pytest.raises(ValueError, match=r"p.jsonl:1: 'split' must be a name, got 3"):
        load_prompts(path)


@pytest.mark.parametrize("name", DATASETS)
def test_rows_of_the_hub_become_prompts(name):
    entries = as_entries(DATASETS[name], ROWS[name])
    assert [(entry["id"], entry["category"], *entry["turns"]) for entry in entries] == PROMPTS[name]


@pytest.mark.parametrize("name", DATASETS)
def test_a_local_copy_is_read(tmp_path, name):
    file = write_lines(tmp_path / "copy.jsonl", ROWS[name])
    assert triples(load_prompts(f"hub:{name}@{file}")) == triples(load_prompts(f"hub:{name}@{file}:1")) == PROMPTS[name]
    assert triples(load_prompts(f"hub:{DATASETS[name].hub_id}@{file}")) == PROMPTS[name]


def test_parquet_is_read_with_pyarrow(tmp_path, monkeypatch):
    file = tmp_path / "test.parquet"
    file.touch()
    parquet = ModuleType("pyarrow.parquet")
    tables = {file: SimpleNamespace(to_pylist=lambda: ROWS["gsm8k"])}
    parquet.read_table = tables.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    assert triples(load_prompts(f"hub:gsm8k@{file}")) == PROMPTS["gsm8k"]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"needs the package 'pyarrow', which is optional: pip install pyarrow"):
        load_prompts(f"hub:gsm8k@{file}")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`; the list of what it was asked for."""
    asked = []

    def load_dataset(path, name=None, *, split):
        asked.append((path, name, split))
        short = next(short for short, entry in DATASETS.items() if entry.hub_id == path)
        if short == "gsm8k":
            raise RuntimeError("no network\nat all")
        return iter(ROWS[short])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


@pytest.mark.parametrize(
    ("source", "name", "asked"),
    [
        ("cnn_dailymail", "cnn_dailymail", ("abisee/cnn_dailymail", "3.0.0", "test")),
        ("databricks/databricks-dolly-15k", "databricks-dolly-15k", ("databricks/databricks-dolly-15k", None, "train")),
        ("wmt19/de-en", "wmt19/de-en", ("wmt/wmt19", "de-en", "validation")),
        ("openai_humaneval", "openai_humaneval", ("openai/openai_humaneval", None, "test")),
    ],
)
def test_the_hub_is_asked_for_the_right_split(hub, source, name, asked):
    assert triples(load_prompts(f"hub:{source}")) == PROMPTS[name]
    assert hub == [asked]


def test_a_set_that_cannot_be_loaded_is_named(hub):
    with pytest.raises(ValueError, match="cannot load openai/gsm8k from the hub: no network"):
        load_prompts("hub:gsm8k")


def test_without_the_package_the_error_names_it_and_the_other_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hub:gsm8k@FILE.* needs the package 'datasets'.*pip install datasets"):
        load_prompts("hub:gsm8k")


def test_a_wrong_name_or_no_file_is_one_error(tmp_path):
    with pytest.raises(ValueError, match="no data set 'gsm8' .*did you mean 'gsm8k'"):
        load_prompts("hub:gsm8")
    with pytest.raises(FileNotFoundError, match="no file '.*nowhere' of the split 'test' of openai/gsm8k"):
        load_prompts(f"hub:gsm8k@{tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"question": "x"}\n{"text": "x"}', r"openai/gsm8k: row 1 has no column 'question' \(it has: text\)"),
        ('{"question": 5}', "row 0 has another shape"),
        ("{", r"a.jsonl:1: not JSON"),
        ('{"question": " "}', "no row to make a prompt of"),
    ],
)
def test_a_wrong_copy_is_one_error(tmp_path, lines, message):
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        load_prompts(f"hub:gsm8k@{tmp_path / 'a.jsonl'}")
