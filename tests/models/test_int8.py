"""Claim: an int8 model is exactly the model of its rounded matrices, in every family, and rounds to the nearest."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llama import CONFIG, one_pass, random_named, random_tokens, variant
from tiny_reading import reads_at_all_positions

from specdec_jax import ModelParams, build_decoder
from specdec_jax.drafters.draft_models.intersection import shared_params, with_shared_tokens
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading.families import family, family_names
from specdec_jax.models import int8, layers, llama
from specdec_jax.models.adapters import with_source
from specdec_jax.models.int8 import Int8, as_float32, is_matrix, rounded
from specdec_jax.models.weights import num_bytes
from specdec_jax.stopping import static
from specdec_jax.types import DraftModel
from specdec_jax.verification import rejection

pytestmark = pytest.mark.usefixtures("exact_products")
KEPT = {"positions", "scale", "bias", "mask"}
"""Last names of what is never int8, whatever its axes; and routers."""
FAMILIES = family_names()


def walked(tree):
    return jax.tree.leaves_with_path(tree, is_leaf=is_matrix)


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_a_row_is_rounded_to_its_nearest_values():
    rng = np.random.default_rng(0)
    matrix = (rng.normal(size=(40, 33)) * 10.0 ** rng.integers(-6, 6, (40, 1))).astype(np.float32)
    matrix[7], matrix[8, 0] = 0.0, 1e-44
    values, scale = rounded(matrix)
    assert values.dtype == np.int8 and scale.dtype == np.float32
    wide, rows = scale.astype(np.float64)[:, None], np.delete(np.arange(40), 7)
    assert (np.abs(values[rows]).max(axis=1) == 127).all() and (values[7] == 0).all() and (scale > 0).all()
    assert (np.abs(values * wide - matrix) <= wide * 0.50001).all()
    np.testing.assert_allclose(scale[rows], np.abs(matrix[rows]).max(axis=1) / 127, rtol=1e-6)


@pytest.mark.parametrize("together", [1, 70])
def test_rows_that_are_rounded_together_do_not_matter(together, monkeypatch):
    matrix = np.random.default_rng(1).normal(size=(11, 24)).astype(jnp.bfloat16)
    whole = rounded(matrix)
    monkeypatch.setattr(int8, "TOGETHER", together)
    for one, other in zip(whole, rounded(matrix), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(wrong):
    named = random_named(CONFIG)
    named["model.layers.1.mlp.down_proj.weight"][3, 4] = wrong
    with pytest.raises(ValueError, match="tensor model.layers.1.mlp.down_proj.weight: weights that are not finite"):
        llama.params_from_named(CONFIG, named, jnp.float32, int8=True)


def test_no_more_than_a_few_tensors_are_there_unrounded():
    """Tensors that are made as they are asked for, as of a file: 24 layers, of which one at a time is in float32."""
    config = variant(num_hidden_layers=24, hidden_size=96, intermediate_size=256, vocab_size=64)
    table = llama.parameter_table(config)

    def named():
        for name, one in table.items():
            yield name, np.full(one.shape, 0.5, np.float32)

    tracemalloc.start()
    params = llama.params_from_named(config, named(), jnp.bfloat16, int8=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes(table, jnp.bfloat16, int8=True) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert peak < 0.8 * num_bytes(table, jnp.bfloat16)


# --- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_the_model_of_its_rounded_matrices(name, monkeypatch):
    """Bit for bit where scales multiply exactly, operation by operation: compiled, sums would be taken otherwise.

    24 tokens at once, and of mixtures few enough, too, that experts are picked.
    """
    monkeypatch.setattr(layers, "FEW", 0)
    module = family(name)
    config = module.example_config()
    named = random_named(config, seed=3, scale=0.2)
    model = module.language_model(config, jnp.float32)
    model = reads_at_all_positions(model) if isinstance(model, DraftModel) else model
    model = model if model.spec.source is None else with_source(model, [3, 1, 4, 1, 5])
    exact = lambda leaf: Int8(leaf.values, 2.0 ** jnp.round(jnp.log2(leaf.scale))) if is_matrix(leaf) else leaf  # noqa: E731
    params = jax.tree.map(exact, module.params_from_named(config, named, jnp.float32, int8=True), is_leaf=is_matrix)
    for path, leaf in walked(params):
        names = [key.key for key in path]
        plain = names[-1] in KEPT or "router" in names
        assert is_matrix(leaf) != plain, names
        assert not is_matrix(leaf) or leaf.scale.shape == leaf.values.shape[:-1], names
    picks = any("router" in str(path) for path, _ in walked(params))
    few = [random_tokens(1, 2, model.spec.vocab_size)] if picks else []
    for tokens in (random_tokens(2, 12, model.spec.vocab_size), *few):
        with jax.disable_jit():
            wide = jax.tree.map(lambda leaf: as_float32(leaf) if is_matrix(leaf) else leaf, params, is_leaf=is_matrix)
            found, expected = (
                model.apply(own, tokens, model.init_cache(own, *tokens.shape))[0] for own in (params, wide)
            )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, layers.FEW, layers.FEW + 1])
def test_a_product_of_few_rows_is_that_of_many(rows, dtype):
    """Inputs are rounded to the dtype, weights and sums are not."""
    rng = np.random.default_rng(rows)
    kernel = Int8(*map(jnp.asarray, rounded(rng.normal(size=(40, 24)).astype(np.float32))))
    x = jnp.asarray(rng.normal(size=(1, rows, 24)), jnp.float32)
    exact = np.asarray(x.astype(dtype), np.float64) @ np.asarray(as_float32(kernel), np.float64).T
    np.testing.assert_allclose(jax.jit(layers.project, static_argnums=2)(x, kernel, dtype), exact, atol=1e-5)


def test_no_unrounded_matrix_stays_in_memory_during_a_generation():
    """XLA would take the conversions out of the loop over rounds: more temporary memory than int8 saves."""
    config = variant(vocab_size=512, hidden_size=128, intermediate_size=512)
    model = llama.language_model(config, jnp.bfloat16)
    params = llama.params_from_named(config, random_named(config), jnp.bfloat16, int8=True)
    both = ModelParams(params, params)
    parts = model, drafter_of(model, 3), static(draft_length=3), rejection()
    decoder = build_decoder(*parts, verification_widths=(4,), prefill_chunk=4)
    state = decoder.prefill(both, [[1, 2, 3]], max_new_tokens=8, stop_ids=())
    memory = decoder.jitted["run"].lower(both, state, np.int32(1), np.int32(1)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * num_bytes(llama.parameter_table(config), jnp.int8)


# --- drafters that read rows of the head ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_reduced_head_has_the_logits_of_the_whole_one(dtype):
    model = llama.language_model(CONFIG, dtype)
    params = llama.params_from_named(CONFIG, random_named(CONFIG), dtype, int8=True)
    some, tokens = [3, 9, 11, 40], random_tokens(2, 6)
    reduced = with_reduced_head(model, most_local=8)
    few = reduce_params(model, params, some)
    whole, found = (np.asarray(one_pass(one, own, tokens)[0]) for one, own in ((model, params), (reduced, few)))
    proposed = np.isfinite(found)
    local = [set(some) | set(map(int, row)) for row in np.asarray(tokens)]
    assert [set(np.flatnonzero(proposed[row, -1])) for row in range(2)] == local
    np.testing.assert_allclose(found[proposed], whole[proposed], atol=1e-5 if dtype == jnp.float32 else 0.05)
    assert is_matrix(few.kernel) and few.kernel.scale.shape == (4,)
    assert few.unread_bytes == CONFIG.vocab_size * (CONFIG.hidden_size + 4) + few.place.nbytes


def test_shared_tokens_have_the_logits_of_the_whole_head():
    model = llama.language_model(CONFIG, jnp.float32)
    params = llama.params_from_named(CONFIG, random_named(CONFIG), jnp.float32, int8=True)
    own = np.arange(CONFIG.vocab_size, dtype=np.int32)[::-1].copy()
    own[::3] = -1
    pieces, count = np.where(own >= 0, own, 5)[:, None], np.ones(CONFIG.vocab_size, np.int32)
    shared = with_shared_tokens(model, CONFIG.vocab_size)
    few = shared_params(model, params, own, pieces, count)
    tokens = random_tokens(1, 6)
    whole = np.asarray(one_pass(model, params, jnp.asarray(pieces[np.asarray(tokens), 0]), 96)[0])
    found = np.asarray(one_pass(shared, few, tokens)[0])
    there = own >= 0
    np.testing.assert_allclose(found[..., there], whole[..., own[there]], atol=1e-5)
    assert np.isneginf(found[..., ~there]).all() and is_matrix(few.kernel)
