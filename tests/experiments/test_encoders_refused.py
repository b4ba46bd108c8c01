"""What serves no model with an encoder says so by its config.json, before it looks for weights."""

import json

import pytest
from tiny_t5 import SMALL

from experiments import calibrate, distill, peers, record, step_cost
from experiments.lib import distill_judge as judge
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


REFUSALS = {
    "chat": (cli.main, "chat --target {model}", "chat"),
    "doctor": (cli.main, "doctor --target {model}", "doctor"),
    **{
        f"{command.__name__} {role}": (command.main, f"--{role} {{model}} --out {{out}}", "this experiment")
        for command in (calibrate, judge, record)
        for role in ("target", "drafter")
    },
    "peers": (peers.main, "--target {model} --out {out}", "peers"),
    "precision": (precision.main, "--target {model} --out {out}", "precision"),
    "step_cost": (step_cost.main, "--target {model} --out {out}", "step_cost"),
    "distill": (distill.main, "{config} --out {out}", "distillation"),
    "distill compare": (distill.main, "compare {variants} --data {out}/data --out {out}/variants", "distill compare"),
}


@pytest.mark.parametrize(("main", "words", "what"), REFUSALS.values(), ids=REFUSALS)
def test_a_model_with_an_encoder(main, words, what, config_alone, tmp_path, capsys):
    places = {"model": config_alone, "out": str(tmp_path / "out")}
    for name, text in (("config", CONFIG), ("variants", VARIANTS)):
        places[name] = str(tmp_path / f"{name}.py")
        (tmp_path / f"{name}.py").write_text(text.format(config_alone))
    code, said = main(words.format(**places).split()), capsys.readouterr()
    assert code == 2 and said.err.count("error: ") == 1, said
    shown = said.err.replace("\n", " ")
    assert f"{what} does not serve models with an encoder, such as T5, and {config_alone!r} has one" in shown
    assert not list(tmp_path.rglob("*.npz")) and not (tmp_path / "out" / "variants").exists()
