"""generate-file on processes that find each other on the loopback interface: one output, lost processes."""

import json
import time

import launched
import numpy as np
import pytest
from launched import ended
from tiny_pair import write_pair

from specdec_jax.app.cli import main

pytestmark = pytest.mark.slow

LINES = 23


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = write_pair(folder)
    np.save(folder / "tokens.npy", np.arange(3, 200))
    models = ["--target", target, "--drafter", f"{drafter}@{folder / 'tokens.npy'}", "--dtype", "float32", "--no-chat"]
    lengths = ["--max-draft-length", "3", "--max-new-tokens", "40", "--tokens", "--batch", "2"]
    return [*models, "--costs", "estimated", *lengths]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    lines = [json.dumps({"prompt": f"number {i}", "temperature": 0.4 * (i % 3), "id": i}) for i in range(LINES)]
    lines[4] = "nonsense"
    path = tmp_path_factory.mktemp("source") / "in.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def whole(command, source):
    """What one process writes."""
    output = source.with_name("whole.jsonl")
    assert main(["generate-file", str(source), str(output), *command]) == 1
    return output.read_bytes()


def launch(count, source, output, command):
    """Processes of one run, and the files of what each says."""
    return launched.launch(count, ["-m", "specdec_jax", "generate-file", source, output, *command], output.parent)


@pytest.mark.seldom
def test_one_target_on_the_devices_of_all(command, source, whole, tmp_path):
    """Two processes that both decode every line, one of which writes; then one is killed, and the run goes on."""
    output, more = tmp_path / "out.jsonl", ["--spanning", "--mesh", "model=2"]
    running, until = launch(2, source, output, [*command, *more]), time.monotonic() + 240
    while not (output.is_file() and output.read_bytes().count(b"\n")):
        assert time.monotonic() < until, ended(running, 1)
        time.sleep(0.01)
    running[1][0].kill()
    begun = time.monotonic()
    code, said = ended(running, 60)[0]
    assert time.monotonic() - begun < 60 and code == 2, said
    assert "process 2 of 2 has ended before the work was done" in said and "Traceback" not in said
    kept = output.read_bytes()
    found = ended(launch(2, source, output, [*command, *more]))
    assert [code for code, _ in found] == [1, 1], found
    assert output.read_bytes() == whole and whole.startswith(kept) and len(kept) < len(whole)
    assert "lines in" in found[0][1] and "lines" not in found[1][1]  # the first is heard


def test_all_say_what_is_wrong(command, source, tmp_path):
    """Each its own error, not that another has ended."""
    found = ended(launch(2, source, tmp_path / "out.jsonl", [*command, "--spanning", "--mesh", "data=1"]))
    assert [code for code, _ in found] == [2, 2], found
    why = "mesh 'data=1' has no device of process 2"
    assert all(said.count("error: ") == 1 and why in said for _, said in found), found


def test_who_finds_no_others_says_what_is_missing(command, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    words = ["generate-file", str(source), str(tmp_path / "out.jsonl"), *command, "--distributed", "--spanning"]
    assert main(words) == 2
    assert "JAX_NUM_PROCESSES must be a whole number, got 'two'" in capsys.readouterr().err
