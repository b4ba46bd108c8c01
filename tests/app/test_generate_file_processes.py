"""generate-file on processes that find each other on the loopback interface: shares, one output, lost workers."""

import json
import os
import signal
import subprocess
import sys
import time

import launched
import numpy as np
import pytest
import tiny_t5
from launched import ended
from tiny_pair import write_pair

from specdec_jax.app import processes
from specdec_jax.app.cli import main
from specdec_jax.app.processes import Watch, merge
from specdec_jax.processes import Lost, Share

pytestmark = pytest.mark.slow

LINES = 23


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    target, drafter = write_pair(tmp_path_factory.mktemp("pair"))
    options = ["--target", target, "--drafter", drafter, "--dtype", "float32", "--costs", "estimated"]
    return [*options, "--no-chat", "--max-draft-length", "3", "--max-new-tokens", "40", "--tokens", "--batch", "2"]


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


@pytest.mark.parametrize("count", [2, 4])
def test_processes_write_what_one_would(command, source, whole, tmp_path, count):
    output = tmp_path / "out.jsonl"
    found = ended(launch(count, source, output, command))
    refused = [1 if index in (0, 4 % count) else 0 for index in range(count)]  # the first counts those of all
    assert [code for code, _ in found] == refused, found
    assert output.read_bytes() == whole
    assert not list(tmp_path.glob("*part*")) and not list(tmp_path.glob(".*part*"))
    again = ended(launch(count, source, output, command))
    assert [code for code, _ in again] == [1] * count and all("is complete: 23 lines" in said for _, said in again)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_lost_process_ends_the_others_within_a_minute_and_the_run_goes_on(command, source, tmp_path, killed):
    """Whichever it is, the one that JAX's service ran in, too."""
    many, output = tmp_path / "many.jsonl", tmp_path / "out.jsonl"
    many.write_text("\n".join(source.read_text().splitlines() * 400))  # more than is decoded meanwhile
    running = launch(2, many, output, command)
    part = Share(killed, 2).file(output)
    until = time.monotonic() + 240
    while not (part.is_file() and part.read_bytes().count(b"\n")):
        assert time.monotonic() < until, ended(running, 1)
        time.sleep(0.02)
    running[killed][0].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    code, said = ended(running, 60)[1 - killed]
    assert time.monotonic() - begun < 60 and code == 2, said
    assert said.count("error: ") == 1 and "Traceback" not in said
    assert f"process {killed + 1} of 2 has ended before its lines were done" in said and not output.exists()
    kept = part.read_bytes()
    again = launch(2, many, output, command)
    while part.read_bytes().count(b"\n") <= kept.count(b"\n"):
        assert time.monotonic() < until + 240
        time.sleep(0.02)
    for process, _ in again:
        process.kill()
    assert part.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])


def test_a_run_whose_processes_were_killed_ends_as_one_that_was_not(command, source, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    running = launch(2, source, output, command)
    parts, until = [Share(index, 2).file(output) for index in range(2)], time.monotonic() + 240
    while not all(part.is_file() and part.read_bytes().count(b"\n") for part in parts):
        assert time.monotonic() < until, ended(running, 1)
        time.sleep(0.01)
    for process, _ in running:
        process.kill()
    ended(running)
    assert [code for code, _ in ended(launch(2, source, output, command))] == [1, 0]
    assert output.read_bytes() == whole


@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_one_target_on_the_devices_of_all(command, source, whole, tmp_path, mesh):
    """Two processes that both decode every line, one of which writes; then one is killed, and the run goes on."""
    output, more = tmp_path / "out.jsonl", ["--spanning", "--mesh", mesh]
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
    found = ended(launch(2, source, output, [*command, *more]))
    assert [code for code, _ in found] == [1, 1] and "is complete: 23 lines" in found[0][1]
    found = ended(launch(2, source, output, [*command, *more, "--temperature", "0.3"]))
    assert [code for code, _ in found] == [2, 2], found
    assert all(f"{output} was written with temperature" in said and "Traceback" not in said for _, said in found), found


@pytest.mark.parametrize("kind", ["a draft vocabulary", "an encoder"])
def test_other_models_on_the_devices_of_all(kind, tmp_path):
    """Two processes, each with a part of the target's weights, write what one process writes that has them all."""
    source, alone, output = (tmp_path / name for name in ("in.jsonl", "alone.jsonl", "out.jsonl"))
    source.write_text("\n".join(json.dumps({"prompt": f"the {i}", "temperature": 0.4 * (i % 2)}) for i in range(5)))
    words = ["--dtype", "float32", "--costs", "estimated", "--no-chat", "--max-draft-length", "1", "--batch", "2"]
    words += ["--max-new-tokens", "20", "--tokens", "--policy", "static(draft_length=1)", *models_of(kind, tmp_path)]
    assert main(["generate-file", str(source), str(alone), *words]) == 0
    found = ended(launch(2, source, output, [*words, "--spanning", "--mesh", "model=2"]))
    assert [code for code, _ in found] == [0, 0], found
    assert output.read_bytes() == alone.read_bytes()
    assert sum(json.loads(line)["num_accepted_tokens"] for line in output.read_text().splitlines()) > 0


def models_of(kind, folder):
    """--target and --drafter of a tiny pair."""
    if kind == "an encoder":
        target, drafter = tiny_t5.write_pair(folder)
        return ["--target", target, "--drafter", drafter]
    target, drafter = write_pair(folder)
    np.save(folder / "tokens.npy", np.arange(3, 200))
    return ["--target", target, "--drafter", f"{drafter}@{folder / 'tokens.npy'}"]


def test_all_say_what_is_wrong(command, source, tmp_path):
    """Each its own error, not that another has ended."""
    for more, why in (
        (["--spanning", "--mesh", "data=1"], "mesh 'data=1' has no device of process 2"),
        (["--spanning", "--drafter", "nobody"], "nobody"),
    ):
        found = ended(launch(2, source, tmp_path / "out.jsonl", [*command, *more]))
        assert [code for code, _ in found] == [2, 2], found
        assert all(said.count("error: ") == 1 and why in said for _, said in found), found


def test_spanning_is_for_several(command, source, tmp_path, capsys):
    assert main(["generate-file", str(source), str(tmp_path / "out.jsonl"), *command, "--spanning"]) == 2
    assert "--spanning is for the processes of --distributed" in capsys.readouterr().err


def test_who_finds_no_others_says_what_is_missing(command, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    assert main(["generate-file", str(source), str(tmp_path / "out.jsonl"), *command, "--distributed"]) == 2
    assert "JAX_NUM_PROCESSES must be a whole number, got 'two'" in capsys.readouterr().err
    monkeypatch.delenv("JAX_NUM_PROCESSES")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    words = [sys.executable, "-m", "specdec_jax", "generate-file", str(source), str(tmp_path / "out.jsonl"), *command]
    done = subprocess.run([*words, "--distributed"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID" in done.stderr


@pytest.mark.parametrize(("total", "lines"), [(0, [0, 0, 0]), (2, [1, 1, 0]), (7, [3, 2, 2])])
def test_shares(total, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.0)
    shares = [Share(index, 3) for index in range(3)]
    assert [share.lines(total) for share in shares] == lines
    assert len({share.file(tmp_path / "out") for share in shares}) == 3
    for share, count in zip(shares, lines, strict=True):
        path = share.file(tmp_path / "out")
        path.write_bytes(b"".join(b"%d\n" % (share.index + 3 * i) for i in range(count)))
        path.with_name(path.name + ".settings.json").write_text('{"settings": {}, "input": {}}')
    assert Watch(shares[0], tmp_path / "out", total)()
    with pytest.raises(Lost, match="process 2 of 3"):
        Watch(shares[0], tmp_path / "out", total + 3)()
    assert merge(tmp_path / "out", shares[0], overwrite=False).lines == total
    assert (tmp_path / "out").read_bytes() == b"".join(b"%d\n" % i for i in range(total))
