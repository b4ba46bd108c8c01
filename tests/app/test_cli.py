"""The command line: what it prints and refuses; `--beams`; signals and pipes in processes of their own."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest
from scripted import EOS, OPTIONS, PROMPT, scripted_pair, tokens_of, wrong_at

from specdec_jax.app import cli
from specdec_jax.app.views.printing import interrupts_end_here, print_json, print_stream
from specdec_jax.contrib.beam_search import beam_search
from specdec_jax.loading import load_model
from specdec_jax.stopping import static
from specdec_jax.text.citations import citations
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import stream
from specdec_jax.verification import rejection

SHORT = ["--max-new-tokens", "12", "--max-draft-length", "2", "--no-chat", "--dtype", "float32"]
STATIC = ["--policy", "static(draft_length=1)"]
SHORT_SEARCH = ["--max-new-tokens", "10", "--no-chat", "--dtype", "float32"]
SEARCH = ["--beams", "3", *SHORT_SEARCH]


@pytest.fixture(scope="module")
def expected(tiny_folders):
    """What the command below must print, from plain decoding in Python."""
    plain = build_pair(tiny_folders[0], None, dtype="float32")
    return generate("hello", SamplingParams(max_new_tokens=12), pair=plain, chat=False)


def run(capsys, *arguments):
    code = cli.main(["generate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_piped_text_is_plain_and_statistics_and_a_comparison_are_elsewhere(capsys, models, expected):
    code, out, err = run(capsys, "hello", *models, *SHORT, *STATIC, "--compare")
    assert (code, out) == (0, expected.text + "\n") and "\x1b" not in out + err
    assert re.search(r"^\[12 tokens, .* tokens/s, \d+% of drafts accepted, .*reached max-new-tokens\]$", err, re.M)
    figures = re.search(r"\[measured: ([\d.]+) times plain .*, ([\d.]+) against ([\d.]+) tokens/s, 2 times each", err)
    ratio, drafted, plain = map(float, figures.groups())
    assert ratio == pytest.approx(drafted / plain, rel=0.05) and "predicted" in err


def test_json_is_one_valid_line_with_tokens_text_and_statistics(capsys, models, expected, tmp_path):
    arguments, page = ["hello", *models, *SHORT, *STATIC], tmp_path / "a.html"
    code, out, err = run(capsys, *arguments, "--json", "--record", "--cite", "--log-probs", "--page", str(page))
    assert code == 0 and out.count("\n") == 1
    assert err == f"page: {page}\n{citations(static(), rejection())}\n"
    html = page.read_text(encoding="utf-8")
    assert "hello" in html and "static(draft_length=1)" in html and list(tmp_path.iterdir()) == [page]
    result = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (result["text"], result["tokens"]) == (expected.text, expected.tokens)
    assert result["statistics"]["num_emitted_tokens"] == 12 and result["finish_reason"] == "length"
    assert sum(round_["emitted"] for round_ in result["rounds"]) == 12 == len(result["log_probs"])
    assert max(result["log_probs"]) < 0 and result["warped_log_probs"] == [0.0] * 12  # greedy
    assert result["statistics"]["mean_draft_length"] == 1  # the policy's hyperparameters arrived


@pytest.mark.parametrize("more", [["--parse-special"], []])
def test_special_tokens_of_a_prompt_are_control_tokens_on_request(capsys, tiny_folders, tmp_path, more):
    options = ["--target", tiny_folders[0], "--drafter", "none", "--max-new-tokens", "2", "--dtype", "float32", *more]
    code, out, _ = run(capsys, "hi</s>", *options, "--json")
    ids = json.loads(out)["prompt_tokens"]
    assert code == 0 and ids.count(EOS) == 1 + len(more)
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi</s>"}\n')
    assert cli.main(["generate-file", *[str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")], *options]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["num_prompt_tokens"] == len(ids)


def test_drafters_without_a_model(capsys, tiny_folders):
    drafter = "prompt_lookup(longest=2, shortest=1), ngram"
    code, out, _ = run(
        capsys, "hello hello", "--target", tiny_folders[0], "--drafter", drafter, *SHORT, *STATIC, "--json"
    )
    figures = json.loads(out)["statistics"]
    assert code == 0 and figures["num_draft_tokens"] > 0 and figures["drafter_passes"] == 0


def test_a_prompt_from_standard_input(capsys, tiny_folders, monkeypatch, expected):
    arguments = ["--target", tiny_folders[0], "--drafter", "none", *SHORT, "--no-statistics"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(capsys, "-", *arguments) == (0, expected.text + "\n", "")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    code, out, err = run(capsys, "-", *arguments)
    assert (code, out) == (2, "") and "standard input is not UTF-8" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["generate", "-"], ["chat"]])
def test_a_closed_standard_input_is_one_line(models, arguments):
    command = shlex.join([sys.executable, "-m", "specdec_jax", *arguments, *models]) + " <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: standard input is closed") and done.stderr.count("\n") == 1


def test_words_that_are_no_text_or_control_a_terminal_are_refused_in_a_line(capsys, models):
    shown = {"a" + "\udcff" * 3000: "error: the prompt is not valid UTF-8: byte 0xff after 1 characters"}
    shown["--\x1b[2J\u202e" + "y" * 3000] = "error: no option has control characters: --\\u001b[2J\\u202eyyy"
    for word, message in shown.items():
        code, out, err = run(capsys, word, *models)
        assert (code, out, err.count("\n")) == (2, "", 1) and len(err) < 900 and err.startswith(message), err


def test_ctrl_c_between_rounds_leaves_the_text_and_statistics_so_far(capsys, monkeypatch):
    script = tokens_of("one two three four")
    pair = scripted_pair(script, wrong_at(script, 2))
    real = pair.decoder.run

    def interrupted_in_the_third_round(params, state, rounds=None):
        if rounds and int(state.statistics.num_rounds[0]) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(params, state, rounds)

    pair = pair._replace(decoder=pair.decoder._replace(run=interrupted_in_the_third_round))
    assert print_stream(stream(PROMPT, SamplingParams(max_new_tokens=64), pair=pair, **OPTIONS)) is False
    captured = capsys.readouterr()
    assert captured.out == "one two\n" and captured.err.endswith("interrupted]\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert print_json(stream(PROMPT, SamplingParams(max_new_tokens=64), pair=pair, **OPTIONS)) is False
    result = json.loads(capsys.readouterr().out)
    assert result["finish_reason"] == "interrupted" and result["text"] == "one two thr"
    assert result["statistics"]["num_rounds"] == 3


def command(models, *arguments):
    root = str(Path(cli.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    return [sys.executable, "-m", "specdec_jax", "generate", "hello", *models, *SHORT, *arguments], environment


SLOW = """
import hashlib, sys
from specdec_jax.stopping import static

def slow():
    def begin(state, context):
        if context.alive.shape == (1,):  # its answers are checked with two rows, before models are read
            print("tracing", file=sys.stderr, flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)  # a minute in C, deaf to signals, without the GIL, as XLA is
        return context.alive, state
    return static().replace(begin=begin)
"""


def test_ctrl_c_while_compiling_ends_at_once(models, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    words, environment = command(models, "--policy", str(tmp_path / "slow.py"))
    child = pexpect.spawn(words[0], words[1:], env=environment, timeout=120, encoding="utf-8")
    child.expect("tracing")
    before, pressed = child.before, time.monotonic()
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus == signal.SIGINT and time.monotonic() - pressed < 5  # 130 in a shell
    text = before + child.before
    assert "\x1b[?25l" not in text, "the cursor was hidden, and nothing shows it again"
    shown = " ".join(text.split())
    assert re.search(r"Compiling once; kept in \S+ for the next run \(0 s\)", shown), "and a clock"


def test_a_handler_of_ones_own_stays_and_pythons_comes_back():
    with interrupts_end_here():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_end_here():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_pipe_is_quiet(models):
    words, environment = command([*models[:2], "--drafter", "none"])
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(120) == 141


def search(target, **options):
    model = load_model(target, dtype="float32")
    return beam_search("hello", target=model, chat=False, **{"width": 3, "max_new_tokens": 10, **options})


def test_the_best_text_alone_is_on_standard_output_and_all_scores_are_in_a_table(capsys, tiny_folders):
    target = tiny_folders[0]
    found, words = search(target), ["hello", "--target", target, *SEARCH]
    assert len({f"{beam.score:.4f}" for beam in found}) == 3
    code, out, err = run(capsys, *words)
    assert (code, out) == (0, found[0].text + "\n") and "\x1b" not in err
    lines = err.splitlines()[2:]
    for number, (line, beam) in enumerate(zip(lines, found, strict=True), start=1):
        numbers = rf" +{number} +{beam.score:.4f} +{beam.log_prob:.3f} +{len(beam.tokens)} +{beam.finish_reason}\b"
        assert re.match(numbers, line), line
    off = "--temperature 0 --top-k 0 --top-p 1 --min-p 0 --drafter none --seed 3 --no-statistics"
    assert run(capsys, *words, *off.split()) == (0, out, ""), "what is off may be said"


def test_options_of_beams_arrive(capsys, tiny_folders):
    target = tiny_folders[0]
    numbers = {"width": 2, "length_penalty": -2.0, "min_new_tokens": 4, "max_new_tokens": 6}
    found = search(target, **numbers)
    assert found != search(target, width=2, max_new_tokens=6)
    arguments = ["--num-beams", "2", "--length-penalty", "-2", "--min-new-tokens", "4", *SHORT_SEARCH, "--json"]
    code, out, err = run(capsys, "hello", "--target", target, *arguments, "--max-new-tokens", "6")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and not err
    assert result.pop("beams") == [beam._asdict() for beam in found] and result == found[0]._asdict()
