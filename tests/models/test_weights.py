"""Claim: a checkpoint either fits the model exactly or is refused, by name, and what was read can be written back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from specdec_jax.models import llama, weights
from specdec_jax.models.weights import Fused, Parameter

CONFIG = llama.example_config()
TIED = llama.LlamaConfig(**(vars(CONFIG) | {"tie_word_embeddings": True}))
EMBEDDING, QUERY, GATE = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "mlp.gate_proj.weight"


def named_weights(config=CONFIG, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=p.shape).astype(dtype) for name, p in llama.parameter_table(config).items()}


def test_the_table_names_what_hugging_face_writes():
    names = set(llama.parameter_table(CONFIG))
    linear = ["self_attn." + n for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linear += ["mlp." + n for n in ("gate_proj", "up_proj", "down_proj")]
    expected = {EMBEDDING, "model.norm.weight", "lm_head.weight"}
    for i in range(2):
        expected |= {f"model.layers.{i}.{n}.{kind}" for n in linear for kind in ("weight", "bias")}
        expected |= {f"model.layers.{i}.{n}_layernorm.weight" for n in ("input", "post_attention")}
    assert names == expected
    assert set(llama.parameter_table(TIED)) == expected - {"lm_head.weight"}


def test_the_table_fills_the_tree_that_the_module_makes():
    made = jax.tree.map(jnp.shape, llama.init_params(CONFIG, jax.random.key(0), jnp.float32))
    read = jax.tree.map(jnp.shape, llama.params_from_named(CONFIG, named_weights(), jnp.float32))
    assert made == read


def test_fused_leaves_hold_their_parts_in_order():
    named = named_weights()
    params = llama.params_from_named(CONFIG, named, jnp.float32)
    query, key, value = (named[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    size, group = CONFIG.head_dim, 2
    fused = params["layer_1"]["attention"]["qkv"]["kernel"].reshape(CONFIG.num_key_value_heads, group + 2, size, -1)
    for kv in range(CONFIG.num_key_value_heads):
        heads = query[kv * group * size : (kv + 1) * group * size].reshape(group, size, -1)
        np.testing.assert_array_equal(fused[kv, :group], heads)
        np.testing.assert_array_equal(fused[kv, group], key[kv * size : (kv + 1) * size])
        np.testing.assert_array_equal(fused[kv, group + 1], value[kv * size : (kv + 1) * size])
    gates = np.asarray(params["layer_1"]["mlp"]["gate_up"]["kernel"]).reshape(8, 2, 5, -1)
    for index, kind in enumerate(("gate", "up")):
        rows = gates[:, index].reshape(CONFIG.intermediate_size, -1)
        np.testing.assert_array_equal(rows, named[f"model.layers.1.mlp.{kind}_proj.weight"])


@pytest.mark.parametrize("given", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_every_leaf_has_the_wanted_dtype(given, wanted):
    named = named_weights(dtype=given)
    params = llama.params_from_named(CONFIG, named, wanted)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    np.testing.assert_array_equal(params["embedding"], named[EMBEDDING].astype(wanted))


@pytest.mark.parametrize("lazily", [False, True])
def test_round_trip_through_a_file(tmp_path, lazily):
    named = named_weights(dtype=ml_dtypes.bfloat16)
    given = reversed(named.items()) if lazily else {name: jnp.asarray(array) for name, array in named.items()}
    params = llama.params_from_named(CONFIG, given, jnp.bfloat16)
    safetensors.save_file(llama.named_from_params(CONFIG, params), tmp_path / "model.safetensors")
    again = safetensors.load_file(tmp_path / "model.safetensors")
    assert again.keys() == named.keys()
    assert all(again[name].dtype == named[name].dtype for name in named)
    assert all((again[name] == named[name]).all() for name in named)


def test_parameters_do_not_share_memory_with_the_checkpoint():
    """On CPU jax may take a host array without copying it; a caller who reuses its buffer must not change the model."""
    named = named_weights()
    params = llama.params_from_named(CONFIG, named, jnp.float32)
    before = np.array(params["embedding"])
    named[EMBEDDING][:] = 0
    np.testing.assert_array_equal(params["embedding"], before)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            CONFIG,
            {"model.layers.2.mlp.up_proj.weight": np.zeros((40, 24))},
            "unknown: model.layers.2.mlp.up_proj.weight",
        ),
        (CONFIG, {QUERY: None}, f"missing: {QUERY}"),
        (CONFIG, {QUERY: np.zeros((16, 24), np.float32)}, rf"wrong shape: {QUERY} \(16, 24\) instead of \(32, 24\)"),
        (CONFIG, {QUERY: np.zeros((32, 24), np.int8)}, f"not floating: {QUERY} int8"),
        (CONFIG, {"lm_head.weight": None}, "missing: lm_head.weight"),
        (TIED, {"lm_head.weight": np.zeros((60, 24), np.float32)}, r"wrong shape: lm_head.weight \(60, 24\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(config, change, message):
    named = {name: array for name, array in (named_weights(config) | change).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        llama.params_from_named(config, named, jnp.float32)


def test_every_fault_is_told_at_once_and_long_lists_are_cut():
    named = {name: array for name, array in named_weights().items() if GATE not in name and "layers.0" not in name}
    with pytest.raises(ValueError, match="unknown: x;.*missing: .* and 12 more; duplicate: x") as error:
        llama.params_from_named(CONFIG, [*named.items(), ("x", np.zeros(1)), ("x", np.zeros(1))], jnp.float32)
    assert str(error.value).count("layers.") <= 2 * weights.SHOWN


def test_what_checkpoints_may_carry_besides_is_dropped():
    extra = {"model.rotary_emb.inv_freq": np.zeros(4), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4)}
    named = named_weights(TIED)
    plain = llama.params_from_named(TIED, named, jnp.float32)
    params = llama.params_from_named(TIED, named | extra | {"lm_head.weight": named[EMBEDDING]}, jnp.float32)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), plain, params))


def test_parameters_of_another_shape_are_not_written():
    params = llama.init_params(CONFIG, jax.random.key(0), jnp.float32)
    with pytest.raises(ValueError, match=r"embedding, model.embed_tokens.weight, has shape \(60, 24\)"):
        llama.named_from_params(CONFIG, params | {"embedding": params["embedding"][:60]})


def test_a_family_needs_only_a_table():
    table = {
        "a": Parameter(("x", "y"), (2, 3), Fused((1, 3, 1), (slice(2),))),
        "b": Parameter(("x", "y"), (1, 3), Fused((1, 3, 1), (2,))),
    }
    named = {"a": np.ones((2, 3), np.float32), "b": np.zeros((1, 3), np.float32)}
    params = weights.params_from_named(table, named, jnp.float32)
    assert params["x"]["y"].tolist() == [[1] * 3, [1] * 3, [0] * 3]
    assert weights.named_from_params(table, params)["b"].tolist() == [[0] * 3]
