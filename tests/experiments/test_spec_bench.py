"""Spec-Bench's answer files and its averages, against numbers worked out by hand."""

import json
from datetime import datetime

import pytest
from tiny_weights import write_tokenizer

from configs.base import CompareConfig, Method
from experiments.lib.run_folder import RunFolder
from experiments.spec_bench import Answer, Choice, main, read_answers, speeds, task_of
from specdec_jax.contrib.engine_logs import read_log
from specdec_jax.contrib.engine_logs.rounds import write_lines

# Tokens and seconds by turn: two questions of MT-bench, one of another task, one that only we know.
PLAIN = {81: ("writing", [10, 30], [1, 3]), 101: ("math", [80], [2]), 321: ("qa", [6], [1]), "x-1": ("code", [9], [3])}
FAST = {81: ("writing", [10, 30], [1, 1]), 101: ("math", [70], [1]), 321: ("qa", [12], [1]), "x-1": ("code", [9], [1])}


def answers(table, model="m", lengths=(2, 3)):
    made = []
    for name, (category, tokens, seconds) in table.items():
        choice = Choice(0, ["a b"] * len(tokens), [1] * len(tokens), tokens, seconds, list(lengths))
        made.append(Answer(name, category, model, [choice], 1.5))
    return made


@pytest.fixture
def files(tmp_path):
    """The baseline's and a method's answer file."""
    for name, table in (("plain", PLAIN), ("fast", FAST)):
        entries = [a._asdict() | {"choices": [c._asdict() for c in a.choices]} for a in answers(table)]
        write_lines(tmp_path / f"{name}.jsonl", entries)
    return tmp_path / "plain.jsonl", tmp_path / "fast.jsonl"


def test_an_answer_file_is_spec_benchs(files):
    assert read_answers(files[0]) == answers(PLAIN)
    first = json.loads(files[0].read_text().splitlines()[0])
    choice = {"index": 0, "turns": ["a b", "a b"], "decoding_steps": [1, 1], "accept_lengths": [2, 3]}
    about = {"question_id": 81, "category": "writing", "model_id": "m", "tstamp": 1.5}
    assert first == {**about, "choices": [choice | {"new_tokens": [10, 30], "wall_time": [1, 3]}]}
    first["answer_id"] = "abc"  # theirs has it; nothing reads it
    files[0].write_text(json.dumps(first) + "\n\n")
    assert read_answers(files[0]) == answers(PLAIN)[:1]


def test_the_two_averages_are_spec_benchs_and_the_totals():
    found = {row.task: row for row in speeds(answers(PLAIN), answers(FAST))}
    assert list(found) == ["mt_bench", "qa", "code", "overall"]
    chat = found["mt_bench"]  # 40/4 and 80/2 tokens/s against 40/2 and 70/1
    assert (chat.questions, chat.mean_accepted_tokens) == (2, 2.5)
    assert (chat.baseline_tokens_per_second, chat.tokens_per_second) == (25, 45)
    assert chat.speedup_ratio_of_means == pytest.approx(45 / 25)
    assert chat.speedup_mean_of_ratios == pytest.approx((20 / 10 + 70 / 40) / 2)
    assert chat.speedup_total == pytest.approx((110 / 3) / (120 / 6))
    overall = found["overall"]
    assert overall.speedup_ratio_of_means == pytest.approx(((20 + 70 + 12 + 9) / 4) / ((10 + 40 + 6 + 3) / 4))
    assert overall.speedup_total == pytest.approx((131 / 5) / (135 / 10))
    assert found["qa"][3:] == (6, 12, 2, 2, 2)
    assert speeds(answers(PLAIN)[::-1], answers(FAST)) == list(found.values()), "whatever the order"
    assert speeds(answers(PLAIN), answers(FAST, lengths=()))[0].mean_accepted_tokens is None, "without rounds"
    assert task_of("math") == "mt_bench" and task_of("math_reasoning") == "math_reasoning"


def test_choices_of_a_question_are_added_up():
    both = [answer._replace(choices=[*answer.choices, *answer.choices]) for answer in answers(FAST)]
    twice = [
        a._replace(choices=[a.choices[0], a.choices[0]._replace(wall_time=[9] * len(a.choices[0].turns))]) for a in both
    ]
    assert speeds(answers(PLAIN), both) == speeds(answers(PLAIN), answers(FAST))
    qa = {row.task: row for row in speeds(answers(PLAIN), twice)}["qa"]
    assert qa.tokens_per_second == pytest.approx(24 / 10)


def test_the_command_prints_every_task(files, tmp_path, capsys):
    write_tokenizer(tmp_path)  # of letters: "a b" is three tokens, by which the baseline's can be counted too
    counted = ["mt_bench", "2", "2.50", "25.0", "45.0", "1.800", "1.875", "1.833"]
    for options, tokens in (([], "25.0"), (["--retokenise", str(tmp_path)], f"{(6 / 4 + 3 / 2) / 2:.1f}")):
        assert main([*map(str, files), *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        shown = {line.split()[0]: line.split() for line in lines if line.strip()}
        assert shown["mt_bench"][:5] == [*counted[:3], tokens, "45.0"] and shown["overall"][1] == "4"
        assert options or shown["mt_bench"] == counted
        assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)


def of_choice(**changed):
    return lambda entry: entry["choices"][0].update(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("category"), "bad.jsonl:2: no 'category' in this answer"),
        (lambda e: e["choices"][0].pop("wall_time"), "bad.jsonl:2: no 'wall_time'"),
        (of_choice(wall_time=[1, 2]), "bad.jsonl:2: question 101 needs as many numbers as turns"),
        (of_choice(wall_time=["1"]), "bad.jsonl:2: not an answer of Spec-Bench"),
        (lambda e: e.update(choices=[]), "bad.jsonl:2: question 101 needs"),
        (lambda e: e.update(question_id=81), "bad.jsonl:2: question 81 is answered a second time"),
        (of_choice(wall_time=[0]), "question 101 of 'm': 80 tokens in 0 s"),
        (lambda e: e.update(question_id=5), "question 5 is answered by the baseline only (2 such questions)"),
        ("\n", "no answers in it"),
        ('{"question_id": 1', "bad.jsonl:1: not JSON"),
        (["none.jsonl", "fast.jsonl"], "no answer file"),
        (["plain.jsonl"], "give a baseline's and a method's answer file"),
        (["."], "is no run folder of experiments.compare"),
    ],
)
def test_bad_answers_and_files_are_one_error(files, tmp_path, capsys, change, message):
    """A changed answer, a whole file, or the words of the command."""
    names, text = ["bad.jsonl", "fast.jsonl"], change
    if isinstance(change, list):
        names, text = change, ""
    elif callable(change):
        lines = [json.loads(line) for line in files[0].read_text().splitlines()]
        change(lines[1])
        text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "bad.jsonl").write_text(text)
    assert main([str(tmp_path / name) for name in names]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


@pytest.fixture
def run(tmp_path):
    """A run folder as experiments.compare writes it: two methods, two repeats."""
    config = CompareConfig(name="tiny", prompts="none.jsonl", methods=(Method("plain", policy=None),))
    folder = RunFolder.create("tiny", config, out=tmp_path / "run")
    for method, histogram, seconds in (("plain", [8], 2.0), ("static 2/b", [1, 0, 2], 0.5)):
        for prompt in ("81", "code-01"):
            for repeat in range(2):
                row = {"prompt_id": prompt, "category": "code", "method": method, "temperature": 0.8, "repeat": repeat}
                row |= {"seconds": seconds, "prefill_seconds": 0.5, "num_emitted_tokens": 8, "num_rounds": 4}
                row |= {"num_draft_tokens": 2 * sum(histogram[1:]) + 2 * histogram[0] * (method != "plain")}
                folder.append(row | {"acceptance_histogram": histogram, "text": f"{method} {repeat}"})
    return folder


def test_a_run_folder_becomes_answer_files(run, capsys):
    assert main([str(run.path)]) == 0
    paths = [run.path / "answers" / name for name in ("plain-temp0.8.jsonl", "static_2_b-temp0.8.jsonl")]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    first, second = read_answers(paths[1])
    assert (first.question_id, second.question_id, first.category) == (81, "code-01", "code")
    started = json.loads((run.path / "manifest.json").read_text())["started"]
    assert first.tstamp == datetime.fromisoformat(started).timestamp()
    assert [choice.index for choice in first.choices] == [0, 1]
    assert first.choices[1] == Choice(1, ["static 2/b 1"], [4], [8], [1.0], [1, 3, 3])
    overall = speeds(read_answers(paths[0]), read_answers(paths[1]))[-1]
    assert overall.speedup_total == pytest.approx(2.5) and overall.mean_accepted_tokens == pytest.approx(7 / 3)
    log = read_log(paths[1].with_suffix(".aiperf.jsonl"))  # three rounds of two drafts: none accepted, two, two
    assert log.likely.length.tolist() == [7] * 4 and log.num_open == 8 and log.low.accepted.sum() == 16


def test_answer_files_go_elsewhere_and_a_run_of_another_kind_is_an_error(run, tmp_path, capsys):
    assert main([str(run.path), "--out", str(tmp_path / "here" / "there")]) == 0
    assert len(list((tmp_path / "here" / "there").glob("*.jsonl"))) == 4
    run.append({"method": "x", "temperature": 0})
    assert main([str(run.path)]) == 2
    assert "no run folder of experiments.compare ('prompt_id')" in capsys.readouterr().err
    (run.path / "results.jsonl").unlink()
    assert main([str(run.path)]) == 2 and "has no results" in capsys.readouterr().err
