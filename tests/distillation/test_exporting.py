"""An export loads with the same logits; cards say what is given."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_weights as tiny

from specdec_jax.distillation.exporting import export, model_card
from specdec_jax.loading import load_model

CARD = "# A card\n"
TOKENS = np.random.default_rng(5).integers(0, tiny.CONFIG["vocab_size"], (2, 12))


def logits(loaded):
    cache = loaded.model.init_cache(loaded.params, *TOKENS.shape)
    return np.asarray(jax.jit(loaded.model.apply)(loaded.params, jnp.asarray(TOKENS, jnp.int32), cache)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("trained"), tiny.weights())


@pytest.fixture(scope="module")
def trained(folder):
    """Float32 master weights, which bfloat16 cannot hold exactly."""
    return load_model(folder, dtype="float32")


def export_model(path, model, **options):
    export(path, model.config, model.params, model.tokenizer, **({"card": CARD} | options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_gives_the_logits_of_its_dtype(tmp_path, folder, trained, dtype):
    export_model(tmp_path / "out", trained, dtype=dtype)
    expected = load_model(folder, dtype=dtype)
    for name in ("hf", "orbax"):
        again = load_model(tmp_path / "out" / name, dtype=dtype)
        np.testing.assert_array_equal(logits(again), logits(expected))
        assert again.config == trained.config and again.tokenizer.eos_ids == trained.tokenizer.eos_ids
        assert (tmp_path / "out" / name / "README.md").read_text() == CARD
    assert json.loads((tmp_path / "out" / "hf" / "config.json").read_text())["dtype"] == dtype
    weights = load_model(tmp_path / "out" / "hf", dtype="float32").params["embedding"]  # as stored, not as asked for
    np.testing.assert_array_equal(weights, trained.params["embedding"].astype(dtype).astype(jnp.float32))


@pytest.mark.parametrize("name", ["hf", "orbax"])
def test_one_format_alone_is_the_folder_itself(tmp_path, folder, name):
    export_model(tmp_path / "out", load_model(folder), formats=(name,))
    assert (tmp_path / "out" / "README.md").read_text() == CARD
    np.testing.assert_array_equal(logits(load_model(tmp_path / "out")), logits(load_model(folder)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"formats": ("hf", "orbx")}, "unknown export format 'orbx'; did you mean 'orbax'"),
        ({"formats": ()}, "export needs a format"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"dtype": "float16"}, "parameter norm/scale is not finite in float16"),
    ],
)
def test_a_bad_export_leaves_nothing(tmp_path, trained, options, match):
    params = dict(trained.params) | {"norm": {"scale": trained.params["norm"]["scale"] + 1e6}}
    with pytest.raises(ValueError, match=match):
        export_model(tmp_path / "out", trained._replace(params=params), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_card_says_what_is_given():
    figures = {
        "qa": {"agreement": (0.412, 0.38, 0.444), "at 0.7": 0.5},
        "math|1": {"at 0.7": (0.25, float("nan"), 0.0)},
    }
    given = {"name": "small", "parameters": 15_140_864, "base_model": "org/target: 1", "recipe": {"betas": (0.9, 0.95)}}
    card = model_card(given | {"figures": figures})
    assert '"org/target: 1"' in card and "15,140,864" in card and "betas: 0.9, 0.95" in card and "license" not in card
    assert card.endswith("| qa | 0.41 [0.38, 0.44] | 0.5 |\n| math\\|1 | – | 0.25 |\n")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"summary": "x"}, "needs a name"),
        ({"name": "x", "reciep": "y"}, "no field 'reciep'; did you mean 'recipe'"),
        ({"name": "x", "figures": {"qa": 0.5}}, "map a task to a mapping"),
    ],
)
def test_a_card_refuses_what_it_cannot_say(fields, match):
    with pytest.raises(ValueError, match=match):
        model_card(fields)
