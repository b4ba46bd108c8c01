"""A Llama small enough to check by hand: random checkpoints of it, and an independent forward in numpy and float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import llama

CONFIG = llama.example_config()


def variant(**changes):
    return llama.LlamaConfig(**(vars(CONFIG) | changes))


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


def noisy_pair(config=CONFIG, noise=0.02):
    """A model, its parameters, and the same with noise, so that as a drafter it is sometimes right."""
    named, rng = random_named(config), np.random.default_rng(9)
    noisy = {name: tensor + rng.normal(0, noise, tensor.shape).astype(np.float32) for name, tensor in named.items()}
    both = (llama.params_from_named(config, tensors, jnp.float32) for tensors in (named, noisy))
    return llama.language_model(config, jnp.float32), *both


def assert_filled(model, params, state, tokens):
    """A drafter's cache holds, up to `valid`, what one pass over the row's tokens [B, S] writes there."""
    _, whole = one_pass(model, params, jnp.asarray(tokens), tokens.shape[1])
    below = np.arange(tokens.shape[1])[:, None] < np.asarray(state.valid)[:, None, None, None]
    for ours, expected in zip(
        jax.tree.leaves((state.cache.keys, state.cache.values)), whole.keys + whole.values, strict=True
    ):
        np.testing.assert_allclose(np.where(below, ours, 0), np.where(below, expected, 0), atol=1e-4)


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
