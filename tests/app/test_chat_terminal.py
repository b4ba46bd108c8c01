"""The chat command in a real terminal, driven by pexpect, and its script mode through a pipe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from tiny_pair import write_chat_pair

from specdec_jax.app.chat.terminal import open_history

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120  # seconds; what is waited for takes one or two where nothing else runs
REJECTED = "\x1b[2;9;31m"
TOKEN = r"\x1b\[1;3[36]m"  # a token of the target's in its colour; green is the spinner too
PROMPT = r"\x1b\[\?2004h"  # pasting in brackets is switched on: the prompt waits
CTRL_C, CTRL_D, ALT_ENTER, TAB = "\x03", "\x04", "\x1b\r", "\t"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    target, drafter = write_chat_pair(tmp_path_factory.mktemp("chat"))
    options = ["--max-draft-length", "3", "--dtype", "float32", "--policy", "static"]
    return ["-m", "specdec_jax", "chat", "--target", target, "--drafter", drafter, *options]


@pytest.fixture
def environment(tmp_path):
    wanted = {"TERM": "xterm", "XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": str(ROOT)}
    return {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | wanted


@pytest.fixture
def chat(arguments, environment, tmp_path):
    """Starts the command; the last answer of `expect` is in `.before` and `.after`."""
    running = []

    def begin(*more, size=(40, 160)):
        command = [*arguments, *(more or ("--max-new-tokens", "12"))]
        child = pexpect.spawn(
            sys.executable, command, env=environment, cwd=tmp_path, timeout=TIMEOUT, encoding="utf-8", dimensions=size
        )
        running.append(child)
        child.expect("commands")
        child.expect(PROMPT)
        return child

    yield begin
    for child in running:
        child.close(force=True)


def leave(child, keys="/quit\r"):
    child.send(keys)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_conversation(chat, tmp_path):
    child = chat()

    def say(line, *answers):
        child.send(f"{line}\r")
        for answer in answers:
            child.expect(answer)

    say("hello", "Thinking")
    child.send("/gamma 2")  # the next prompt shows it
    child.expect(TOKEN)
    written = child.before
    child.expect(r"12 tokens, [^\r]*reached max-new-tokens")
    assert REJECTED in written + child.before and "/gamma" not in written + child.before
    child.expect("rejected drafts are hidden from now on")
    say("", r"policy static\(draft_length=2\)")
    say("more", TOKEN)
    written = child.before
    child.expect(r"12 tokens, [^\r]*% of drafts accepted, [12]\.\d\d drafts")
    assert REJECTED not in written + child.before and "100%" not in child.after
    say("/stats", r"prompt tokens re-used +3\d")
    say("/compare", r"plain [^\r]*1.00x[^\r]*identical", r"static\(draft_length=2\) [^\r]*identical")
    say("/save no/such/folder/run.html", "error: there is no folder 'no/such/folder' to save in")
    say("/save run.html", "saved run.html")
    assert "<html" in (tmp_path / "run.html").read_text(encoding="utf-8")
    say("/reset", "A new conversation")
    leave(child)


def test_ctrl_c_stops_the_answer_and_keeps_the_session(chat):
    child = chat("--max-new-tokens", "1500")
    child.send("hello\r")
    child.expect(TOKEN)
    child.expect(TOKEN)
    child.send(CTRL_C)
    child.expect(r"\[(\d+) tokens, [^\r]*interrupted\]")
    num_cached = int(child.match[1])
    assert 0 < num_cached < 1500
    child.expect(PROMPT)
    child.send("/max-new-tokens 12\r")
    child.expect("max-new-tokens 12")
    child.send("and now?\r")
    # where the first answer was cut decides this text: after one cut in sixty it ends by itself before twelve tokens
    child.expect(r"\[\d+ tokens, [^\r]*(reached max-new-tokens|ended)\]")
    child.send("/stats\r")
    child.expect(r"prompt tokens re-used +(\d+)")
    assert int(child.match[1]) >= num_cached  # the answer that was cut short is in the cache
    leave(child)


def test_lines_completion_history_and_the_keys_that_leave(chat, tmp_path):
    child = chat()
    for keys, expected in (
        ("/temp", "/temperature"),  # offered while one types
        (TAB, "erature"),
        (" 0.5\r", "temperature 0.5"),
        (f"hello{ALT_ENTER}hello\r", "12 tokens, "),
        ("\x1b[200~one\ntwo\x1b[201~\r", "12 tokens, "),  # a pasted text of two lines is one message
    ):
        child.send(keys)
        child.expect(expected)
    child.expect(PROMPT)
    child.send("half a line" + CTRL_C)
    child.expect("Ctrl-C once more")
    leave(child, CTRL_C)
    history = (tmp_path / "specdec_jax" / "chat_history").read_text()
    assert "+/temperature 0.5" in history and "+hello\n+hello\n" in history and "+one\n+two\n" in history
    assert "half a line" not in history
    child = chat()
    child.send("\x1b[A\r")  # the line before, of the session before
    child.expect("12 tokens, ")
    leave(child, CTRL_D)


def test_a_script_is_read_line_by_line_without_colours(arguments, environment):
    command = [sys.executable, *arguments, "--max-new-tokens", "12", "--cite"]
    options = {"env": environment, "capture_output": True, "text": True, "timeout": TIMEOUT}
    done = subprocess.run(command, input="hello\n\n/gama 3\n/stats\nmore\n/quit\nnever\n", **options)
    assert done.returncode == 2 and "error: unknown command /gama" in done.stderr  # and the rest is read
    assert "\x1b" not in done.stdout + done.stderr and "> " not in done.stdout
    assert "prompt tokens re-used" in done.stdout and done.stderr.count("@software{specdec_jax") == 1
    assert len(re.findall(r"^\[12 tokens, .*\]$", done.stderr, re.MULTILINE)) == 2


def test_a_history_that_cannot_be_written_is_none(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    history = open_history()
    history.append_string("/quit")
    assert history.get_strings() == ["/quit"]
