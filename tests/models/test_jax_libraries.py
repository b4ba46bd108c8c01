"""Claims: models of tunix and gemma, as docs/examples/jax_libraries.py adapts them, decode what their own passes say;
tunix trains on rollouts by the weights of the step (docs/examples/tunix_grpo.py)."""

import json
import os
import sys

import pytest
from pages import ROOT

from experiments.lib.engines import Failed, python_of, run

REQUIREMENTS = "requirements-jax-libraries.txt"
LINES = (ROOT / REQUIREMENTS).read_text(encoding="utf-8").splitlines()
PACKAGES = [line.split("==")[0] for line in LINES if "==" in line]


def printed(example: str, *arguments: str) -> str:
    """By an example, with the libraries in an environment of their own, and the jax and flax of the tests."""
    try:
        packages = (*PACKAGES, "--no-deps")
        python = python_of(REQUIREMENTS, ROOT / "runs" / "environments", seconds=1800, packages=packages)
    except Failed as failure:
        pytest.skip(str(failure))
    [installed] = python.parents[1].glob("lib/python*/site-packages")
    side = [sys.executable, str(ROOT / "docs" / "examples" / example), *arguments]
    paths = os.pathsep.join([str(ROOT), str(installed)])
    return run(side, f"{example} {arguments} fails", 900, env=os.environ | {"PYTHONPATH": paths})[0]


@pytest.mark.seldom
@pytest.mark.parametrize("library", ["google-tunix", "gemma"])
def test_a_library_decodes_what_its_own_passes_say(library):
    difference, accepted = json.loads(printed("jax_libraries.py", library).splitlines()[-1])
    assert difference < 1e-4 and 0 < accepted <= 1


@pytest.mark.seldom
def test_tunix_trains_on_rollouts_of_the_current_policy(tmp_path):
    """Rollouts by earlier weights score differently: tunix shares its actor, and does not announce new weights."""
    printed("tunix_grpo.py", str(tmp_path), "--steps", "4", "--seeds", "1")
    for name, [lines] in json.loads((tmp_path / "results.json").read_text()).items():
        assert len(lines) == 4 and lines[-1]["drift"] > 0, name
        assert max(line["off"] for line in lines) < 1e-5, name
        assert sum(line["compilations"] for line in lines[2:]) == 0, name
