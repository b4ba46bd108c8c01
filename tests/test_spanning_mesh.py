"""A mesh whose devices are those of two processes: every way to decode gives what one device gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ended, launch
from tiny_pair import write_pair

from specdec_jax.app.cli import main

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "fixtures" / "decode_on_all.py"
TWO_EACH = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(sys.path),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def alone(pair):
    words = [sys.executable, str(SCRIPT), *pair]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | TWO_EACH, check=False)
    assert done.returncode == 0, done.stderr
    return _told(done.stdout)


def _told(said):
    (line,) = [line for line in said.splitlines() if line.startswith("told ")]
    return json.loads(line.removeprefix("told "))


@pytest.mark.seldom
def test_rows_and_weights_over_processes_give_what_one_device_gives(pair, alone, tmp_path):
    found = ended(launch(2, [SCRIPT, *pair, "data=2,model=2"], tmp_path, TWO_EACH), 300)
    assert [code for code, _ in found] == [0, 0], found
    assert [_told(said) for _, said in found] == [alone, alone]


def test_generate_prints_once(pair, tmp_path, capsys):
    target, drafter = pair
    words = ["generate", "hello", "--target", target, "--drafter", drafter, "--dtype", "float32", "--no-chat"]
    words += ["--max-new-tokens", "12", "--temperature", "0.7", "--json", "--max-draft-length", "3"]
    assert main([*words, "--costs", "estimated"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    found = ended(launch(2, ["-m", "specdec_jax", *words, "--mesh", "model=4"], tmp_path, TWO_EACH), 300)
    assert [code for code, _ in found] == [0, 0], found
    assert json.loads([line for line in found[0][1].splitlines() if line.startswith("{")][0])["tokens"] == tokens
    assert "{" not in found[1][1]
    found = ended(launch(2, ["-m", "specdec_jax", *words, "--costs", "measured"], tmp_path, TWO_EACH), 300)
    assert [code for code, _ in found] == [2, 2] and "costs are measured by one process" in found[0][1], found
