"""`generate --beams N`: the search behind a command, its output, and what makes no sense beside it."""

import json
import re

import pytest
from tiny_pair import write_pair

from specdec_jax.app import cli
from specdec_jax.app.views.searching import print_beams
from specdec_jax.loading import load_model
from specdec_jax.text.beam_search import Hypothesis, beam_search

pytestmark = pytest.mark.slow

SHORT = ["--max-new-tokens", "10", "--no-chat", "--dtype", "float32"]
SEARCH = ["--beams", "3", *SHORT]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("tiny"))[0]


def search(target, **options):
    model = load_model(target, dtype="float32")
    return beam_search("hello", target=model, chat=False, **{"width": 3, "max_new_tokens": 10, **options})


def run(capsys, *arguments):
    code = cli.main(["generate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_best_text_alone_is_on_standard_output_and_all_scores_are_in_a_table(capsys, target):
    found, words = search(target), ["hello", "--target", target, *SEARCH]
    assert len({f"{beam.score:.4f}" for beam in found}) == 3
    code, out, err = run(capsys, *words)
    assert (code, out) == (0, found[0].text + "\n") and "\x1b" not in err
    lines = err.splitlines()[2:]
    for number, (line, beam) in enumerate(zip(lines, found, strict=True), start=1):
        numbers = rf" +{number} +{beam.score:.4f} +{beam.log_prob:.3f} +{len(beam.tokens)} +{beam.finish_reason}\b"
        assert re.match(numbers, line), line
    off = "--temperature 0 --top-k 0 --top-p 1 --min-p 0 --drafter none --seed 3 --no-rejected --no-statistics"
    assert run(capsys, *words, *off.split()) == (0, out, ""), "what is off may be said"


def test_options_arrive(capsys, target):
    numbers = {"width": 2, "length_penalty": -2.0, "min_new_tokens": 4, "max_new_tokens": 6}
    found = search(target, **numbers)
    assert found != search(target, width=2, max_new_tokens=6)
    arguments = ["--num-beams", "2", "--length-penalty", "-2", "--min-new-tokens", "4", *SHORT, "--json"]
    code, out, err = run(capsys, "hello", "--target", target, *arguments, "--max-new-tokens", "6")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and not err
    assert result.pop("beams") == [beam._asdict() for beam in found] and result == found[0]._asdict()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--temperature 0.7", "--temperature 0.7 has no use"),
        ("--policy=adaedl", "--policy has no use"),  # its default
        ("--drafter smollm2-drafter", "--drafter smollm2-drafter has no use"),
        ("--calibration built-in", "--calibration has no use"),
        ("--max-draft-length 7", "--max-draft-length has no use"),
        ("--record --json", "--record has no use"),
        ("--page a.html", "--page has no use"),
        ("--beams 0", "beams must be at least 1, got 0"),
        ("--length-penalty 9", "length_penalty must lie in [-8, 8], got 9"),
        ("--min-new-tokens 11", "min_new_tokens must lie in [0, 10], got 11"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_weights_are_read(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "hello", "--target", "nowhere", *SEARCH, *words.split())
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("terminal", "shown"), [("1", "␛[2Jred"), ("0", "\x1b[2Jred")])
def test_a_terminal_obeys_no_escape_code_of_the_model_s(capsys, monkeypatch, terminal, shown):
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    print_beams([Hypothesis("\x1b[2Jred", [1], -0.5, -0.5, "stop")], statistics=False)
    assert capsys.readouterr().out == shown + "\n"
