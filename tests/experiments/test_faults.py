"""Commands that are killed at random moments go on to the bytes of an undisturbed run."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KILLS, LINES = 3, 40


@pytest.fixture
def commands(models, tmp_path):
    """name -> (words, a function from the output's path to its bytes)."""
    models = [*models, "--dtype", "float32", "--no-chat"]
    source = tmp_path / "in.jsonl"
    lines = ({"prompt": f"Count {i}", "temperature": 0.7 * (i % 2)} for i in range(LINES))
    source.write_text("\n".join(map(json.dumps, lines)))
    generate = ["specdec_jax", "generate-file", str(source), "OUT", *models, "--costs", "estimated", "--batch", "2"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": f"{i}", "prompt": f"Count {i}"}) for i in range(6)))
    record = ["experiments.record", *models, "--prompts", str(prompts), "--max-new-tokens", "24", "--batch", "1"]
    return {
        "generate-file": ([*generate, "--max-new-tokens", "24", "--max-draft-length", "3", "--tokens"], whole_lines),
        "record": ([*record, "--max-draft-length", "3", "--out", "OUT"], traces),
    }


def whole_lines(output):
    written = output.read_bytes() if output.exists() else b""
    return written[: written.rfind(b"\n") + 1]


def traces(output):
    paths = [output / f"trace-{temperature}.npz" for temperature in ("0", "0.7", "1")]
    return b"".join(path.read_bytes() for path in paths if path.exists())


def start(words, output, **options):
    words = [sys.executable, "-m", *(str(output) if word == "OUT" else word for word in words)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)


@pytest.mark.seldom
@pytest.mark.parametrize("name", ["generate-file", "record"])
def test_a_killed_command_goes_on_to_the_same_bytes(name, commands, tmp_path):
    words, written = commands[name]
    output, rng, kept = tmp_path / "killed", random.Random(0), b""
    assert start(words, tmp_path / "whole").wait() == 0
    whole, begun = written(tmp_path / "whole"), time.monotonic()
    assert start(words, tmp_path / "again").wait() == 0 and written(tmp_path / "again") == whole
    seconds = time.monotonic() - begun
    for _ in range(KILLS):
        process = start(words, output)
        time.sleep(rng.uniform(0.4, 0.95) * seconds)
        process.kill()
        process.communicate()
        now = written(output)
        assert now.startswith(kept) and whole.startswith(now), "a line is lost or different"
        kept = now
    process = start(words, output)
    said = process.communicate()[1].decode()
    assert process.returncode in (0, 1) and written(output) == whole, said  # 1: the last kill came after the last line
