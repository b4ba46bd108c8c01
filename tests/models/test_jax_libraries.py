"""Claims: models of tunix and gemma, as docs/examples/jax_libraries.py adapts them, decode what their own passes say;
tunix trains on rollouts by the weights of the step (docs/examples/tunix_grpo.py)."""

import json
import os
import sys

import pytest
from pages import ROOT

from experiments.lib.engines import Failed, python_of, run

REQUIREMENTS = "requirements-jax-libraries.txt"
NOTEBOOKS = ("nbclient", "ipykernel")
LINES = (ROOT / REQUIREMENTS).read_text(encoding="utf-8").splitlines()
PACKAGES = [line.split("==")[0] for line in LINES if "==" in line and not line.startswith(NOTEBOOKS)]


def printed(program: str, *arguments: str, more: tuple[str, ...] = ()) -> str:
    """By a program, with the libraries, and `more` packages, in environments of their own, and the jax of the tests."""
    paths = [str(ROOT)]
    for packages in ((*PACKAGES, "--no-deps"), more)[: 1 + bool(more)]:
        try:
            python = python_of(REQUIREMENTS, ROOT / "runs" / "environments", seconds=1800, packages=packages)
        except Failed as failure:
            pytest.skip(str(failure))
        [installed] = python.parents[1].glob("lib/python*/site-packages")
        paths.append(str(installed))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return run([sys.executable, str(ROOT / program), *arguments], f"{program} {arguments} fails", 1800, environment)[0]


@pytest.mark.seldom
def test_the_notebooks_run(tmp_path):
    """They have no reader's state: a name that is used before its cell fails, as does a page whose code is wrong."""
    printed("tools/notebooks.py", str(tmp_path), more=NOTEBOOKS)
    assert sorted(path.stem for path in tmp_path.glob("*.ipynb")) == ["any_model", "tunix_grpo"]


@pytest.mark.seldom
@pytest.mark.parametrize("library", ["google-tunix", "gemma"])
def test_a_library_decodes_what_its_own_passes_say(library):
    difference, accepted = json.loads(printed("docs/examples/jax_libraries.py", library).splitlines()[-1])
    assert difference < 1e-4 and 0 < accepted <= 1


@pytest.mark.seldom
def test_tunix_trains_on_rollouts_of_the_current_policy(tmp_path):
    """Rollouts by earlier weights score differently: tunix shares its actor, and does not announce new weights."""
    printed("docs/examples/tunix_grpo.py", str(tmp_path), "--steps", "4", "--seeds", "1")
    for name, [lines] in json.loads((tmp_path / "results.json").read_text()).items():
        assert len(lines) == 4 and lines[-1]["drift"] > 0, name
        assert max(line["off"] for line in lines) < 1e-5, name
        assert sum(line["compilations"] for line in lines[2:]) == 0, name
