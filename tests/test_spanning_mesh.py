"""A mesh whose devices are those of two processes: every way to decode gives what one device gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ended, launch
from tiny_pair import write_pair

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
