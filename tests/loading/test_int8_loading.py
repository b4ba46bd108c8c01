"""int8 from a name: of every format that holds tensors apart, told by what is loaded, and never saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_weights as tiny
from refusals import assert_says, refusal
from tiny_pair import ONE_LAYER, write_pair

from specdec_jax.contrib.gguf_writer import save_gguf
from specdec_jax.distillation.exporting import export
from specdec_jax.distillation.initial import Shape, initial_params
from specdec_jax.loading import load_model, save_hf_folder, save_orbax
from specdec_jax.models.int8 import as_float32, is_matrix
from specdec_jax.stopping import static
from specdec_jax.text.calibration import fingerprint
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("int8")
    return tiny.write_folder(place / "tiny", tiny.weights(ONE_LAYER), ONE_LAYER)


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, dtype="int8")


def test_what_is_loaded_says_what_it_is_from_a_folder_or_a_gguf_file(loaded, tmp_path, folder):
    file = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.weights(ONE_LAYER), ONE_LAYER)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, load_model(file, dtype="int8").params)
    whole = load_model(folder, dtype="float32")
    assert [one.dtype for one in (loaded, whole)] == ["int8", "float32"]
    cache = loaded.model.init_cache(loaded.params, 1, 4)
    assert cache.keys[0].dtype == loaded.params["norm"]["scale"].dtype == jnp.bfloat16
    here, there = fingerprint(loaded.params), fingerprint(whole.params)
    assert here["parameters"] == there["parameters"]  # so that a calibration of the pair is still its own
    assert here["scale"] == pytest.approx(there["scale"], rel=2e-3)


def test_int8_weights_are_never_saved_nor_made_of_an_orbax_checkpoint(loaded, tmp_path, folder):
    given = loaded.config, loaded.params, loaded.tokenizer
    for save in (save_hf_folder, save_orbax, save_gguf, lambda *args: export(*args, card="x")):
        with pytest.raises(ValueError, match="int8 weights are made at loading and never saved"):
            save(tmp_path / "out", *given)
        assert not (tmp_path / "out").exists()
    whole = load_model(folder, dtype="float32")
    save_orbax(tmp_path / "orbax", whole.config, whole.params, whole.tokenizer)
    message = refusal(str(tmp_path / "orbax"), dtype="int8")
    assert_says(message, tmp_path / "orbax", "Orbax", "int8 is made of safetensors and GGUF")


@pytest.mark.parametrize("init", ["first_layers", "projection"])
def test_a_drafter_can_begin_from_an_int8_target(loaded, init):
    shape, counts = Shape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, hidden=48, init=init), np.ones(272)
    exact = jax.tree.map(as_float32, loaded.params, is_leaf=is_matrix)
    found, expected = (initial_params(shape, loaded.config, own, counts, 0) for own in (loaded.params, exact))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("drafter", ["int8", "bfloat16"])
def test_a_pair_drafts_with_int8_weights(tmp_path, drafter):
    """Its target, and its drafter, too, unless that is given loaded otherwise; drafts are accepted."""
    target, small = write_pair(tmp_path)
    given = small if drafter == "int8" else load_model(small, dtype=drafter)
    more = {"policy": static(draft_length=3), "costs": "estimated", "max_draft_length": 3}
    pair = build_pair(target, given, dtype="int8", **more)
    found = [any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(params)) for params in pair.params[:2]]
    assert found == [True, drafter == "int8"]
    result = generate("hello", SamplingParams(max_new_tokens=24), pair=pair, chat=False)
    assert result.statistics["num_accepted_tokens"] > 0
