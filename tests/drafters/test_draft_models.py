"""A drafter of another vocabulary: its texts are what its tokens spell, and what it drafts stays lossless."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import with_drafted
from tiny_llama import CONFIG, model_and_params, one_pass, random_named, variant

from specdec_jax import ModelParams, build_decoder, lossless, verification
from specdec_jax.decoding.function_checks import check_parts
from specdec_jax.drafters import model
from specdec_jax.drafters.draft_models.intersection import ROOM, shared_params, with_shared_tokens
from specdec_jax.models import llama
from specdec_jax.stopping import adaedl, at_least, static
from specdec_jax.types import Observer
from specdec_jax.verification import rejection

V = 12
OWN = np.array([3, -1, 0, 7, -1, 1, 2, 12, -1, 4, 5, 6], np.int32)  # the drafter's id of the target's token
SPELLED = {1: [8, 9, 10], 4: [11], 8: [9, 9]}  # of those it lacks


def tables():
    pieces, count = np.zeros((V, 3), np.int32), np.ones(V, np.int32)
    for token in range(V):
        own = SPELLED.get(token, [OWN[token]])
        pieces[token, : len(own)], count[token] = own, len(own)
    return OWN, pieces, count


def drafter_model():
    config = variant(vocab_size=13, eos_token_ids=())
    source = llama.language_model(config, jnp.float32)
    params = llama.params_from_named(config, random_named(config, 5), jnp.float32)
    return source, params, with_shared_tokens(source, V), shared_params(source, params, *tables())


def spelled(tokens):
    return [piece for token in tokens for piece in SPELLED.get(int(token), [OWN[int(token)]])]


def expected_logits(source, params, tokens):
    """Of the shared tokens, after each of the target's tokens: a pass over what they spell."""
    own = spelled(tokens)
    logits, _ = one_pass(source, params, jnp.asarray([own]), ROOM * 32)
    ends = np.cumsum([len(spelled([token])) for token in tokens]) - 1
    return np.asarray(logits)[0, ends][:, OWN[OWN >= 0]]


def test_passes_roll_back_and_go_on_as_the_spelled_text_would():
    source, raw, model, params = drafter_model()
    rng = np.random.default_rng(0)
    texts = rng.integers(0, V, (3, 16))
    texts[2, :6] = 1  # three pieces each, so that this row needs more passes than the others
    apply = jax.jit(model.apply)
    logits, cache = apply(params, jnp.asarray(texts[:, :6]), model.init_cache(params, 3, 20))
    assert cache.length.tolist() == [6, 6, 6] and bool(jnp.isneginf(logits[:, :, OWN < 0]).all())
    for row in range(3):
        np.testing.assert_allclose(logits[row][:, OWN >= 0], expected_logits(source, raw, texts[row, :6]), atol=1e-4)
    keep = [4, 1, 3]
    cache = model.with_length(cache, jnp.asarray(keep))
    other = rng.integers(0, V, (3, 2))
    logits, cache = apply(params, jnp.asarray(other), cache)
    for row, kept in enumerate(keep):
        text = [*texts[row, :kept], *other[row]]
        np.testing.assert_allclose(logits[row][:, OWN >= 0], expected_logits(source, raw, text)[-2:], atol=1e-4)


def test_a_text_that_outgrows_the_cache_stays_finite_and_spares_what_stands():
    """Every token is three pieces and the cache is full at last: what was read before is not overwritten."""
    _, _, model, params = drafter_model()
    apply = jax.jit(model.apply)
    cache = model.init_cache(params, 1, 8)
    for _ in range(4):
        logits, cache = apply(params, jnp.ones((1, 2), jnp.int32), cache)
        assert bool(jnp.isfinite(logits[:, :, OWN >= 0]).all())
    first, _ = apply(params, jnp.ones((1, 2), jnp.int32), model.init_cache(params, 1, 8))
    again, _ = apply(params, jnp.ones((1, 2), jnp.int32), model.with_length(cache, jnp.zeros((1,), jnp.int32)))
    np.testing.assert_allclose(first, again, atol=1e-5)
    begun, _ = apply(params, jnp.ones((1, 2), jnp.int32), model.with_length(cache, jnp.full((1,), 2)))
    _, fresh = apply(params, jnp.ones((1, 2), jnp.int32), model.init_cache(params, 1, 8))
    np.testing.assert_allclose(begun, apply(params, jnp.ones((1, 2), jnp.int32), fresh)[0], atol=1e-5)


def decoder_of(policy, most=3):
    config = variant(vocab_size=V, eos_token_ids=())
    target = llama.language_model(config, jnp.float32)
    target_params = llama.params_from_named(config, random_named(config, 1), jnp.float32)
    _, _, shared, params = drafter_model()
    decoder = build_decoder(target, model(shared, most), policy, rejection(), prefill_chunk=4)
    return decoder, ModelParams(target_params, params)


@pytest.mark.optimised
def test_the_whole_decoder_draws_from_the_target():
    decoder, params = decoder_of(at_least(2, adaedl()))
    report = lossless.test_by_sampling(decoder, params, warp={"temperature": 1.5}, tokens=3, sequences=8192)
    assert report.lossless and report.drafted[1] > 500


@pytest.mark.seldom
@pytest.mark.optimised
def test_what_is_told_of_all_of_the_drafters_tokens_is_rejected():
    """The bug to fear: drawn from the shared tokens, reported as if from the drafter's whole vocabulary."""
    decoder, params = decoder_of(static(draft_length=2), 2)
    # e of mass beyond the shared tokens
    cheat = with_drafted(decoder, lambda drafted: drafted._replace(log_q=drafted.log_q - 1.0))
    assert not lossless.test_by_sampling(cheat, params, tokens=3, sequences=4096).lossless


def test_a_drafter_that_cannot_be_translated_says_why():
    source, raw, model, _ = drafter_model()
    with pytest.raises(ValueError, match="no token in common"):
        shared_params(source, raw, np.full(V, -1, np.int32), *tables()[1:])
    with pytest.raises(ValueError, match="cannot be translated: it has a draft vocabulary"):
        with_shared_tokens(model, V)


TARGET = llama.language_model(CONFIG, jnp.float32)
INNER = model(TARGET, 3)


def commit(params, state, tokens, length, seen=None):
    return INNER.commit(params, state, tokens, length)


def means(params, hidden):
    return hidden.mean((2, 3))


def decoded(features, prefill=None, widths=(2, 8), layers=(1,)):
    drafter = INNER.replace(commit=commit, prefill=prefill, observe=Observer(features, layers, CONFIG.hidden_size))
    rule, (_, params) = static(draft_length=3), model_and_params()
    decoder = build_decoder(TARGET, drafter, rule, verification.rejection(), verification_widths=widths)
    weights = ModelParams(params, params)
    check_parts(decoder.parts, weights)
    return decoder.run(weights, decoder.prefill(weights, [[1, 2, 3]], max_new_tokens=8, stop_ids=[]))


def test_hidden_states_have_the_same_positions_in_every_width():
    """Widths above the longest draft have positions that nobody reads: they are cut."""
    sizes = set()

    def features(params, hidden):
        sizes.add(hidden.shape[1])
        return means(params, hidden)

    assert decoded(features).length.tolist() == decoded(features, widths=(4,)).length.tolist() == [11]
    assert sizes >= {2, 4} and 8 not in sizes


def test_functions_that_fail_on_prompts_are_refused_before_anything_compiles():
    def prefill(params, state, tokens, length, seen=None):
        return commit(params, state, tokens, length + seen.features)

    for functions in ((lambda params, hidden: hidden.mean((2, 3)).T,), (means, prefill)):
        with pytest.raises(ValueError, match="test_draft_models.py"):
            decoded(*functions)


def test_an_observer_without_layers_is_refused():
    with pytest.raises(ValueError, match=r"layers \(\), 24 wide"):
        decoded(means, layers=())
