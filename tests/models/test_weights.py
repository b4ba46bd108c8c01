"""Parts of models: checkpoints that fit or are refused by name, and attention by blocks of keys."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_llama import CONFIG, random_named, variant

from specdec_jax.models import llama, weights
from specdec_jax.models.attention import LONG, Scoring, alibi, alibi_slopes, attend, attend_by_blocks, causal_mask

TIED = variant(tie_word_embeddings=True)
EMBEDDING, QUERY, GATE = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "mlp.gate_proj.weight"


@pytest.mark.parametrize("given", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_every_leaf_has_the_wanted_dtype(given, wanted):
    named = {name: array.astype(given) for name, array in random_named(CONFIG).items()}
    params = llama.params_from_named(CONFIG, named, wanted)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    np.testing.assert_array_equal(params["embedding"], named[EMBEDDING].astype(wanted))


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (CONFIG, {"model.layers.2.mlp.up_proj.weight": np.zeros((40, 24))}, "unknown: model.layers.2.mlp.up_proj"),
        (CONFIG, {QUERY: None}, f"missing: {QUERY}"),
        (CONFIG, {QUERY: np.zeros((16, 24), np.float32)}, rf"wrong shape: {QUERY} \(16, 24\) instead of \(32, 24\)"),
        (CONFIG, {QUERY: np.zeros((32, 24), np.int8)}, f"not floating: {QUERY} int8"),
        (CONFIG, {"lm_head.weight": None}, "missing: lm_head.weight"),
        (TIED, {"lm_head.weight": np.zeros((60, 24), np.float32)}, r"wrong shape: lm_head.weight \(60, 24\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(config, change, message):
    named = {name: array for name, array in (random_named(config) | change).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        llama.params_from_named(config, named, jnp.float32)


def test_every_fault_is_listed_long_lists_are_cut_and_other_shapes_are_not_written():
    named = {name: array for name, array in random_named(CONFIG).items() if GATE not in name and "layers.0" not in name}
    with pytest.raises(ValueError, match="unknown: x;.*missing: .* and 12 more; duplicate: x") as error:
        llama.params_from_named(CONFIG, [*named.items(), ("x", np.zeros(1)), ("x", np.zeros(1))], jnp.float32)
    assert str(error.value).count("layers.") <= 2 * weights.SHOWN
    params = llama.init_params(CONFIG, jax.random.key(0), jnp.float32)
    with pytest.raises(ValueError, match=r"embedding, model.embed_tokens.weight, has shape \(60, 24\)"):
        llama.named_from_params(CONFIG, params | {"embedding": params["embedding"][:60]})


def test_what_a_checkpoint_carries_besides_is_dropped_and_its_memory_is_not_shared():
    """On CPU jax may take a host array without copying it; who reuses its buffer must not change the model."""
    extra = {"model.rotary_emb.inv_freq": np.zeros(4), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4)}
    named = random_named(TIED)
    plain = llama.params_from_named(TIED, named, jnp.float32)
    params = llama.params_from_named(TIED, named | extra | {"lm_head.weight": named[EMBEDDING]}, jnp.float32)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), plain, params))
    named = random_named(CONFIG)
    params = llama.params_from_named(CONFIG, named, jnp.float32)
    before = np.array(params["embedding"])
    named[EMBEDDING][:] = 0
    np.testing.assert_array_equal(params["embedding"], before)


def inputs(batch, width, heads, kv_heads, slots, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    query = draw(batch, width, heads, head_dim)
    return query, draw(batch, kv_heads, slots, head_dim), draw(batch, kv_heads, slots, head_dim)


@pytest.mark.parametrize(
    ("slots", "block", "start", "scoring"),
    [
        *((slots, block, [0, 3], Scoring()) for slots, block in ((24, 8), (27, 8), (20, 64), (9, 4))),
        (27, 8, [9, 20], Scoring(bias=functools.partial(alibi, alibi_slopes(6)))),
        (27, 8, [9, 20], Scoring(scale=0.5, cap=0.8)),
    ],
)
def test_blocks_are_the_whole(slots, block, start, scoring):
    """No key of a block behind the last query is read. A bias goes by the distance: later blocks lie farther off."""
    query, keys, values = inputs(2, 5, 6, 2, slots)
    unread, start = -(-(max(start) + 5) // block) * block, jnp.array(start, jnp.int32)
    mask = causal_mask(start, 5, slots, None)
    expected = attend(query, keys, values, mask, start, scoring)
    poisoned = [buffer.at[:, :, unread:].set(jnp.nan) for buffer in (keys, values)]
    found = attend_by_blocks(query, *poisoned, mask, start, scoring, block=block)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert scoring == Scoring() or np.abs(expected - attend(query, keys, values, mask, start)).max() > 0.01


def test_a_given_mask_is_kept():
    """Random masks, whole blocks masked among them; every row sees a key somewhere."""
    query, keys, values = inputs(2, 5, 4, 4, 27)
    rng = np.random.default_rng(1)
    mask = rng.random((2, 5, 27)) < 0.3
    mask[:, :, :9], mask[:, :, 20] = False, True
    mask = jnp.asarray(mask)
    start = jnp.array([22, 22], jnp.int32)
    found = attend_by_blocks(query, keys, values, mask, start, Scoring(), block=8)
    np.testing.assert_allclose(found, attend(query, keys, values, mask, start), rtol=2e-5, atol=1e-6)


def test_a_long_pass_is_many_short_ones():
    """A model fed LONG tokens at once, behind others, has the cache and the logits of one fed a few at a time."""
    model, slots = llama.language_model(CONFIG, jnp.float32), 2 * LONG
    params = llama.init_params(CONFIG, jax.random.key(0), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (2, LONG + 16)), jnp.int32)
    apply = jax.jit(model.apply)
    logits, cache = apply(params, tokens[:, :16], model.init_cache(params, 2, slots))
    long_logits, long = apply(params, tokens[:, 16:], cache)
    parts = []
    for first in range(16, LONG + 16, 16):
        logits, cache = apply(params, tokens[:, first : first + 16], cache)
        parts.append(logits)
    np.testing.assert_allclose(long_logits, jnp.concatenate(parts, axis=1), rtol=1e-4, atol=1e-5)
    for one, other in zip(long.keys, cache.keys, strict=True):
        np.testing.assert_allclose(one[:, :, : LONG + 16], other[:, :, : LONG + 16], rtol=1e-4, atol=1e-5)
