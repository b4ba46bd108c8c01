"""What serves no model with an encoder says so by its config.json, before it looks for weights."""

import json

import pytest
from tiny_t5 import SMALL

from experiments import (
    calibrate,
    distill,
    peers,
    record,
    step_cost,
)
from experiments.lib import judged as judge
from experiments.lib import precision_study as precision
from specdec_jax.app import cli

CONFIG = """
import dataclasses
from configs.distill_smollm2 import config as usual
config = dataclasses.replace(usual, target={!r})
"""

VARIANTS = """
import dataclasses
from configs.distill_variants import config as usual
config = dataclasses.replace(usual, base=dataclasses.replace(usual.base, target={!r}))
"""


@pytest.fixture
def config_alone(tmp_path):
    """A folder with a T5's config.json and nothing else."""
    folder = tmp_path / "a_t5"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL.to_hf()))
    return str(folder)


def says_so(code, said, what, model):
    assert code == 2 and said.err.count("error: ") == 1, said
    assert f"{what} does not serve models with an encoder, such as T5, and {model!r} has one" in said.err.replace(
        "\n", " "
    )


@pytest.mark.parametrize("command", ["chat", "doctor"])
def test_commands(command, config_alone, capsys):
    says_so(cli.main([command, "--target", config_alone]), capsys.readouterr(), command, config_alone)


@pytest.mark.parametrize("role", ["--target", "--drafter"])
@pytest.mark.parametrize("experiment", [calibrate, judge, record], ids=lambda one: one.__name__)
def test_experiments_of_a_pair_as_served(experiment, role, config_alone, tmp_path, capsys):
    code = experiment.main([role, config_alone, "--out", str(tmp_path / "out")])
    says_so(code, capsys.readouterr(), "this experiment", config_alone)
    assert not list((tmp_path / "out").rglob("*.npz"))


@pytest.mark.parametrize("experiment", [peers, precision], ids=lambda one: one.__name__)
def test_experiments_that_load_models_by_themselves(experiment, config_alone, tmp_path, capsys):
    code = experiment.main(["--target", config_alone, "--out", str(tmp_path / "out")])
    says_so(code, capsys.readouterr(), experiment.__name__.rpartition(".")[2].removesuffix("_study"), config_alone)
    assert not (tmp_path / "out").exists()


def test_those_with_options_of_their_own(config_alone, tmp_path, capsys):
    out = ["--out", str(tmp_path / "step_cost")]
    says_so(step_cost.main(["--target", config_alone, *out]), capsys.readouterr(), "step_cost", config_alone)


def test_distillation(config_alone, tmp_path, capsys):
    config, out = tmp_path / "config.py", ["--out", str(tmp_path / "out")]
    config.write_text(CONFIG.format(config_alone))
    says_so(distill.main([str(config), *out]), capsys.readouterr(), "distillation", config_alone)
    variants = tmp_path / "variants.py"
    variants.write_text(VARIANTS.format(config_alone))
    code = distill.main(
        ["compare", str(variants), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "variants")]
    )
    says_so(code, capsys.readouterr(), "distill compare", config_alone)
    assert not (tmp_path / "variants").exists()
