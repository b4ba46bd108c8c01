"""What commands refuse, each by one line on standard error: tests/data/refusals.txt has every command and its line.

`...` stands for any text. STORE=yes in the environment writes the file anew; read what changed before it is committed.
"""

import doctest
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from tiny_pair import write_pair

from experiments import distill
from experiments.lib import token_ranking
from experiments.lib.smoke import made_up_trace
from specdec_jax.app import cli
from specdec_jax.replay.trace import save_trace

STORED = Path(__file__).parent / "data" / "refusals.txt"
COMMANDS = dict(part.split("\n", 1) for part in STORED.read_text(encoding="utf-8").split("$ ")[1:])
MAINS = {"distill": distill.main, "rank_tokens": token_ranking.main}
MODELS = ["--target", "pair/target", "--drafter", "pair/drafter"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands name, and nothing that they do not."""
    folder = tmp_path_factory.mktemp("refusals")
    write_pair(folder / "pair")
    save_trace(folder / "trace.npz", made_up_trace())
    (folder / "configs").symlink_to(Path(__file__).parents[1] / "configs")
    texts = {"prompts": json.dumps({"prompt": "one two three four"}), "bad": '{"words": 3}', "empty": ""}
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_refused_in_one_line_and_writes_nothing(command, folder, monkeypatch, capsys):
    """With code 2, without colours where a terminal would have them."""
    name, *words = shlex.split(command)
    if "=" in name:
        monkeypatch.setenv(*name.split("="))
        name, *words = words
    if name in ("generate", "doctor") and "--target" not in words:
        words += MODELS[: 2 if "--drafter" in words else 4]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("specdec_jax.app.doctor.build", lambda *_: pytest.fail("weights were read"))
    before = sorted(folder.iterdir())
    code = MAINS[name](words) if name in MAINS else cli.main([name, *words] if name else words)
    out, err = capsys.readouterr()
    if os.environ.get("STORE"):
        COMMANDS[command] = err
        STORED.write_text("".join(f"$ {each}\n{line}" for each, line in COMMANDS.items()), encoding="utf-8")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and len(err) < 900, err
    assert doctest.OutputChecker().check_output(COMMANDS[command], err, doctest.ELLIPSIS), err
    assert sorted(folder.iterdir()) == before
