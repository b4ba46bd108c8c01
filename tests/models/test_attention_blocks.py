"""Attention by blocks of keys is attention: whatever is masked, and however blocks and slots divide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models import llama
from specdec_jax.models.attention import LONG, Scoring, alibi, alibi_slopes, attend, attend_by_blocks, causal_mask


def inputs(batch, width, heads, kv_heads, slots, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    query = draw(batch, width, heads, head_dim)
    return query, draw(batch, kv_heads, slots, head_dim), draw(batch, kv_heads, slots, head_dim)


@pytest.mark.parametrize(("slots", "block"), [(24, 8), (27, 8), (20, 64), (9, 4)])
def test_blocks_are_the_whole(slots, block):
    query, keys, values = inputs(2, 5, 6, 2, slots)
    start = jnp.array([0, 3], jnp.int32)
    mask = causal_mask(start, 5, slots, None)
    expected = attend(query, keys, values, mask, start)
    poisoned = [buffer.at[:, :, 8:].set(jnp.nan) if block == 8 else buffer for buffer in (keys, values)]
    found = attend_by_blocks(query, *poisoned, mask, start, block=block)  # no key from slot 8 on is read
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "scoring",
    [Scoring(bias=functools.partial(alibi, alibi_slopes(6))), Scoring(scale=0.5, cap=0.8)],
    ids=["bias", "cap"],
)
def test_scores_of_every_block_are_biased_and_capped(scoring):
    """Keys of later blocks lie farther from the first slot than those of the first: a bias goes by the distance."""
    query, keys, values = inputs(2, 5, 6, 2, 27)
    start = jnp.array([9, 20], jnp.int32)
    mask = causal_mask(start, 5, 27, None)
    expected = attend(query, keys, values, mask, start, scoring)
    found = attend_by_blocks(query, keys, values, mask, start, scoring, block=8)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert np.abs(expected - attend(query, keys, values, mask, start)).max() > 0.01


def test_a_mask_of_ones_own_is_kept():
    """Random masks, whole blocks masked among them; every row sees a key somewhere."""
    query, keys, values = inputs(2, 5, 4, 4, 27)
    rng = np.random.default_rng(1)
    mask = rng.random((2, 5, 27)) < 0.3
    mask[:, :, :9], mask[:, :, 20] = False, True
    mask = jnp.asarray(mask)
    start = jnp.array([22, 22], jnp.int32)
    found = attend_by_blocks(query, keys, values, mask, start, block=8)
    np.testing.assert_allclose(found, attend(query, keys, values, mask, start), rtol=2e-5, atol=1e-6)


def test_a_long_pass_is_many_short_ones():
    """A model fed LONG tokens at once, behind others, has the cache and the logits of one fed a few at a time."""
    config = llama.example_config()
    model, slots = llama.language_model(config, jnp.float32), 2 * LONG
    params = llama.init_params(config, jax.random.key(0), jnp.float32)
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
