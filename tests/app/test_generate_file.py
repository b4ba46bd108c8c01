"""generate-file: lines in, lines out; whatever the batch, wherever it was stopped, whatever else is in the file."""

import errno
import json
import os
import random

import pytest
from filelock import FileLock

from specdec_jax import kernels
from specdec_jax.app.cli import main
from specdec_jax.app.file_command import read_line, request_of
from specdec_jax.stopping import survival
from specdec_jax.text import continuous_batching, result_file
from specdec_jax.text.pair import build_pair
from specdec_jax.text.sampling_params import SamplingParams

GOOD = [
    {"prompt": "hello", "max_new_tokens": 20, "id": "first"},
    {"prompt": "the second", "temperature": 0.9, "max_new_tokens": 33, "stop": "q"},
    {"prompt": "4", "policy": {"rate_weight": 2.0}, "max_new_tokens": 1, "id": 4},
    {"prompt": "fünf", "temperature": 0.5, "top_p": 0.8},
    {"turns": ["six"], "max_new_tokens": 25, "category": "numbers", "split": "judge"},
]
BAD = [b"nonsense", b'{"prompt": "a", "temprature": 1}', b'{"prompt": "\xff"}', b'{"prompt": 3}', b"[]"]


@pytest.fixture(scope="module")
def models(models):
    options = [*models, "--dtype", "float32", "--costs", "estimated"]
    return [*options, "--no-chat", "--max-draft-length", "3", "--max-new-tokens", "12", "--tokens"]


LINES = [json.dumps(line).encode() for line in GOOD]
TEXT = b"\n".join([LINES[0], b"", *BAD[:2], *LINES[1:3], *BAD[2:], *LINES[3:]])  # the last has no end


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(TEXT)
    return path


def run(models, source, output, *more):
    return main(["generate-file", str(source), str(output), *models, *more])


def read(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "in.jsonl").write_bytes(TEXT)
    assert run(models, folder / "in.jsonl", folder / "out.jsonl", "--batch", "2") == 1
    return (folder / "out.jsonl").read_bytes()


def test_lines_come_in_order_with_what_was_asked_of_each(whole):
    found = [json.loads(line) for line in whole.splitlines()]
    assert [line["line"] for line in found] == [i for i, line in enumerate(TEXT.split(b"\n"), 1) if line]
    good = [line for line in found if "error" not in line]
    assert [line.get("id") for line in good] == ["first", None, 4, None, None]
    assert [line["num_tokens"] for line in good if line["finish_reason"] == "length"][:1] == [20]
    assert all(len(line["tokens"]) == line["num_tokens"] <= 33 for line in good)
    errors = " / ".join(line["error"] for line in found if "error" in line)
    for word in ("not JSON", "did you mean 'temperature'", "not UTF-8", "'prompt' must be text", "expected an object"):
        assert word in errors


def test_fewer_rows_than_the_batch_are_reported(models, whole, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(continuous_batching, "rows_that_fit", lambda *_: 1)
    assert run(models, source, tmp_path / "out.jsonl", "--batch", "2") == 1
    assert "1 of 2 rows of " in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_the_output_does_not_depend_on_the_batch_nor_on_citing(models, source, whole, tmp_path, capsys):
    for batch in ("1", "8"):
        assert run(models, source, tmp_path / batch, "--batch", batch, "--cite") == 1
        err = capsys.readouterr().err
        assert "eprint = {2405.19715}" in err, "SpecDec++, a source of survival"
        assert err.startswith("line 3 refused: not JSON (") and err.count(" refused: ") == 5, "before models are loaded"
        assert (tmp_path / batch).read_bytes() == whole and not [*tmp_path.glob(".*")], "no lock is left"


def test_a_run_that_was_killed_goes_on_wherever_it_was(models, source, whole, tmp_path):
    """The same bytes, also after a line that was half-written, with another batch and under another name."""
    output, begun = tmp_path / "cut.jsonl", tmp_path / "begun.jsonl"
    run(models, source, begun, "--batch", "2")
    begun.with_name("begun.jsonl.settings.json").rename(tmp_path / "cut.jsonl.settings.json")
    for cut in (0, len(whole) // 3, whole.index(b"\n") + 1, len(whole) - 1):
        output.write_bytes(whole[:cut])
        run(models, source, output, "--batch", "3")
        assert output.read_bytes() == whole, cut


def test_what_is_complete_is_left_alone_and_an_input_may_grow(models, source, whole, tmp_path, capsys):
    output = tmp_path / "grown.jsonl"
    run(models, source, output)
    for added, code, words in (
        (b"", 1, "is complete: 10 lines"),  # of which some were refused, whenever that was
        (b"x", 2, "written from another input"),  # its last line has become another
        (b'\n{"prompt": "more"}\n', 1, "lines in"),
    ):
        source.write_bytes(TEXT + added)
        assert run(models, source, output) == code and words in capsys.readouterr().err
    assert output.read_bytes().startswith(whole) and read(output)[-1]["num_tokens"] == 12


def test_other_settings_and_other_inputs_are_refused(models, source, whole, tmp_path, capsys):
    output, rule, text = tmp_path / "out.jsonl", tmp_path / "rule.py", source.read_bytes()
    rule.write_text("from specdec_jax.stopping.static import static\n\nrule = static\n")
    words = ["--policy", f'at_least(minimum=1, policy="{rule}")']
    run(models, source, output, *words)
    before, settings = output.read_bytes(), tmp_path / "out.jsonl.settings.json"

    def refused(message, *more):
        assert run(models, source, output, *words, *more) == 2
        assert message in capsys.readouterr().err and output.read_bytes() == before

    refused("written with temperature 0.0, not 0.5", "--temperature", "0.5")
    rule.write_text(rule.read_text() + "# another\n")
    refused("written with policy holds")
    rule.write_text(rule.read_text().removesuffix("# another\n"))
    source.write_bytes(text.replace(b"hello", b"jello"))
    refused("written from another input")
    source.write_bytes(text)
    first, *_ = before.splitlines(keepends=True)
    settings.write_text(settings.read_text().replace(f'"{kernels.products()}"', '"sse9"'))
    words_of = {first: f"written with products of sse9, not of {kernels.products()}: set SPECDEC_JAX_KERNELS"}
    for number, damaged in ((2, first + b"garbage\n"), (1, b"\n" + first), (2, 2 * first), (11, whole + first)):
        words_of[damaged] = f"{output}:{number} is no result of "
    for before, message in words_of.items():
        output.write_bytes(before)
        refused(message)
    settings.unlink()
    refused("does not say what it is")
    assert run(models, source, output, *words, "--overwrite", "--log-probs") == 1
    assert output.read_bytes() != before
    good = [line for line in read(output) if "error" not in line]
    assert good and all(len(line["log_probs"]) == line["num_tokens"] == len(line["warped_log_probs"]) for line in good)
    assert run(models, source, output, *words, "--overwrite") == 1  # and what was there before stays
    assert (tmp_path / "out.jsonl.old").read_bytes() == before and (tmp_path / "out.jsonl.old1").exists()


def test_no_model_is_loaded_where_all_lines_are_refused(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("specdec_jax.app.file_command.build", lambda *_, **__: 1 / 0)
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(BAD))
    for words in ("5 lines, all refused", "is complete: 5 lines"):
        code = run(models, tmp_path / "bad.jsonl", tmp_path / "out.jsonl")
        assert code == 1 and words in capsys.readouterr().err


def test_a_full_disk_leaves_whole_lines(models, source, whole, tmp_path, capsys, monkeypatch):
    """The third line fails after some of its bytes: they are taken back, and the run goes on when there is room."""
    output, written, real = tmp_path / "full.jsonl", [], os.write

    def write(descriptor, data):
        if not bytes(data).startswith(b'{"line"') and not written:
            return real(descriptor, data)
        written.append(1)
        if len(written) == 3:
            return real(descriptor, data[:5])
        if len(written) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(result_file.os, "write", write)
    assert run(models, source, output) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert output.read_bytes() == b"".join(line + b"\n" for line in whole.splitlines()[:2])
    monkeypatch.undo()
    run(models, source, output)
    assert output.read_bytes() == whole


def test_a_file_that_another_process_writes_is_refused(models, source, tmp_path, capsys):
    with FileLock(tmp_path / ".out.jsonl.lock"):
        assert run(models, source, tmp_path / "out.jsonl") == 2
    assert "is being written by another process" in capsys.readouterr().err


def test_a_system_prompt_needs_the_template(models, source, tmp_path, capsys):
    assert run(models, source, tmp_path / "out.jsonl", "--system", "brief") == 2
    assert "messages need the chat template; it is off" in capsys.readouterr().err


@pytest.fixture(scope="module")
def pair(models):
    options = {"max_draft_length": 3, "dtype": "float32", "costs": "estimated"}
    return build_pair(models[1], models[3], policy=survival(), **options)


HUGE, NOT = 10**400, float("nan")
WRONG = {
    "prompt": [None, 3, True, [], {}, "", "  \n", [{}], [{"role": "user"}], [{"role": 1, "content": "a"}], "\ud800"]
    + ["x" * 200_000, [{"role": "user", "content": "\udfff"}], [["user", "a"]], [{"role": "a", "content": None}]],
    "max_new_tokens": [0, -1, 1.5, "8", None, True, 10**30, 1e308, [], NOT, 127],
    **dict.fromkeys(["temperature", "top_k", "top_p", "min_p", "seed"], ["1", None, True, -1, HUGE, [1.0], {}]),
    "stop": ["", [""], 5, None, {}, ["a", 3], "\ud83d"],
    "turns": ["a", [], ["a", "b"], [[]], [""]],
    "system": [3, [], {}, "\udc00", None],
    **dict.fromkeys(["id", "category", "split"], [[], {}, [1]]),
    "policy": [1, "survival", None, [], {"threshold": 1}, {"initial_rate": "x"}, {"initial_rate": -2.0}, {"": 1}]
    + [{"initial_rate": value} for value in ([0.1, 0.2], HUGE, NOT, {})]
    + [{"greedy": 3 * [HUGE]}, {"rate_weight": None}, {"greedy": [1.0]}, {"greedy": [[1.0]]}],
    "verifier": [{"lenience": 0.5}, 3, None],
    **dict.fromkeys(["promt", "Prompt", "n", "stream", "", "\ud800", "max_tokens"], [1, None, "x"]),
}


def malformed(rng):
    field = rng.choice(sorted(WRONG))
    line = {"turns" if field == "turns" else "prompt": "fine", "max_new_tokens": 4} | {field: rng.choice(WRONG[field])}
    return json.dumps(line).encode()


def scrambled(rng):
    line = bytearray(json.dumps({"prompt": "fine", "temperature": 0.5}).encode())
    line[rng.randrange(len(line))] = rng.choice(b'\xff\xc0\x00{[,:"')
    return bytes(line)


@pytest.mark.parametrize("make", [malformed, scrambled])
def test_a_thousand_bad_lines_are_refused_by_name(pair, make):
    """Each is a request or a ValueError in one line, never anything else; what must be wrong is wrong."""
    rng, sampling, refused = random.Random(make.__name__), SamplingParams(max_new_tokens=4), 0
    for _ in range(1000):
        line = make(rng)
        try:
            request_of(pair, read_line(line), sampling, 0, chat=False)
            assert make is scrambled, line
        except ValueError as error:
            refused += 1
            assert str(error).strip() and len(str(error)) < 2000, line
    assert refused > (500 if make is scrambled else 999)
