"""The README's Python runs as it stands there, in a process that has imported nothing of the package before."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pair import write_pair

from specdec_jax.lossless import prove_exactly
from specdec_jax.text.strategies import choose
from specdec_jax.verification import rejection

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def run(code: str) -> str:
    command = [sys.executable, "-c", "from specdec_jax.compilation_cache import enable; enable()\n" + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_and_stream(tmp_path):
    """On a tiny pair: what is tested is that the calls are there and fit together."""
    target, drafter = write_pair(tmp_path)
    models = f"target={target!r}, drafter={drafter!r}, chat=False"
    tiny = BLOCKS[0].replace('"smollm2", "smollm2-drafter"', f"{target!r}, {drafter!r}")
    assert "pair = sd.measure_costs(pair)" in tiny
    tiny = tiny.replace("sd.measure_costs(pair)", "sd.measure_costs and pair")  # measuring is tested elsewhere
    tiny = tiny.replace("max_new_tokens=64, temperature=0.7, seed=1)", f"max_new_tokens=8), {models}")
    tiny = tiny.replace('"Tell me a story.", ', '"Tell me", sd.SamplingParams(max_new_tokens=8), chat=False, ')
    assert tiny.count("max_new_tokens=8)") == 2 and "smollm2" not in tiny
    assert run(tiny)


def test_own_rule(tmp_path):
    path = tmp_path / "confident.py"
    path.write_text(BLOCKS[1], encoding="utf-8")
    report = prove_exactly(choose("policy", f"{path}(floor=0.5)"), rejection())
    assert report.lossless and max(report.draft_lengths) == 2
