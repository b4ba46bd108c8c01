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
SIZE = (40, 200)  # so that a line of statistics is one line, however long its program took to compile
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

    def begin(*more):
        command = [*arguments, *(more or ("--max-new-tokens", "12"))]
        child = pexpect.spawn(
            sys.executable, command, env=environment, cwd=tmp_path, timeout=TIMEOUT, encoding="utf-8", dimensions=SIZE
        )
        running.append(child)
        child.expect("commands")
        child.expect(PROMPT)
        return child

    yield begin
    for child in running:
        child.close(force=True)


def say(child, keys, *answers):
    child.send(keys)
    for answer in answers:
        child.expect(answer)


def leave(child, keys="/quit\r"):
    say(child, keys, pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_conversation(chat, tmp_path):
    child = chat()
    say(child, "hello\r", "Thinking")
    say(child, "/policy draft_length=2", TOKEN)  # the next prompt shows it
    written = child.before
    child.expect(r"12 tokens, [^\r]*reached max-new-tokens")
    assert REJECTED in written + child.before and "/policy" not in written + child.before
    child.expect("rejected drafts are hidden from now on")
    say(child, "\r", r"policy static\(draft_length=2\)")
    say(child, "more\r", TOKEN)
    written = child.before
    child.expect(r"12 tokens, [^\r]*% of drafts accepted, [12]\.\d\d drafts")
    assert REJECTED not in written + child.before and "100%" not in child.after
    say(child, "/stats\r", r"prompt tokens re-used +3\d")
    say(child, "/compare\r", r"plain [^\r]*1.00x[^\r]*identical", r"static\(draft_length=2\) [^\r]*identical")
    say(child, "/save run.html\r", "saved run.html")
    assert "<html" in (tmp_path / "run.html").read_text(encoding="utf-8")
    say(child, "/reset\r", "A new conversation")
    leave(child)


def test_ctrl_c_stops_the_answer_and_keeps_the_session(chat):
    child = chat("--max-new-tokens", "1500")
    say(child, "hello\r", TOKEN, TOKEN)
    say(child, CTRL_C, r"\[(\d+) tokens, [^\r]*interrupted\]")
    assert 0 < int(child.match[1]) < 1500
    child.expect(PROMPT)
    say(child, "/max-new-tokens 12\r", "max-new-tokens 12")
    leave(child)


def test_lines_completion_history_and_the_keys_that_leave(chat, tmp_path):
    child = chat()
    say(child, "/temp", "/temperature")  # offered while one types
    say(child, TAB, "erature")
    say(child, " 0.5\r", "temperature 0.5")
    say(child, f"hello{ALT_ENTER}hello\r", "12 tokens, ")
    say(child, "\x1b[200~one\ntwo\x1b[201~\r", "12 tokens, ", PROMPT)  # a pasted text of two lines is one message
    say(child, "half a line" + CTRL_C, "Ctrl-C once more")
    leave(child, CTRL_C)
    history = (tmp_path / "specdec_jax" / "chat_history").read_text()
    assert "+/temperature 0.5" in history and "+hello\n+hello\n" in history and "+one\n+two\n" in history
    assert "half a line" not in history
    child = chat()
    say(child, "\x1b[A\r", "12 tokens, ")  # the line before, of the session before
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
