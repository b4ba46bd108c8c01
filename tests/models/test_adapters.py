"""Claim: `check_model` accepts what decodes as its model does, and names what is wrong with anything else."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals
from tiny_llama import model_and_params, one_pass, random_tokens

from specdec_jax.models import adapters
from specdec_jax.models.adapters import check_model, from_function, per_row
from specdec_jax.models.attention import causal_mask, with_length, write
from specdec_jax.types import Array, Hidden, LanguageModel, ModelSpec

pytestmark = pytest.mark.usefixtures("exact_products")

SPEC, WIDTH = ModelSpec(vocab_size=13, context=32), 8


class Entries(NamedTuple):
    keys: Array  # [B, 1, S, D]
    length: Array


def params():
    rng = np.random.default_rng(0)
    shapes = {"tokens": (13, WIDTH), "positions": (32, WIDTH), "query": (WIDTH, WIDTH)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def positions(length, width):
    return length[:, None] + jnp.arange(width)[None]


def attends(place=positions, start=lambda length: length, sees=lambda mask: mask, gives=lambda *result: result):
    """One layer of attention over one buffer. The arguments, where given, do one thing in another way."""

    def init_cache(params, batch, slots, source=None):
        return Entries(jnp.zeros((batch, 1, slots, WIDTH)), jnp.zeros((batch,), jnp.int32))

    def apply(params, tokens, cache, positions=None, mask=None):
        x = params["tokens"][tokens] + params["positions"][place(cache.length, tokens.shape[1])]
        keys = write(cache.keys, x[:, None], start(cache.length))
        mask = sees(causal_mask(cache.length, tokens.shape[1], keys.shape[2], None))
        score = jnp.einsum("btd,bsd->bts", x @ params["query"], keys[:, 0])
        x += jax.nn.softmax(jnp.where(mask, score, -jnp.inf)) @ keys[:, 0]
        return gives(x @ params["tokens"].T, Entries(keys, cache.length + tokens.shape[1]))

    return LanguageModel(init_cache, apply, with_length, SPEC)


def recurrent(resets):
    """Its state after some tokens does not say what it was after fewer, but for none where it `resets`."""

    def init_cache(params, batch, slots):
        return Entries(jnp.zeros((batch, 1, WIDTH)), jnp.zeros((batch,), jnp.int32))

    def apply(params, tokens, cache):
        begun = jnp.where((cache.length > 0)[:, None, None] | (not resets), cache.keys, 0.0)
        state = begun + jnp.cumsum(params["tokens"][tokens], axis=1)
        return jnp.tanh(state) @ params["tokens"].T, Entries(state[:, -1:], cache.length + tokens.shape[1])

    return from_function(apply, init_cache, SPEC)


def with_one_position(**hidden):
    """A model as most libraries have: its batch has one write position, in a cache that is a dict."""
    inner = attends()

    def init_cache(params, batch, slots):
        return {"keys": jnp.zeros((batch, 1, slots, WIDTH)), "end": jnp.int32(0)}

    def apply(params, tokens, cache):
        logits, after = inner.apply(params, tokens, Entries(cache["keys"], jnp.full(len(tokens), cache["end"])))
        return logits, {"keys": after.keys, "end": after.length[0]}

    model = from_function(apply, init_cache, SPEC, lambda cache, length: cache | {"end": length[0]})
    return model.replace(hidden=Hidden(**hidden))


def test_a_model_with_a_position_per_row_passes():
    assert 0 <= check_model(attends(), params()) < 1e-5
    made = per_row(with_one_position())
    _, cache = one_pass(made, params(), jnp.ones((2, 3), jnp.int32))
    assert check_model(made, params(), reference=lambda t: one_pass(attends(), params(), t)[0]) < 1e-5
    assert cache.rows["keys"].shape == (2, 1, 1, 32, WIDTH) and cache.length.tolist() == [3, 3]


def test_a_function_of_all_tokens_is_a_model():
    model, weights = model_and_params()
    whole = lambda params, tokens: one_pass(model, params, tokens, tokens.shape[1])[0]  # noqa: E731
    made = adapters.from_logits_function(whole, model.spec)
    assert made.spec == model.spec
    check_model(made, weights, reference=lambda tokens: whole(weights, tokens))


def wrong(match, *arguments, **more):
    model = arguments[0] if arguments else attends(**more)
    return lambda: check_model(model, params()), f"^check_model: .*{match}"


def shifted(logits, cache):
    return jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1), cache


def without_states(model):
    streams = lambda *a: (*model.apply(*a[:3])[:1], jnp.zeros((3, 8, 2, 4)), a[2])  # noqa: E731
    return model.replace(hidden=Hidden(streams=streams, num_layers=1, width=WIDTH))


def with_own_weights():
    model, weights = attends(), params()
    return model.replace(apply=lambda params, *arguments: model.apply(weights, *arguments))


def with_few_slots():
    return attends().replace(init_cache=lambda params, batch, slots: attends().init_cache(params, batch, 16))


test_what_is_wrong_is_named = refusals(
    wrong("`params`: apply must not bring its own", with_own_weights()),
    wrong("no room for the context, 32 tokens", with_few_slots()),
    wrong(
        "`with_length` before it, raises TypeError: add got", place=lambda length, width: positions(length, width + 1)
    ),
    wrong("write position each", start=lambda length: jnp.broadcast_to(length[:1], length.shape)),
    wrong("write position each", place=lambda length, width: positions(jnp.full_like(length, length[0]), width)),
    wrong("slots from `length` on are read", sees=lambda mask: mask | (mask.shape[1] == 1)),
    wrong("logits float32.3, 8, 13., not bfloat16", gives=lambda logits, cache: (logits.astype(jnp.bfloat16), cache)),
    wrong(
        r"keys was float32\[3, 1, 16, 8\] and is bfloat16",
        gives=lambda logits, cache: (logits, cache._replace(keys=cache.keys.astype(jnp.bfloat16))),
    ),
    wrong("several passes", place=lambda length, width: positions(jnp.maximum(length - 1, 0), width)),
    wrong("rolled back differs from an empty one", recurrent(resets=False)),
    wrong("rolled back to a part", recurrent(resets=True)),
    wrong("later tokens", gives=lambda logits, cache: (jnp.roll(logits, 1, axis=1), cache)),
    wrong("later tokens", sees=lambda mask: mask | True),
    wrong("predict the token after it", gives=shifted),
    wrong("rows alone", gives=lambda logits, cache: (logits - logits.mean(0, keepdims=True), cache)),
    wrong("NaN", gives=lambda logits, cache: (logits * jnp.nan, cache)),
    wrong("the cache .a dict. must have .* needs `with_length` and `per_row`", with_one_position()),
    wrong("hidden.last", attends().replace(hidden=Hidden(attends().apply, lambda params: jnp.eye(13)[::-1]))),
    wrong("hidden.prepared changes", attends().replace(hidden=Hidden(prepared=lambda p: jax.tree.map(jnp.sin, p)))),
    wrong(r"hidden.streams must return .*\(3, 8, 2, 8\)", without_states(attends())),
    (
        lambda: check_model(
            attends(place=lambda length, width: positions(length, width) + 1),
            params(),
            reference=lambda tokens: one_pass(attends(), params(), tokens)[0],
        ),
        "differs from the reference",
    ),
    (lambda: from_function(attends().apply, lambda *_: {}, SPEC).init_cache(None, 1, 8), "`length` .* not a dict"),
)


def applied(model, *positions):
    tokens = jnp.ones((1, 2), jnp.int32)
    return model.apply(params(), tokens, model.init_cache(params(), 1, 8), *positions)


test_what_is_refused = refusals(
    (lambda: applied(per_row(with_one_position()), jnp.zeros((1, 2), jnp.int32)), "positions and mask"),
    (
        lambda: applied(adapters.from_logits_function(lambda p, t: jnp.zeros((*t.shape, 5)), SPEC)),
        r"\(1, 2, 5\) instead of \(1, 2, 13\)",
    ),
    (lambda: adapters.with_vocabulary(attends(), 0), "at least 1"),
)


@pytest.mark.parametrize("size", [50, 61, 70])
def test_another_vocabulary_size_cuts_or_pads(size):
    model, weights = model_and_params()
    tokens = random_tokens(1, 4, 50)
    expected, _ = one_pass(model, weights, tokens)
    other = adapters.with_vocabulary(model, size)
    logits, _ = one_pass(other, weights, tokens)
    assert other.spec.vocab_size == size and logits.shape == (1, 4, size)
    np.testing.assert_array_equal(logits[..., :61], expected[..., :size])
    assert (logits[..., 61:] == -jnp.inf).all()
