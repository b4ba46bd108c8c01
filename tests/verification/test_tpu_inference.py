"""Claim: the rejection sampler's tests of another JAX engine pass with this project's verifiers and draws inside."""

import os
import re
import sys
from pathlib import Path

import pytest
from pages import ROOT

from experiments.lib.engines import Failed, python_of, run

PARTS = (
    "layers/common/binary_search.py",
    *(f"layers/jax/sample/{n}.py" for n in ("rejection_sampler", "sampling_metadata")),
)
TESTS = "tests/layers/jax/sample/test_rejection_sampler.py"


@pytest.mark.seldom
def test_tpu_inference_tests_pass(tmp_path):
    """All 52, the law of 100,000 samples among them: it fails where the uniform of the acceptance is raised to 0.7. The
    token after a whole accepted draft is given by the tests, so our draw of it is not among what they see."""
    try:
        packages = ("tpu_inference", "--no-deps")
        python = python_of("requirements-peers.txt", ROOT / "runs" / "environments", seconds=300, packages=packages)
    except Failed as failure:
        pytest.skip(str(failure))
    [installed] = python.parents[1].glob("lib/python*/site-packages")
    for name in (TESTS, *(f"tpu_inference/{part}" for part in PARTS)):  # without the rest, which asks for vllm
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((installed / name).read_bytes())
    side = [sys.executable, "-m", "pytest", "-q", "-p", "tpu_inference_shim", "-c", os.devnull, str(tmp_path / TESTS)]
    paths = os.pathsep.join(map(str, (ROOT, Path(__file__).parent, tmp_path)))
    said, _ = run(side, "tests of tpu_inference fail", 600, env=os.environ | {"PYTHONPATH": paths})
    assert re.search(r"^52 passed", said, re.MULTILINE), said
