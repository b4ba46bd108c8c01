"""Claim: a checkpoint either fits the model exactly or is refused, by name, and what was read can be written back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specdec_jax.models import llama, weights

CONFIG = llama.example_config()
TIED = llama.LlamaConfig(**(vars(CONFIG) | {"tie_word_embeddings": True}))
EMBEDDING, QUERY, GATE = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "mlp.gate_proj.weight"


def named_weights(config=CONFIG, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=p.shape).astype(dtype) for name, p in llama.parameter_table(config).items()}


@pytest.mark.parametrize("given", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_every_leaf_has_the_wanted_dtype(given, wanted):
    named = named_weights(dtype=given)
    params = llama.params_from_named(CONFIG, named, wanted)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    np.testing.assert_array_equal(params["embedding"], named[EMBEDDING].astype(wanted))


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


def test_every_fault_is_told_at_once_long_lists_are_cut_and_other_shapes_are_not_written():
    named = {name: array for name, array in named_weights().items() if GATE not in name and "layers.0" not in name}
    with pytest.raises(ValueError, match="unknown: x;.*missing: .* and 12 more; duplicate: x") as error:
        llama.params_from_named(CONFIG, [*named.items(), ("x", np.zeros(1)), ("x", np.zeros(1))], jnp.float32)
    assert str(error.value).count("layers.") <= 2 * weights.SHOWN
    params = llama.init_params(CONFIG, jax.random.key(0), jnp.float32)
    with pytest.raises(ValueError, match=r"embedding, model.embed_tokens.weight, has shape \(60, 24\)"):
        llama.named_from_params(CONFIG, params | {"embedding": params["embedding"][:60]})


def test_what_a_checkpoint_carries_besides_is_dropped_and_its_memory_is_not_shared():
    """On CPU jax may take a host array without copying it; who reuses its buffer must not change the model."""
    extra = {"model.rotary_emb.inv_freq": np.zeros(4), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4)}
    named = named_weights(TIED)
    plain = llama.params_from_named(TIED, named, jnp.float32)
    params = llama.params_from_named(TIED, named | extra | {"lm_head.weight": named[EMBEDDING]}, jnp.float32)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), plain, params))
    named = named_weights()
    params = llama.params_from_named(CONFIG, named, jnp.float32)
    before = np.array(params["embedding"])
    named[EMBEDDING][:] = 0
    np.testing.assert_array_equal(params["embedding"], before)
