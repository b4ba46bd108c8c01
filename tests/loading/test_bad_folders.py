"""Bad folders, of Hugging Face's kind and of ours: one message that names what is wrong, nothing half-written."""

import json

import numpy as np
import pytest
import tiny_weights as tiny
from refusals import assert_says, refusal
from safetensors.numpy import save_file

from specdec_jax.loading import hf_folder, load_model, save_hf_folder, save_orbax

EXTENDING = "docs/extending.md shows how to add one"

# Hugging Face folders


@pytest.fixture
def folder(tmp_path):
    return tiny.write_folder(tmp_path / "model", tiny.weights())


@pytest.fixture
def shards(tmp_path):
    return tiny.write_folder(tmp_path / "model", tiny.weights(), shards=3)


def edit(path, **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_folder_of_something_else(tmp_path):
    assert_says(refusal(tmp_path), tmp_path, "neither config.json nor specdec_jax.json")
    tiny.write_gguf(tmp_path / "inside.gguf", tiny.weights())
    assert_says(refusal(tmp_path), "give the file itself", tmp_path / "inside.gguf")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": None}, ["config.json has no model_type"]),
        ({"model_type": "lama"}, ["unknown model_type 'lama'", "did you mean 'llama'?", "there are", EXTENDING]),
        ({"model_type": "layers"}, ["unknown model_type 'layers'"]),  # a module of models/, but no family
        ({"hidden_act": "swish2"}, ["hidden_act", "'swish2'"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3"]),
        ({"partial_rotary_factor": 0.5}, ["0.5"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, ["'ntk'"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["config.json", "quantised", "'gptq'"]),
        ({"hidden_size": "64"}, ["hidden_size must be a whole number, got '64'"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings must be true or false, got 'no'"]),
        ({"rope_scaling": "linear"}, ["rope_scaling must be an object, got 'linear'"]),
        ({"rope_theta": 0}, ["rope_theta must be a number above 0, got 0"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta must be a number above 0, got 0"]),
        ({"eos_token_id": [2, 272]}, ["eos_token_id must be tokens, 0 to 271, got 272"]),
        ({"num_hidden_layers": 1}, ["unknown: model.layers.1."]),
        ({"num_hidden_layers": 3}, ["missing: model.layers.2."]),
        ({"vocab_size": 300}, ["wrong shape: model.embed_tokens.weight (272, 64) instead of (300, 64)"]),
        ({"tie_word_embeddings": False}, ["missing: lm_head.weight"]),
    ],
)
def test_config_that_does_not_fit(folder, changes, parts):
    edit(folder / "config.json", **changes)
    assert_says(refusal(folder), folder, *parts)


def test_weights_and_family_come_before_a_tokenizer_that_is_missing_too(folder):
    (folder / "tokenizer.json").unlink()
    assert_says(refusal(folder), "has no tokenizer.json")
    (folder / "model.safetensors").write_bytes(b"")
    assert_says(refusal(folder), f"{folder / 'model.safetensors'} is empty")
    save_file({}, folder / "model.safetensors")
    assert_says(refusal(folder), f"{folder / 'model.safetensors'} holds no tensors")
    (folder / "model.safetensors").unlink()
    assert_says(refusal(folder), "no such weight file")
    edit(folder / "config.json", model_type="lama")
    assert_says(refusal(folder), folder / "config.json", "unknown model_type 'lama'; did you mean 'llama'?")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"a": ', "[1]"])
def test_damaged_json(folder, name, content):
    (folder / name).write_text(content)
    assert_says(refusal(folder), folder / name, "damaged")


def test_missing_files(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_says(refusal(folder), "no such weight file", folder / "model.safetensors", "pytorch_model.bin is not read")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert_says(refusal(folder), folder, "no tokenizer.json", "tokenizer.model is not enough")


@pytest.mark.parametrize(
    "file", [None, 3, "", "../model.safetensors", "a/../../model.safetensors", "/model.safetensors"]
)
def test_index_of_files_that_are_not_in_the_folder(shards, file):
    edit(shards / "model.safetensors.index.json", weight_map=None if file is None else {"model.norm.weight": file})
    said = "no weight_map" if file is None else f"no file of the folder for model.norm.weight: {file!r}"
    assert_says(refusal(shards), shards / "model.safetensors.index.json", said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chat_template": ["{{ messages }}"]}, "chat_template must be a text"),
        ({"eos_token": 2}, "eos_token must be a text, got 2"),
    ],
)
def test_a_tokenizer_config_of_other_types(folder, changes, words):
    edit(folder / "tokenizer_config.json", **changes)
    assert_says(refusal(folder), folder / "tokenizer_config.json", words)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.999])
def test_truncated_safetensors(shards, keep):
    path = shards / "model-00002-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    assert_says(refusal(shards), path, "truncated")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model.norm.weight": np.full(64, np.nan, np.float32)}, ["tensor model.norm.weight has NaN or infinity"]),
        ({"lm_head.weight": np.ones((3, 64), np.float32)}, ["wrong shape: lm_head.weight (3, 64)"]),
    ],
)
def test_tensors_that_do_not_fit(folder, change, parts):
    save_file(tiny.weights() | change, folder / "model.safetensors")
    assert_says(refusal(folder), folder, *parts)


def test_tensor_in_two_shards(shards):
    first = shards / "model-00001-of-00003.safetensors"
    named = tiny.weights()
    save_file({name: named[name] for name in [*list(named)[::3], "model.norm.weight"]}, first)
    assert_says(refusal(shards), shards, "duplicate: model.norm.weight")


# Orbax folders


@pytest.fixture
def checkpoint(folder, tmp_path):
    loaded = load_model(folder)
    save_orbax(tmp_path / "ckpt", loaded.config, loaded.params, loaded.tokenizer)
    return tmp_path / "ckpt"


def test_orbax_of_another_format(checkpoint):
    edit(checkpoint / "specdec_jax.json", format=1)
    assert_says(refusal(checkpoint), checkpoint / "specdec_jax.json", "format 2")


def test_orbax_config_that_does_not_fit(checkpoint):
    marker = json.loads((checkpoint / "specdec_jax.json").read_text())
    edit(checkpoint / "specdec_jax.json", config=marker["config"] | {"vocab_size": 300})
    assert_says(
        refusal(checkpoint), checkpoint / "params", "does not fit", "embedding is (272, 64) instead of (300, 64)"
    )
    edit(checkpoint / "specdec_jax.json", config=marker["config"] | {"rms_norm_eps": "small"})
    assert_says(refusal(checkpoint), checkpoint / "specdec_jax.json", "rms_norm_eps must be a number")
    edit(checkpoint / "specdec_jax.json", model_type="lama")
    assert_says(refusal(checkpoint), checkpoint / "specdec_jax.json", "unknown model_type 'lama'", EXTENDING)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own, of reads it gave up
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_orbax_parameters_that_are_damaged(checkpoint, damage):
    files = [path for path in (checkpoint / "params").rglob("*") if path.is_file()]
    for path in files:
        if damage == "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
    assert_says(refusal(checkpoint), checkpoint / "params", "damaged")


# Saving


def test_parameters_of_another_model_are_not_saved(folder, tmp_path):
    loaded = load_model(folder)
    wide = load_model(tiny.write_folder(tmp_path / "w", tiny.weights(tiny.CONFIG | {"vocab_size": 300}), tiny.CONFIG
                                        | {"vocab_size": 300}))  # fmt: skip
    with pytest.raises(ValueError, match="embedding"):
        save_hf_folder(tmp_path / "out", loaded.config, wide.params, loaded.tokenizer)
    assert not (tmp_path / "out").exists()


def test_unwritable_place_is_named(folder, tmp_path):
    loaded = load_model(folder)
    (tmp_path / "file").write_text("in the way")
    for save in (save_hf_folder, save_orbax):
        with pytest.raises(OSError, match="file"):
            save(tmp_path / "file" / "out", loaded.config, loaded.params, loaded.tokenizer)


def test_tensors_are_read_part_by_part_each_from_a_file_opened_anew(folder, monkeypatch):
    """Pages that were read count as memory until a file is let go: a large one would be there twice."""
    opened, open_once = [], hf_folder._open
    monkeypatch.setattr(hf_folder, "_open", lambda path: opened.append(path) or open_once(path))
    tensors = dict(hf_folder.open_hf_folder(folder).named)
    before = len(opened)
    for number, tensor in enumerate(tensors.values(), 1):
        whole = tensor[...]
        assert (whole.shape, whole.dtype) == (tensor.shape, tensor.dtype) and len(opened) == before + 2 * number - 1
        np.testing.assert_array_equal(tensor[1:3], whole[1:3])
