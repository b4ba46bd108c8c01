"""Claim: a model brought by an adapter gives the logits it gives by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refusals import refusals
from tiny_llama import model_and_params, one_pass, random_tokens

from specdec_jax.models import adapters
from specdec_jax.types import ModelSpec

pytestmark = pytest.mark.usefixtures("exact_products")


class Wrapped(nnx.Module):
    """An nnx module with an explicit cache: our model's parameters as nnx variables."""

    def __init__(self, model, params):
        self.model, self.weights = nnx.static(model), nnx.Param(params)

    def __call__(self, tokens, cache):
        return self.model.apply(self.weights.get_value(), tokens, cache)


def adapted(kind):
    """(adapted model, its params) of the very model `model_and_params` gives."""
    model, params = model_and_params()
    if kind == "logits function":
        return adapters.from_logits_function(lambda p, t: one_pass(model, p, t, t.shape[1])[0], model.spec), params
    if kind == "function":
        return adapters.from_function(lambda p, t, c: model.apply(p, t, c), model.init_cache, model.spec), params
    return adapters.from_nnx(Wrapped(model, params), lambda p, b, s: model.init_cache(p, b, s), model.spec)


@pytest.mark.parametrize("kind", ["logits function", "function", "nnx"])
def test_adapters_give_the_same_logits(kind):
    model, params = model_and_params()
    other, other_params = adapted(kind)
    tokens = random_tokens(2, 10)
    expected, _ = one_pass(model, params, tokens)
    assert other.spec == model.spec
    apply = jax.jit(other.apply)
    _, cache = apply(other_params, tokens[:, :7], other.init_cache(other_params, 2, 16))
    cache = other.with_length(cache, jnp.asarray([4, 2], jnp.int32))
    rest = jnp.stack([tokens[0, 4:10], tokens[1, 2:8]])
    logits, cache = apply(other_params, rest, cache)
    np.testing.assert_allclose(logits[0], expected[0, 4:10], atol=1e-4)
    np.testing.assert_allclose(logits[1], expected[1, 2:8], atol=1e-4)
    assert cache.length.tolist() == [10, 8]


def test_an_adapted_nnx_module_runs_inside_a_loop():
    model, params = adapted("nnx")
    step = jax.jit(lambda p, c, t: jax.lax.fori_loop(0, 3, lambda _, c: model.apply(p, t, c)[1], c))
    assert step(params, model.init_cache(params, 1, 8), jnp.ones((1, 2), jnp.int32)).length.tolist() == [6]


def applied(model, *positions):
    _, params = model_and_params()
    return model.apply(params, random_tokens(1, 2), model.init_cache(params, 1, 8), *positions)


test_what_is_refused = refusals(
    (lambda: applied(adapted("logits function")[0], jnp.zeros((1, 2), jnp.int32)), "positions and mask"),
    (
        lambda: applied(adapters.from_logits_function(lambda p, t: jnp.zeros((*t.shape, 5)), ModelSpec(6, 8))),
        r"\(1, 8, 5\) instead of \(1, 8, 6\)",
    ),
    (lambda: adapters.with_vocabulary(model_and_params()[0], 0), "at least 1"),
)


@pytest.mark.parametrize("size", [50, 61, 70])
def test_another_vocabulary_size_cuts_or_pads(size):
    model, params = model_and_params()
    tokens = random_tokens(1, 4, 50)
    expected, _ = one_pass(model, params, tokens)
    other = adapters.with_vocabulary(model, size)
    logits, _ = one_pass(other, params, tokens)
    assert other.spec.vocab_size == size and logits.shape == (1, 4, size)
    np.testing.assert_array_equal(logits[..., :61], expected[..., :size])
    assert (logits[..., 61:] == -jnp.inf).all()
