"""What serves no model with an encoder says so by its config.json, before it looks for weights."""

import json

import pytest
from tiny_t5 import SMALL

from experiments import calibrate, distill, peers, record, step_cost
from specdec_jax.app import cli

CONFIGS = {  # configs with the model as their target
    "config": ("distill_smollm2", "usual, target={!r}"),
    "variants": ("distill_variants", "usual, base=dataclasses.replace(usual.base, target={!r})"),
}
TEXT = "import dataclasses\nfrom configs.{} import config as usual\nconfig = dataclasses.replace({})\n"
REFUSALS = [  # a main, its words, and what serves none
    (cli.main, "chat --target MODEL", "chat"),
    (cli.main, "doctor --target MODEL", "doctor"),
    *((main, f"{words}--{role} MODEL --out OUT", "this experiment") for role in ("target", "drafter")
      for main, words in ((calibrate.main, ""), (distill.main, "judge "), (record.main, ""))),
    (peers.main, "--target MODEL --out OUT", "peers"),
    (step_cost.main, "precision --target MODEL --out OUT", "precision"),
    (step_cost.main, "--target MODEL --out OUT", "step_cost"),
    (distill.main, "CONFIG --out OUT", "distillation"),
    (distill.main, "compare VARIANTS --data OUT/data --out OUT/variants", "distill compare"),
]  # fmt: skip


@pytest.mark.parametrize(("main", "words", "what"), REFUSALS)
def test_a_model_with_an_encoder(main, words, what, tmp_path, capsys):
    model = tmp_path / "a_t5"  # a folder with a T5's config.json and nothing else
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL.to_hf()))
    for name, (usual, changes) in CONFIGS.items():
        (tmp_path / f"{name}.py").write_text(TEXT.format(usual, changes.format(str(model))))
        words = words.replace(name.upper(), str(tmp_path / f"{name}.py"))
    code, said = (
        main(words.replace("MODEL", str(model)).replace("OUT", str(tmp_path / "out")).split()),
        capsys.readouterr(),
    )
    assert code == 2 and said.err.count("error: ") == 1, said
    shown = said.err.replace("\n", " ")
    assert f"{what} does not serve models with an encoder, such as T5, and {str(model)!r} has one" in shown
    assert not list(tmp_path.rglob("*.npz")) and not (tmp_path / "out" / "variants").exists()
