"""Claim: an encoder reads its source once, whatever pads it, and cross-attention sees that and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals
from tiny_llama import one_pass, random_tokens
from tiny_t5 import CONFIG, TIED, padded, pair, random_named, random_sources, variant

from specdec_jax.contrib.encoder import mt5, t5
from specdec_jax.contrib.encoder.t5 import buckets
from specdec_jax.models.adapters import with_source

pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.mark.parametrize(("config", "slots"), [(CONFIG, 24), (TIED, 160)], ids=["gated", "tied, by blocks"])
def test_a_source_that_is_padded_is_read_as_alone(config, slots):
    """In a batch of several lengths, and in a bucket that is read by blocks; a token behind a cache too."""
    model, params, _ = pair(config)
    sources, tokens = random_sources((21, 4, 13)), random_tokens(3, 7)
    together, cache = one_pass(model, params, tokens, source=padded(sources, slots))
    last, _ = jax.jit(model.apply)(params, tokens[:, 6:], model.with_length(cache, jnp.full((3,), 6)))
    for row in (0, 1):
        alone, _ = one_pass(model, params, tokens[row : row + 1], source=padded([sources[row]], len(sources[row])))
        np.testing.assert_allclose(together[row], alone[0], atol=1e-4 * np.abs(alone).max())
        np.testing.assert_allclose(last[row, 0], alone[0, 6], atol=1e-4 * np.abs(alone).max())
    assert np.abs(together[0] - together[1]).max() > 0.1


def test_what_pads_a_source_is_never_read_and_only_the_length_is_rolled_back():
    model, params, _ = pair()
    tokens = random_tokens(2, 6)
    _, cache = one_pass(model, params, tokens, source=padded(random_sources((5, 9)), 16))
    soiled = cache._replace(
        keys=tuple(x.at[:, :, 6:].set(1e4) for x in cache.keys),
        cross_keys=tuple(x.at[0, :, 5:].set(1e4).at[1, :, 9:].set(1e4) for x in cache.cross_keys),
        cross_values=tuple(x.at[0, :, 5:].set(1e4).at[1, :, 9:].set(1e4) for x in cache.cross_values),
    )
    clean, dirty = (jax.jit(model.apply)(params, tokens, one)[0] for one in (cache, soiled))
    np.testing.assert_array_equal(clean, dirty)
    rolled = model.with_length(cache, jnp.asarray([2, 3]))
    for name, one in cache._asdict().items():
        same = jax.tree.map(lambda a, b: a is b, one, getattr(rolled, name))
        assert jax.tree.all(same) == (name != "length"), name


@pytest.mark.parametrize(("count", "longest"), [(32, 128), (8, 20), (12, 100)])
@pytest.mark.parametrize("both", [True, False])
def test_buckets_of_distances(count, longest, both):
    """One distance each up to a quarter (looking back: half), then equal shares of the logarithm, then all the rest."""
    found = buckets(np.arange(-3 * longest, 3 * longest + 1), count, longest, both)
    back, ahead, half = found[3 * longest :: -1], found[3 * longest :], count // 2 if both else count
    assert back[: half // 2].tolist() == list(range(half // 2))
    assert (np.diff(back) >= 0).all() and (back[longest:] == half - 1).all()
    for distance in range(half // 2, longest):
        share = np.log(distance / (half // 2)) / np.log(longest / (half // 2)) * (half - half // 2)
        assert back[distance] == half // 2 + int(share + 1e-6)
    assert ahead[1:].tolist() == ((back[1:] + half) if both else 0 * back[1:]).tolist()


def test_a_model_with_its_source_is_one_of_tokens():
    model, params, _ = pair()
    source, tokens = random_sources((6,))[0], random_tokens(2, 4)
    bound = with_source(model, source)
    ours, _ = one_pass(bound, params, tokens)
    theirs, _ = one_pass(model, params, tokens, source=padded([source] * 2, 6))
    np.testing.assert_array_equal(ours, theirs)
    assert bound.spec.source is None


# --- configurations ---------------------------------------------------------------------------------------------------

HF = {
    "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
    "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "n_positions": 512,
}  # fmt: skip
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 4}


def test_config_reads_every_generation():
    first, flan = t5.T5Config.from_hf(HF), t5.T5Config.from_hf(HF | FLAN)
    assert (first.hidden_act, first.is_gated_act, first.tie_word_embeddings) == ("relu", False, True)
    assert first.head_scale == pytest.approx(512**-0.5)
    assert (first.num_hidden_layers, first.num_encoder_layers) == (6, 6)
    assert (flan.hidden_act, flan.is_gated_act, flan.tie_word_embeddings) == ("gelu_new", True, False)
    assert flan.head_scale == 1.0 and (flan.num_hidden_layers, flan.num_encoder_layers) == (4, 6)
    assert t5.T5Config.from_hf(HF | FLAN | {"tie_word_embeddings": True, "scale_decoder_outputs": False}) == flan
    assert t5.T5Config.from_hf(HF | {"feed_forward_proj": "gated-silu"}).hidden_act == "silu"
    assert mt5.MT5Config.from_hf(HF | {"model_type": "mt5", "tie_word_embeddings": True}).head_scale == 1.0
    spec = t5.language_model(flan).spec
    assert spec.source is not None and (spec.source.first_token, spec.source.longest, spec.context) == (0, 4096, 4096)


@pytest.mark.parametrize("config", [CONFIG, TIED, variant(hidden_act="silu"), variant(decoder_start_token_id=5)])
def test_config_round_trip(config):
    assert t5.T5Config.from_hf(config.to_hf()) == config


def begun(params, model, **more):
    return model.init_cache(params, 1, 8, **more)


def bound():
    model, params, _ = pair()
    return params, with_source(model, [3, 4])


def at_positions():
    model, params, _ = pair()
    cache = begun(params, model, source=padded([[3]], 4))
    return model.apply(params, random_tokens(1, 2), cache, jnp.asarray([[0, 1]]))


test_what_is_refused = refusals(
    (lambda: begun(*bound(), source=padded([[3]], 6)), "has its source already"),
    (lambda: with_source(bound()[1], [3]), "has no encoder"),
    (lambda: begun(*pair()[1::-1]), "'t5' has an encoder: its cache begins with a source"),
    (at_positions, "positions must be None"),
    (lambda: t5.T5Config.from_hf(HF | {"d_model": None}), "lacks d_model"),
    (lambda: t5.T5Config.from_hf(HF | {"num_layers": None}), "lacks num_layers"),
    (lambda: t5.T5Config.from_hf(HF | {"num_layers": 0, "num_decoder_layers": 2}), "num_layers"),
    (lambda: t5.T5Config.from_hf(HF | {"feed_forward_proj": "gated-swish2"}), "swish2"),
    (lambda: t5.T5Config.from_hf(HF | {"relative_attention_num_buckets": 7}), "7"),
    (lambda: t5.T5Config.from_hf(HF | {"relative_attention_max_distance": 16}), "32 buckets, got 16"),
    (lambda: t5.T5Config.from_hf(HF | {"decoder_start_token_id": 40000}), "40000"),
    (lambda: t5.T5Config.from_hf(HF | {"model_type": "umt5"}), "umt5"),
)


def test_weights_under_the_names_of_old_and_new_checkpoints():
    """The embedding comes several times; a head that is not tied and not there is its copy; biases nobody adds."""
    config = dataclasses.replace(TIED, num_encoder_layers=1, num_hidden_layers=1)
    named = random_named(config)
    again = {f"{stack}.embed_tokens.weight": named["shared.weight"] for stack in ("encoder", "decoder")}
    old = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.zeros((32, 8), np.float32)}
    params = t5.params_from_named(config, named | again | old | {"lm_head.weight": named["shared.weight"]}, jnp.float32)
    assert "head" not in params
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    copied = t5.params_from_named(untied, iter(named.items()), jnp.float32)
    np.testing.assert_array_equal(copied["head"], named["shared.weight"])
    own = t5.params_from_named(untied, named | {"lm_head.weight": 2 * named["shared.weight"]}, jnp.float32)
    np.testing.assert_array_equal(own["head"], 2 * named["shared.weight"])
    with pytest.raises(ValueError, match=r"missing: encoder.final_layer_norm.weight"):
        t5.params_from_named(config, {k: v for k, v in named.items() if k != "encoder.final_layer_norm.weight"})
