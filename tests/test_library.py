"""docs/library.md is run as it stands there, on four devices in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FLAGS = (  # programs that are compiled soon rather than run fast
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
CHECKS = """
assert decoder.num_programs("run") == programs, "refreshed parameters compiled"
assert sd.summarise(state.statistics)["num_draft_tokens"] > 0
assert scores.log_p.shape == scores.log_q.shape == (4, 12)
"""


@pytest.mark.seldom
@pytest.mark.slow
def test_the_page_runs():
    assert len(BLOCKS) == 7
    code = "\n".join(["from specdec_jax.compilation_cache import enable; enable()", *BLOCKS, CHECKS])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 3
