"""Spec-Bench's answer files and its averages, against numbers worked out by hand."""

import json
from datetime import datetime

import numpy as np
import pytest
from tiny_weights import write_tokenizer

from configs.base import CompareConfig, Method
from experiments.lib.run_folder import RunFolder
from experiments.spec_bench import main, read_answers, speeds
from specdec_jax.contrib.engine_logs import read_log

# Tokens and seconds by turn: two questions of MT-bench, one of another task, one that only we know.
PLAIN = {81: ("writing", [10, 30], [1, 3]), 101: ("math", [80], [2]), 321: ("qa", [6], [1]), "x-1": ("code", [9], [3])}
FAST = {81: ("writing", [10, 30], [1, 1]), 101: ("math", [70], [1]), 321: ("qa", [12], [1]), "x-1": ("code", [9], [1])}


def answers(table, seconds=None, **changed):
    """Answers by question; with `seconds`, of a second choice that takes as long a turn."""
    made = {}
    for name, (category, tokens, wall_time) in table.items():
        choice = {"index": 0, "turns": ["a b"] * len(tokens), "decoding_steps": [1] * len(tokens), "new_tokens": tokens}
        choice |= {"wall_time": wall_time, "accept_lengths": [2, 3], **changed}
        more = [] if seconds is None else [choice | {"wall_time": [seconds] * len(tokens)}]
        made[name] = {"question_id": name, "category": category, "model_id": "m", "choices": [choice, *more]}
    return made


@pytest.fixture
def files(tmp_path):
    """The baseline's and a method's answer file; answer_id is theirs, and nothing reads it."""
    for name, table in (("plain", PLAIN), ("fast", FAST)):
        lines = [answer | {"tstamp": 1.5, "answer_id": "abc"} for answer in answers(table).values()]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "plain.jsonl", tmp_path / "fast.jsonl"


def test_the_two_averages_are_spec_benchs_and_the_totals():
    found = {task: figures for task, *figures in speeds(answers(PLAIN), answers(FAST))}
    assert list(found) == ["mt_bench", "qa", "code", "overall"]
    # 40/4 and 80/2 tokens/s against 40/2 and 70/1
    chat = [2, 2.5, 25, 45, 45 / 25, (20 / 10 + 70 / 40) / 2, (110 / 3) / (120 / 6)]
    assert found["mt_bench"] == pytest.approx(chat) and found["qa"][2:] == [6, 12, 2, 2, 2]
    means = (20 + 70 + 12 + 9) / 4, (10 + 40 + 6 + 3) / 4
    assert found["overall"][4] == pytest.approx(means[0] / means[1])
    assert found["overall"][6] == pytest.approx((131 / 5) / (135 / 10))
    backwards = dict(reversed(answers(PLAIN).items()))
    assert speeds(backwards, answers(FAST)) == speeds(answers(PLAIN), answers(FAST)), "whatever the order"
    assert speeds(answers(PLAIN), answers(FAST, accept_lengths=[]))[0][2] is None, "without rounds"
    twice = {row[0]: row for row in speeds(answers(PLAIN), answers(FAST, seconds=9))}
    assert twice["qa"][4] == pytest.approx(24 / 10), "choices of a question are added up"


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


def test_a_run_folder_becomes_answer_files(tmp_path, capsys):
    """Of experiments.compare: two methods, two repeats."""
    config = CompareConfig(name="tiny", prompts="none.jsonl", methods=(Method("plain", policy=None),))
    run = RunFolder.create("tiny", config, out=tmp_path / "run")
    for method, histogram, seconds in (("plain", [8], 2.0), ("static 2/b", [1, 0, 2], 0.5)):
        for prompt, repeat in np.ndindex(2, 2):
            row = {"prompt_id": ("81", "code-01")[prompt], "category": "code", "method": method, "temperature": 0.8}
            row |= {"repeat": repeat, "seconds": seconds, "prefill_seconds": 0.5, "num_emitted_tokens": 8}
            row |= {"num_draft_tokens": 2 * sum(histogram[1:]) + 2 * histogram[0] * (method != "plain")}
            run.append(row | {"num_rounds": 4, "acceptance_histogram": histogram, "text": f"{method} {repeat}"})
    assert main([str(run.path)]) == 0
    paths = [run.path / "answers" / name for name in ("plain-temp0.8.jsonl", "static_2_b-temp0.8.jsonl")]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    first, second = read_answers(paths[1]).values()
    assert (first["question_id"], second["question_id"], first["category"]) == (81, "code-01", "code")
    started = json.loads((run.path / "manifest.json").read_text())["started"]
    assert first["tstamp"] == datetime.fromisoformat(started).timestamp() and first["choices"][0]["index"] == 0
    choice = {"index": 1, "turns": ["static 2/b 1"], "decoding_steps": [4], "new_tokens": [8], "wall_time": [1.0]}
    assert first["choices"][1] == choice | {"accept_lengths": [1, 3, 3]}
    overall = speeds(read_answers(paths[0]), read_answers(paths[1]))[-1]
    assert overall[-1] == pytest.approx(2.5) and overall[2] == pytest.approx(7 / 3)
    log = read_log(paths[1].with_suffix(".aiperf.jsonl"))  # three rounds of two drafts: none accepted, two, two
    assert log.likely.length.tolist() == [7] * 4 and log.num_open == 8 and log.low.accepted.sum() == 16
    assert main([str(run.path), "--out", str(tmp_path / "here" / "there")]) == 0
    assert len(list((tmp_path / "here" / "there").glob("*.jsonl"))) == 4
    run.append({"method": "x", "temperature": 0})
    assert main([str(run.path)]) == 2
    assert "no run folder of experiments.compare ('prompt_id')" in capsys.readouterr().err
    (run.path / "results.jsonl").unlink()
    assert main([str(run.path)]) == 2 and "has no results" in capsys.readouterr().err
