"""A user's drafter that observes its target: positions are cut, bad functions are refused."""

import jax.numpy as jnp
import pytest
from tiny_llama import CONFIG, model_and_params

from experiments.gpu_suite import ballasted
from specdec_jax import verification
from specdec_jax.contrib.trees.stopping.comb import comb
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.answers import check_parts
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.state import fresh_state
from specdec_jax.drafters import model
from specdec_jax.models import llama
from specdec_jax.stopping import static
from specdec_jax.types import Observer

TARGET = llama.language_model(CONFIG, jnp.float32)
INNER = model(TARGET, 3)


def commit(params, state, tokens, length, seen=None):
    return INNER.commit(params, state, tokens, length)


def means(params, hidden):
    return hidden.mean((2, 3))


def decoded(take, prefill=None, widths=(2, 8), layers=(1,)):
    drafter = INNER.replace(commit=commit, prefill=prefill, observe=Observer(take, layers, CONFIG.hidden_size))
    rule, (_, params) = static(draft_length=3), model_and_params()
    decoder = build_decoder(TARGET, drafter, rule, verification.rejection(), verification_widths=widths)
    weights = ModelParams(params, params)
    check_parts(decoder.parts, weights, fresh_state(decoder.parts, [[1, 2, 3]], max_new_tokens=8))
    return decoder.run(weights, decoder.prefill(weights, [[1, 2, 3]], max_new_tokens=8, stop_ids=[]))


def test_hidden_states_have_the_same_positions_in_every_width():
    """Widths above the longest draft have positions that nobody reads: they are cut."""
    sizes = set()

    def take(params, hidden):
        sizes.add(hidden.shape[1])
        return means(params, hidden)

    assert decoded(take).length.tolist() == decoded(take, widths=(4,)).length.tolist() == [11]
    assert sizes >= {2, 4} and 8 not in sizes


def test_functions_that_fail_on_prompts_are_refused_before_anything_compiles():
    def prefill(params, state, tokens, length, seen=None):
        return commit(params, state, tokens, length + seen.taken)

    for functions in ((lambda params, hidden: hidden.mean((2, 3)).T,), (means, prefill)):
        with pytest.raises(ValueError, match="test_observers.py"):
            decoded(*functions)


def test_an_observer_without_layers_is_refused():
    with pytest.raises(ValueError, match=r"layers \(\), 24 wide"):
        decoded(means, layers=())


def test_a_wrapped_model_whose_cache_has_another_layout_is_refused_as_the_target_of_trees():
    with pytest.raises(ValueError, match="cannot verify"):
        wrapped = ballasted(TARGET, TARGET)
        build_decoder(wrapped, INNER, comb(siblings=(1,)), verification.rejection())
