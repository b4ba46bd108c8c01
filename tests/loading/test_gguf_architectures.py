"""GGUF files of every architecture: the same model as the Hugging Face folder, read and written, or refused."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_converter
import tiny_weights as tiny
from refusals import assert_says, refusal

from specdec_jax.contrib.gguf_writer import save_gguf
from specdec_jax.loading import load_model
from specdec_jax.loading.gguf.architectures import ARCHITECTURES, MIXTURES
from specdec_jax.loading.gguf.file import config_from_gguf
from specdec_jax.loading.gguf.reader import dequantise, read_gguf
from specdec_jax.models.config import FULL, SLIDING

PLAIN = {"sliding_window": None, "layer_types": None}
LINEAR = {"rope_type": "linear", "factor": 8.0}
CHANGES = {  # of a family's example, to what files of its architecture say
    "qwen2": PLAIN | {"head_dim": 6, "rope_theta": 1e6},
    "qwen3": PLAIN | {"attention_bias": False, "tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.5},
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 7,
        "layer_types": (SLIDING,) * 5 + (FULL, SLIDING),
        "rope_scaling": LINEAR,
        "rope_local_base_freq": 500.0,
        "final_logit_softcapping": 4.0,
    },
    "gpt2": {},
    "llama": {"head_dim": 8, "rope_scaling": None, "attention_bias": False, "mlp_bias": False},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": PLAIN | {"attention_bias": False, "mlp_only_layers": (), "norm_topk_prob": True},
}
WRITTEN = [name for name in CHANGES if name not in ("mixtral", "qwen3_moe")]


def example(family: str, **more):
    """A config of the family with the tiny tokenizer's ids."""
    config = importlib.import_module(f"specdec_jax.models.{family}").example_config()
    ids = {"vocab_size": len(tiny.vocabulary()), "bos_token_id": 1, "eos_token_ids": (2,)}
    return dataclasses.replace(config, **ids | CHANGES[family] | more)


def random_named(config) -> dict[str, np.ndarray]:
    """Checkpoint tensors; all are multiples of 2^-10, so that one more of a norm's is exact."""
    module, rng = importlib.import_module(type(config).__module__), np.random.default_rng(0)
    shapes = {name: parameter.shape for name, parameter in module.parameter_table(config).items()}
    return {name: (rng.integers(-600, 600, shape) / 1024).astype(np.float32) for name, shape in shapes.items()}


def folder(tmp_path, config):
    return tiny.write_folder(tmp_path / "folder", random_named(config), config.to_hf())


def converted(tmp_path, config, **changes):
    return tiny_converter.convert(tmp_path / "converted.gguf", random_named(config), config.to_hf(), **changes)


def assert_equal_trees(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


def test_every_architecture_is_here():
    served = {one.model_type for one in (*ARCHITECTURES.values(), *MIXTURES.values())}
    assert served == {*CHANGES, "llama_reading"}


@pytest.mark.parametrize("family", CHANGES)
def test_a_converted_file_is_the_folders_model(tmp_path, family):
    config = example(family)
    theirs, ours = (
        load_model(path, dtype="float32") for path in (folder(tmp_path, config), converted(tmp_path, config))
    )
    assert ours.config == theirs.config == config
    assert_equal_trees(ours.params, theirs.params)
    tokens = jnp.arange(3, 15)[None]  # longer than the windows
    one, other = (np.asarray(jax.jit(m.model.apply)(m.params, tokens, None)[0]) for m in (ours, theirs))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", WRITTEN)
def test_what_is_written_is_the_converters_file_and_comes_back(tmp_path, family):
    config = example(family)
    loaded = load_model(folder(tmp_path, config), dtype="float32")
    save_gguf(tmp_path / "ours.gguf", config, loaded.params, loaded.tokenizer, kind="F32")
    ours, theirs = read_gguf(tmp_path / "ours.gguf"), read_gguf(converted(tmp_path, config))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        np.testing.assert_array_equal(dequantise(ours, name), dequantise(theirs, name), err_msg=name)
    for name, value in theirs.metadata.items():
        np.testing.assert_array_equal(ours.metadata[name], value, err_msg=name)
    again = load_model(tmp_path / "ours.gguf", dtype="float32")
    assert again.config == config
    assert_equal_trees(again.params, loaded.params)


def test_a_head_of_its_own_and_quantised_matrices(tmp_path):
    """GPT-2's matrices are turned before they are quantised, and its positions stay in float32."""
    config = example("gpt2", tie_word_embeddings=False, hidden_size=96, intermediate_size=64)
    loaded = load_model(folder(tmp_path, config), dtype="float32")
    save_gguf(tmp_path / "m.gguf", config, loaded.params, loaded.tokenizer, kind="Q8_0")
    kinds = {name: info.kind.name for name, info in read_gguf(tmp_path / "m.gguf").tensors.items()}
    assert kinds["position_embd.weight"] == "F32" and kinds["output.weight"] == kinds["blk.1.ffn_down.weight"] == "Q8_0"
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    assert again.config == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.004), again.params, loaded.params)


def settings(path, **options):
    config = example(options.pop("family"))
    return config_from_gguf(
        read_gguf(tiny_converter.convert(path / "s.gguf", random_named(config), config.to_hf(), **options))
    )


def test_gemmas_largest_models_scale_queries_otherwise(tmp_path):
    for family, layers in (("gemma2", 46), ("gemma3_text", 62)):
        assert settings(tmp_path, family=family, block_count=layers)["query_pre_attn_scalar"] == 24 // 4
        assert settings(tmp_path, family=family, block_count=layers - 1)["query_pre_attn_scalar"] == 8


def test_gemmas_layers_with_windows(tmp_path):
    def kinds(family, **options):
        found = settings(tmp_path, family=family, **options)["layer_types"]
        return "".join("s" if kind == SLIDING else "F" for kind in found)

    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    assert kinds("gemma2", block_count=5) == "sFsFs"
    assert kinds("gemma3_text", block_count=13) == "sssssFsssssFs"
    assert kinds("gemma3_text", block_count=5, **{pattern: 2}) == "sFsFs"
    assert kinds("gemma3_text", block_count=3, **{pattern: [True, False, False]}) == "sFF"
    assert kinds("gemma3_text", block_count=7, **{window: None}) == "FFFFFFF"
    assert settings(tmp_path, family="gemma2", **{window: None})["sliding_window"] == 4096
    assert settings(tmp_path, family="gemma3_text", **{"rope.freq_base_swa": None})["rope_local_base_freq"] == 10000.0


@pytest.mark.parametrize("kinds", [(FULL, FULL, *(SLIDING,) * 5), (FULL,) * 7])
def test_layers_in_another_order_are_written_as_they_are(tmp_path, kinds):
    config = example("gemma3_text", layer_types=kinds, sliding_window=5 if SLIDING in kinds else 4096)
    loaded = load_model(folder(tmp_path, config), dtype="float32")
    save_gguf(tmp_path / "m.gguf", config, loaded.params, loaded.tokenizer, kind="F32")
    assert load_model(tmp_path / "m.gguf").config == config
    stated = "gemma3.attention.sliding_window" in read_gguf(tmp_path / "m.gguf").metadata
    assert stated == (SLIDING in kinds)  # llama.cpp does not take one for layers that are all global


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("qwen2", {"sliding_window": 5, "layer_types": (FULL, SLIDING)}, ["layer_kinds", "sliding_attention"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias True"]),
        ("gemma2", {"query_pre_attn_scalar": 9}, ["query_pre_attn_scalar 9", "8"]),
        ("gemma2", {"layer_types": (FULL, FULL)}, ["no layer has a window"]),
        ("gemma3_text", {"hidden_act": "silu"}, ["hidden_activation 'silu'", "'gelu_pytorch_tanh'"]),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights False"]),
        ("mixtral", {}, ["gemma2, gemma3_text, gpt2, llama", "MixtralConfig"]),
    ],
)
def test_configs_that_their_files_cannot_state(tmp_path, family, changes, parts):
    config = example(family, **changes)
    loaded = load_model(folder(tmp_path, config), dtype="float32")
    with pytest.raises(ValueError) as caught:
        save_gguf(tmp_path / "m.gguf", config, loaded.params, loaded.tokenizer)
    assert_says(str(caught.value), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("qwen2", {"expert_count": 4}, ["mixture of 4 experts", "'qwen2'"]),
        ("mixtral", {"expert_used_count": None}, ["lacks the hyper-parameter llama.expert_used_count"]),
        ("mixtral", {"expert_count": 15}, ["unknown: model.layers.0.block_sparse_moe.experts.15.w1.weight"]),
        ("gemma3_text", {"attention.sliding_window_pattern": [True]}, ["1 entries for 7 layers"]),
        ("gpt2", {"attention.layer_norm_epsilon": None}, ["lacks the hyper-parameter gpt2.attention.layer_norm"]),
        ("gpt2", {"context_length": 32}, ["wrong shape: transformer.wpe.weight (64, 24)"]),
        ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, ["'yarn'"]),
    ],
)
def test_files_that_are_not_served(tmp_path, family, changes, parts):
    path = converted(tmp_path, example(family), **changes)
    assert_says(refusal(path), path, *parts)
