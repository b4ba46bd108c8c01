"""What commands refuse, each by one line on standard error: tests/data/refusals/commands.txt has each and its line.

What tyro cannot parse is refused in its box; there the file has the words that say what is wrong.
"""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from refusals import Stored
from tiny_compare import write_config
from tiny_pair import write_pair
from tiny_t5 import SMALL

from experiments.lib.smoke import made_up_trace
from specdec_jax.app import cli
from specdec_jax.replay.trace import save_trace

COMMANDS = Stored("commands")
EXPERIMENTS = {path.stem for path in (Path(__file__).parents[1] / "experiments").glob("*.py")}
RULE = "from specdec_jax.stopping import static\n\ndef mine():\n    return static()\n"
ENCODER = "import dataclasses\nfrom configs.distill_smollm2 import config as usual\n"
MODELS = ["--target", "pair/target", "--drafter", "pair/drafter"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the commands name, and nothing that they do not."""
    folder = tmp_path_factory.mktemp("refusals")
    for name in ("pair", "compared", "a_t5", "a", "b"):
        (folder / name).mkdir()
    write_pair(folder / "pair")
    options = "max_new_tokens=8, max_draft_length=2, verification_widths=(3,)"
    config = write_config(folder / "compared", 'Method("static-2", static(draft_length=2))', options).read_text()
    trace = made_up_trace(1.0)
    save_trace(folder / "trace.npz", made_up_trace())
    for name in ("one", "two"):
        save_trace(folder / f"{name}.npz", trace._replace(about=trace.about | {"drafter": name}))
    (folder / "configs").symlink_to(Path(__file__).parents[1] / "configs")
    texts = {"prompts.jsonl": json.dumps({"prompt": "one two three four"}), "bad.jsonl": '{"words": 3}'}
    texts |= {"empty.jsonl": "", "costs.json": "{}", "o.jsonl.settings.json": "{}"}
    texts |= dict.fromkeys(("mine.py", "a/mine.py", "b/mine.py"), RULE)
    texts |= {"compared/wrong.py": config.replace("max_new_tokens=", "max_new_token=")}
    texts |= {"a_t5/config.json": json.dumps(SMALL.to_hf())}  # of a model with an encoder, without its weights
    texts |= {"t5_config.py": f"{ENCODER}config = dataclasses.replace(usual, target='a_t5')\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_refused_and_writes_nothing(command, folder, monkeypatch, capsys):
    """With code 2, in a line without colours where a terminal would have them."""
    name, *words = shlex.split(command)
    if "=" in name:
        monkeypatch.setenv(*name.split("="))
        name, *words = words
    if name in ("generate", "generate-file", "doctor") and "--target" not in words:
        words += MODELS[: 2 if "--drafter" in words else 4]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")  # no message is wrapped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: name not in EXPERIMENTS)  # they show what they load
    monkeypatch.setattr("specdec_jax.app.doctor.build", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("experiments.compare.decode", lambda *_: pytest.fail("something was compiled"))
    files = lambda: {path for path in folder.rglob("*") if "__pycache__" not in path.parts}  # noqa: E731
    before = files()
    main = importlib.import_module(f"experiments.{name}").main if name in EXPERIMENTS else cli.main
    try:
        code, in_box = main([name, *words] if name and main is cli.main else words), False
    except SystemExit as ended:
        code, in_box = ended.code, True
    out, err = capsys.readouterr()
    is_line = err.count("\n") == 1 and err.startswith("error: ") and len(err) < 900 and "\x1b" not in err
    assert (code, out) == (2, "") and is_line != in_box, err
    COMMANDS.check(command, re.sub(r"\x1b\[[\d;]*m", "", err))
    assert files() == before
