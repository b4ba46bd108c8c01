"""Claim: a model of models/ is the function its papers define, however its tokens are cut into passes."""

import importlib
import json
import math
import pathlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specdec_jax import models
from specdec_jax.models import adapters, layers, llama
from specdec_jax.types import LanguageModel, ModelSpec

SHARED = {"adapters", "layers", "rope", "weights"}  # what families are built from; every other file is a family
FAMILIES = [name for _, name, _ in pkgutil.iter_modules(models.__path__) if name not in SHARED]
CONFIG = llama.example_config()


@pytest.fixture(autouse=True)
def _exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def random_named(config, seed=0, scale=0.3):
    """Checkpoint tensors large enough that every part shows in the logits."""
    rng = np.random.default_rng(seed)
    table = llama.parameter_table(config)
    return {
        name: (rng.normal(size=p.shape) * scale + name.endswith("norm.weight")).astype(np.float32)
        for name, p in table.items()
    }


def model_and_params(config=CONFIG, dtype=jnp.float32, seed=0):
    params = llama.params_from_named(config, random_named(config, seed), dtype)
    return llama.language_model(config, dtype), params


def random_tokens(batch, width, vocab_size=CONFIG.vocab_size, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, (batch, width)), jnp.int32)


def one_pass(model, params, tokens, slots=32, **options):
    return jax.jit(model.apply)(params, tokens, model.init_cache(params, tokens.shape[0], slots), **options)


# --- an independent forward: numpy, float64, one token and one head at a time -----------------------------------------


def naive_frequencies(c):
    """Rotary frequencies with the llama3 case split as Meta wrote it: by wavelength."""
    out = []
    for i in range(c.head_dim // 2):
        frequency = c.rope_theta ** (-2 * i / c.head_dim)
        s = c.rope_scaling or {"rope_type": "default"}
        if s["rope_type"] == "linear":
            frequency /= s["factor"]
        if s["rope_type"] == "llama3":
            wavelength, old = 2 * math.pi / frequency, s["original_max_position_embeddings"]
            if wavelength > old / s["low_freq_factor"]:
                frequency /= s["factor"]
            elif wavelength >= old / s["high_freq_factor"]:
                smooth = (old / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
                frequency = (1 - smooth) * frequency / s["factor"] + smooth * frequency
        out.append(frequency)
    return np.array(out)


def naive_rotate(x, position, frequencies):
    half = len(x) // 2
    turned = [(x[i] + 1j * x[i + half]) * np.exp(1j * position * frequencies[i]) for i in range(half)]
    return np.concatenate([np.real(turned), np.imag(turned)])


def naive_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def naive_attention(c, linear, x, frequencies):
    group, out = c.num_attention_heads // c.num_key_value_heads, np.zeros((len(x), c.num_attention_heads * c.head_dim))
    query, key, value = (
        linear(f"self_attn.{n}_proj", x).reshape(len(x), -1, c.head_dim).copy() for n in ("q", "k", "v")
    )
    for part in (query, key):
        for t in range(len(x)):
            for head in range(part.shape[1]):
                part[t, head] = naive_rotate(part[t, head], t, frequencies)
    for head in range(c.num_attention_heads):
        for t in range(len(x)):
            score = key[: t + 1, head // group] @ query[t, head] / math.sqrt(c.head_dim)
            weight = np.exp(score - score.max())
            mixed = weight / weight.sum() @ value[: t + 1, head // group]
            out[t, head * c.head_dim : (head + 1) * c.head_dim] = mixed
    return linear("self_attn.o_proj", out)


def naive_logits(c, named, tokens):
    named = {name: array.astype(np.float64) for name, array in named.items()}
    x = named["model.embed_tokens.weight"][tokens]
    frequencies = naive_frequencies(c)
    for i in range(c.num_hidden_layers):
        prefix = f"model.layers.{i}."

        def linear(name, x, prefix=prefix):
            return x @ named[f"{prefix}{name}.weight"].T + named.get(f"{prefix}{name}.bias", 0.0)

        normed = naive_norm(x, named[prefix + "input_layernorm.weight"], c.rms_norm_eps)
        x = x + naive_attention(c, linear, normed, frequencies)
        normed = naive_norm(x, named[prefix + "post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = linear("mlp.gate_proj", normed)
        x = x + linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", normed))
    x = naive_norm(x, named["model.norm.weight"], c.rms_norm_eps)
    return x @ named.get("lm_head.weight", named["model.embed_tokens.weight"]).T


def variant(**changes):
    return llama.LlamaConfig(**(vars(CONFIG) | changes))


CONFIGS = {
    "every part": CONFIG,
    "tied, plain": variant(tie_word_embeddings=True, attention_bias=False, mlp_bias=False, rope_scaling=None),
    "linear, no groups": variant(num_key_value_heads=4, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "one key head": variant(num_key_value_heads=1, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_equals_a_naive_forward(name):
    config = CONFIGS[name]
    model, params = model_and_params(config)
    tokens = random_tokens(2, 20)
    logits, cache = one_pass(model, params, tokens)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 20, config.vocab_size)
    assert cache.length.tolist() == [20, 20]
    for row in range(2):
        expected = naive_logits(config, random_named(config), np.asarray(tokens[row]))
        np.testing.assert_allclose(logits[row], expected, atol=2e-4 * np.abs(expected).max())


# --- cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_ragged_chunks_equal_one_pass(batch):
    """Rows of different length, fed in chunks that are too wide and rolled back: the decoder's whole use of a cache."""
    model, params = model_and_params()
    tokens = random_tokens(batch, 16)
    whole, _ = one_pass(model, params, tokens)
    cache, known = model.init_cache(params, batch, 32), np.zeros(batch, int)
    rng, seen = np.random.default_rng(2), np.full(whole.shape, np.nan, np.float32)
    apply = jax.jit(model.apply)
    while (known < 16).any():
        width = int(rng.choice([1, 2, 5]))
        take = np.minimum(rng.integers(0, width + 1, batch), 16 - known)
        chunk = rng.integers(0, CONFIG.vocab_size, (batch, width))  # beyond `take`: tokens that get rejected
        for row in range(batch):
            chunk[row, : take[row]] = tokens[row, known[row] : known[row] + take[row]]
        logits, cache = apply(params, jnp.asarray(chunk, jnp.int32), cache)
        for row in range(batch):
            seen[row, known[row] : known[row] + take[row]] = logits[row, : take[row]]
        known += take
        cache = model.with_length(cache, jnp.asarray(known, jnp.int32))
    np.testing.assert_allclose(seen, whole, atol=1e-4)


def test_slots_beyond_the_length_are_never_read():
    model, params = model_and_params()
    apply = jax.jit(model.apply)
    tokens = random_tokens(2, 6)
    _, cache = one_pass(model, params, tokens)
    clean, _ = apply(params, tokens, cache)
    soiled = jax.tree.map(lambda x: x.at[:, :, 6:].set(1e4) if x.ndim == 4 else x, cache)
    dirty, _ = apply(params, tokens, soiled)
    np.testing.assert_array_equal(clean, dirty)


def test_rows_do_not_see_each_other():
    model, params = model_and_params()
    tokens = random_tokens(3, 9)
    mine, _ = one_pass(model, params, tokens)
    others, _ = one_pass(model, params, tokens.at[1:].add(1) % CONFIG.vocab_size)
    np.testing.assert_array_equal(mine[0], others[0])
    assert np.abs(mine[1] - others[1]).max() > 0.1


def test_no_gradient_from_the_future():
    model, params = model_and_params()
    tokens = jnp.arange(3, 13, dtype=jnp.int32)[None]  # distinct, and the head is not tied to the embedding

    def loss(embedding, position):
        return one_pass(model, params | {"embedding": embedding}, tokens)[0][0, position].std()

    gradients = jax.jit(jax.grad(loss))
    for position in (0, 4, 9):
        gradient = np.abs(gradients(params["embedding"], position)[tokens[0]]).max(-1)
        assert (gradient[: position + 1] > 0).all()
        assert (gradient[position + 1 :] == 0).all()


def test_positions_and_mask_serve_a_tree():
    """Two children of one node in one pass: slots 4 and 5, both at position 4, blind to each other."""
    model, params = model_and_params()
    apply = jax.jit(model.apply)
    stem, leaves = random_tokens(1, 4), jnp.asarray([[7, 8]], jnp.int32)
    _, cache = one_pass(model, params, stem)
    mask = jnp.ones((1, 2, 32), bool).at[0, 1, 4].set(False)
    both, _ = apply(params, leaves, cache, jnp.asarray([[4, 4]], jnp.int32), mask)
    for leaf in range(2):
        alone, _ = apply(params, leaves[:, leaf : leaf + 1], cache)
        np.testing.assert_allclose(both[0, leaf], alone[0, 0], atol=1e-4)
    plain, _ = apply(params, leaves, cache)
    assert np.abs(plain[0, 1] - both[0, 1]).max() > 1e-2


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("batch", [1, 2])
def test_bfloat16_at_every_width(heads, batch):
    """Also a regression test: some widths and batches do not run in bfloat16 on CPU unless products are written so."""
    config = variant(num_attention_heads=heads, num_key_value_heads=heads, head_dim=8)
    model, params = model_and_params(config, jnp.bfloat16)
    tokens = random_tokens(batch, 6)
    whole, cache = one_pass(model, params, tokens)
    exact, _ = one_pass(*model_and_params(config), tokens)
    assert all(x.dtype == jnp.bfloat16 for x in cache.keys + cache.values) and whole.dtype == jnp.float32
    assert np.abs(whole - exact).max() < 0.06 * np.abs(exact).max()
    assert np.abs(whole - exact).max() > 0
    cache, parts = model.init_cache(params, batch, 32), []
    for start, width in ((0, 1), (1, 2), (3, 1), (4, 2)):
        logits, cache = jax.jit(model.apply)(params, tokens[:, start : start + width], cache)
        parts.append(logits)
    assert np.abs(jnp.concatenate(parts, 1) - whole).max() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("batch", "width", "kv_heads"), [(1, 1, 2), (1, 1, 4), (1, 3, 2), (3, 1, 4), (3, 4, 2)])
def test_a_loop_of_passes_does_not_copy_the_cache(batch, width, kv_heads, dtype):
    model, params = model_and_params(variant(num_key_value_heads=kv_heads, vocab_size=32), dtype)
    cache, tokens = model.init_cache(params, batch, 2048), jnp.ones((batch, width), jnp.int32)

    def loop(params, cache, tokens, steps):
        def body(carry):
            i, cache, tokens = carry
            logits, cache = model.apply(params, tokens, cache)
            return i + 1, model.with_length(cache, cache.length - width + 1), logits.argmax(-1).astype(jnp.int32)

        return jax.lax.while_loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), cache, tokens))

    compiled = jax.jit(loop, donate_argnums=1).lower(params, cache, tokens, jnp.int32(0)).compile()
    layer_bytes = cache.keys[0].nbytes  # the scores of one layer may be as large, a copy of the cache is four times it
    scores = 4 * batch * max(width, 2) * CONFIG.num_attention_heads * 2048
    assert compiled.memory_analysis().temp_size_in_bytes < layer_bytes + 3 * scores


def test_an_unused_head_costs_nothing():
    model, params = model_and_params(variant(vocab_size=977))
    cache, tokens = model.init_cache(params, 2, 16), random_tokens(2, 3)
    text = jax.jit(lambda *a: model.apply(*a)[1]).lower(params, tokens, cache).compile().as_text()
    assert "f32[6,977]" not in text and "f32[2,3,977]" not in text
    assert "977]" in jax.jit(lambda *a: model.apply(*a)[0]).lower(params, tokens, cache).compile().as_text()


def test_a_lone_row_is_doubled_only_below_float32():
    assert layers.is_lone(1, jnp.bfloat16) and layers.is_lone(1, jnp.float16)
    assert not layers.is_lone(1, jnp.float32) and not layers.is_lone(2, jnp.bfloat16)
    x, kernel = jnp.linspace(-1.0, 1.0, 8)[None], jnp.linspace(-2.0, 2.0, 24).reshape(3, 8)
    two = layers.project(jnp.concatenate([x, x]), kernel, jnp.bfloat16)
    np.testing.assert_array_equal(layers.project(x, kernel, jnp.bfloat16), two[:1])


# --- configurations ---------------------------------------------------------------------------------------------------

HF = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "eos_token_id": [2, 5], "bos_token_id": 1, "hidden_act": "silu",
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_config_reads_both_generations_of_transformers():
    old = HF | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}}
    new = HF | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}
    config = llama.LlamaConfig.from_hf(old)
    assert config == llama.LlamaConfig.from_hf(new)
    assert config.rope_theta == 5e5 and config.rope_scaling == LLAMA3 | {"rope_type": "llama3"}
    assert (config.head_dim, config.num_key_value_heads, config.eos_token_ids) == (8, 4, (2, 5))
    assert llama.language_model(config).spec == ModelSpec(100, 2048, (2, 5))


@pytest.mark.parametrize("eos", [(), (2,), (2, 5)])
def test_config_round_trip(eos):
    config = variant(eos_token_ids=eos)
    assert llama.LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(variant(eos_token_ids=eos))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": 7}, "7"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "-1.0"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
    ],
)
def test_config_refuses(change, named):
    with pytest.raises(ValueError, match=named):
        llama.LlamaConfig.from_hf(HF | change)


# --- adapters and the seam --------------------------------------------------------------------------------------------


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


def test_adapters_refuse_what_they_do_not_serve():
    model, params = adapted("logits function")
    cache, tokens = model.init_cache(params, 1, 8), random_tokens(1, 2)
    with pytest.raises(ValueError, match="positions and mask"):
        model.apply(params, tokens, cache, jnp.zeros((1, 2), jnp.int32))
    wrong = adapters.from_logits_function(lambda p, t: jnp.zeros((*t.shape, 5)), ModelSpec(6, 8))
    with pytest.raises(ValueError, match=r"\(1, 8, 5\) instead of \(1, 8, 6\)"):
        wrong.apply(params, tokens, cache)


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
    with pytest.raises(ValueError, match="at least 1"):
        adapters.with_vocabulary(model, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_obeys_the_seam(name):
    """A fork's family file is tested the moment it exists; it says by `example_config` with which numbers."""
    family = importlib.import_module(f"specdec_jax.models.{name}")
    config = family.example_config()
    model = family.language_model(config, jnp.float32)
    assert isinstance(model, LanguageModel) and type(config).from_hf(config.to_hf()) == config
    params = family.init_params(config, jax.random.key(0), jnp.float32)
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)
    tokens = random_tokens(2, 8, model.spec.vocab_size)
    whole, cache = one_pass(model, params, tokens)
    assert whole.dtype == jnp.float32 and whole.shape == (2, 8, model.spec.vocab_size)
    cache = model.with_length(cache, jnp.asarray([5, 3], jnp.int32))  # rows at different lengths
    rest, cache = jax.jit(model.apply)(params, jnp.stack([tokens[0, 5:8], tokens[1, 3:6]]), cache)
    np.testing.assert_allclose(rest[0], whole[0, 5:8], atol=1e-4)
    np.testing.assert_allclose(rest[1], whole[1, 3:6], atol=1e-4)
    assert cache.length.tolist() == [8, 6]
    named = family.named_from_params(config, params)
    again = family.params_from_named(config, named, jnp.float32)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, again))
    assert all(x.dtype != jnp.float64 for x in jax.tree.leaves((params, cache)))


# --- the real target --------------------------------------------------------------------------------------------------

REFERENCE = json.loads(pathlib.Path(__file__).with_name("data").joinpath("smollm2_logits.json").read_text("utf-8"))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.45)])
def test_smollm2_equals_transformers(dtype, tolerance, request):
    """Top-10 logits (up to 37 in size) made by transformers on torch in float32, tests/data/make_smollm2_logits.py.

    Seen: 0.0001 in float32, 0.28 in bfloat16, where a weight alone is off by up to 0.4 %.
    """
    loaded = request.getfixturevalue({"float32": "smollm2_float32", "bfloat16": "smollm2"}[dtype])
    worst, apply = 0.0, jax.jit(loaded.model.apply)
    for text in REFERENCE["texts"]:
        assert loaded.tokenizer.encode(text["text"]) == text["tokens"]
        tokens = np.zeros((1, 256), np.int32)  # one width, one compilation; what follows the text cannot be seen
        tokens[0, : len(text["tokens"])] = text["tokens"]
        logits, _ = apply(loaded.params, tokens, loaded.model.init_cache(loaded.params, 1, 256))
        for entry in text["top10"]:
            ours = np.asarray(logits[0, entry["position"]])
            ids, expected = zip(*entry["top"], strict=True)
            worst = max(worst, np.abs(ours[list(ids)] - expected).max())
            worst = max(worst, abs(float(jax.nn.logsumexp(ours)) - entry["log_z"]))
            if expected[0] - expected[1] > 2 * tolerance:
                assert ours.argmax() == ids[0]
    print(f"{dtype}: largest difference {worst:.4f}")
    assert worst < tolerance
