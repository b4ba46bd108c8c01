"""Claim: models of tunix and gemma, as docs/examples/jax_libraries.py adapts them, decode what their own passes say."""

import json
import os
import sys

import pytest
from pages import ROOT

from experiments.lib.engines import Failed, python_of, run

REQUIREMENTS = "requirements-jax-libraries.txt"
LINES = (ROOT / REQUIREMENTS).read_text(encoding="utf-8").splitlines()
PACKAGES = [line.split("==")[0] for line in LINES if "==" in line]


@pytest.mark.seldom
@pytest.mark.parametrize("library", ["google-tunix", "gemma"])
def test_a_library_decodes_what_its_own_passes_say(library):
    """The libraries are of an environment of their own, jax and flax those of the tests."""
    try:
        packages = (*PACKAGES, "--no-deps")
        python = python_of(REQUIREMENTS, ROOT / "runs" / "environments", seconds=1800, packages=packages)
    except Failed as failure:
        pytest.skip(str(failure))
    [installed] = python.parents[1].glob("lib/python*/site-packages")
    side = [sys.executable, str(ROOT / "docs" / "examples" / "jax_libraries.py"), library]
    paths = os.pathsep.join([str(ROOT), str(installed)])
    out, _ = run(side, f"{library} does not decode", 900, env=os.environ | {"PYTHONPATH": paths})
    difference, accepted = json.loads(out.splitlines()[-1])
    assert difference < 1e-4 and 0 < accepted <= 1
