"""Hugging Face's model_type `llama`: Llama 2 and 3, TinyLlama, SmolLM2 and whoever shares their architecture.

Layers are unrolled, each with its own key and value buffer: a `scan` over layers copies its caches every pass (25.6
against 1.6 ms a step, measured). They are traced once: XLA compiles a kernel once, however many layers run it.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.models import layers, weights
from specdec_jax.models.layers import KVCache
from specdec_jax.models.rope import check_scaling, inverse_frequencies, rope_type, rotation
from specdec_jax.models.weights import Parameter
from specdec_jax.sharding import ANY, DATA, constrain
from specdec_jax.types import Head, LanguageModel, ModelSpec, Tap

Array = jax.Array

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class LlamaConfig:
    """Fields named as in Hugging Face's config.json, with its defaults. Numbers that do not fit raise ValueError."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)  # with `rope_type`; None is plain rotary
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        for name in (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        check_scaling(self.rope_scaling)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Reads config.json as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) writes it.

        Raises ValueError on another model_type or activation, a missing number, an unknown rope type.
        """
        _expect(config, "model_type", "llama")
        _expect(config, "hidden_act", "silu")
        missing = [name for name in REQUIRED if config.get(name) is None]
        if missing:
            raise ValueError(f"the model's config lacks {', '.join(missing)}")
        known = {f.name for f in fields(cls)} - {"rope_theta", "rope_scaling"}
        given = {name: config[name] for name in known if config.get(name) is not None}
        heads = config["num_attention_heads"]
        given.setdefault("num_key_value_heads", heads)
        given.setdefault("head_dim", config["hidden_size"] // heads if heads else 0)
        eos = config.get("eos_token_id")
        given["eos_token_ids"] = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        return cls(**given, **_rope_from_hf(config))

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 both read; `from_hf` inverts it."""
        scaling = self.rope_scaling or {"rope_type": "default"}
        config = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "eos_token_ids"}
        eos = list(self.eos_token_ids)
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rope_parameters": {**scaling, "rope_theta": self.rope_theta},
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }


class Llama(nn.Module):
    """Decoder-only transformer: (tokens [B, T], cache, positions, mask) -> (logits [B, T, V] float32, cache).

    Without a cache (None) the T tokens see each other alone, and None comes back for it. With `head=False` the last
    hidden states [B, T, D] float32 come in place of the logits: training takes the head a few positions at a time.
    With `tapped` layers the residual stream after each of them comes along: ((logits, [B, T, N, D] float32), cache).
    `added` [B, T, D] is added to the embeddings.
    """

    config: LlamaConfig
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(
        self, tokens, cache: KVCache | None, positions=None, mask=None, head: bool = True, tapped=(), added=None
    ):
        c, width = self.config, tokens.shape[1]
        start = jnp.zeros((tokens.shape[0],), jnp.int32) if cache is None else cache.length
        slots = width if cache is None else cache.keys[0].shape[2]
        if positions is None:
            positions = start[:, None] + jnp.arange(width)[None, :]
        cos_sin = rotation(positions, inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))
        visible = layers.causal_mask(start, width, slots, mask)
        embedding = self.param("embedding", layers.WEIGHT_INIT, (c.vocab_size, c.hidden_size), self.dtype)
        x = embedding[tokens].astype(jnp.float32) if added is None else embedding[tokens].astype(jnp.float32) + added
        x = constrain(x, DATA)
        count = c.num_hidden_layers
        keys: list[Any] = [None] * count if cache is None else list(cache.keys)
        values: list[Any] = [None] * count if cache is None else list(cache.values)
        streams = [x]  # those nobody taps are never kept: they are values of the trace, not buffers
        for i in range(count):
            x, keys[i], values[i] = self._layer(f"layer_{i}", x, keys[i], values[i], start, cos_sin, visible)
            x = constrain(x, DATA)
            streams.append(x)
        cache = None if cache is None else KVCache(tuple(keys), tuple(values), start + width)
        x = layers.RMSNorm(c.rms_norm_eps, self.dtype, name="norm")(x)
        if not c.tie_word_embeddings:
            embedding = self.param("head", layers.WEIGHT_INIT, (c.vocab_size, c.hidden_size), self.dtype)
        if not head:
            return x, cache
        with jax.named_scope("head"):
            logits = constrain(layers.project(x, embedding, self.dtype), DATA, None, ANY)
        logits = constrain(logits, DATA)  # gathered, and not the head's rows before the product
        return ((logits, jnp.stack([streams[i] for i in tapped], axis=2)) if tapped else logits), cache

    def _layer(self, name: str, *inputs: Any) -> tuple[Array, Array | None, Array | None]:
        """The block of that name, whose parameters are made here and else only handed to what is traced once."""
        if self.is_initializing():
            return Block(self.config, self.dtype, name=name)(*inputs)
        with jax.named_scope(name):
            return _traced_block(self.config, self.dtype, self.get_variable("params", name), *inputs)


class Block(nn.Module):
    """Pre-norm attention and MLP around a float32 residual stream."""

    config: LlamaConfig
    dtype: Any

    @nn.compact
    def __call__(self, x, keys, values, start, cos_sin, mask) -> tuple[Array, Array | None, Array | None]:
        c, dtype = self.config, self.dtype
        with jax.named_scope("attention"):
            normed = layers.RMSNorm(c.rms_norm_eps, dtype, name="attention_norm")(x)
            bias = c.attention_bias
            attention = layers.Attention(
                c.num_attention_heads, c.num_key_value_heads, c.head_dim, bias, bias, dtype, name="attention"
            )
            out, keys, values = attention(normed, keys, values, start, cos_sin, mask)
            x += out
        with jax.named_scope("mlp"):
            normed = layers.RMSNorm(c.rms_norm_eps, dtype, name="mlp_norm")(x)
            x += layers.GatedMLP(c.intermediate_size, c.mlp_bias, dtype, name="mlp")(normed)
        return x, keys, values


@functools.partial(jax.jit, static_argnums=(0, 1))
def _traced_block(config: LlamaConfig, dtype: Any, params: Any, *inputs: Any):
    """A block as a function of its parameters: traced and lowered once for all layers of equal shapes.

    XLA inlines the calls, so that the program that runs is the same; flax's modules would be traced once a layer.
    """
    return Block(config, dtype, parent=None).apply({"params": params}, *inputs)


def example_config() -> LlamaConfig:
    """The smallest configuration that uses every part; tests ask every family for one."""
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # not hidden_size / heads
        rope_theta=100.0,
        rope_scaling=scaling | {"original_max_position_embeddings": 16},
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def language_model(config: LlamaConfig, dtype: Any = jnp.bfloat16) -> LanguageModel:
    """The decoding seam. `dtype`: of matmul inputs and cache; parameters of another one are cast in every pass."""
    module = Llama(config, dtype)
    c = config

    def init_cache(params, batch, slots, source=None):
        del params, source  # no encoder, nothing to precompute
        return layers.init_kv_cache(c.num_hidden_layers, batch, slots, c.num_key_value_heads, c.head_dim, dtype)

    def apply(params, tokens, cache, positions=None, mask=None):
        return module.apply({"params": params}, tokens, cache, positions, mask)

    def hidden(params, tokens, cache, positions=None, mask=None):
        return module.apply({"params": params}, tokens, cache, positions, mask, head=False)

    def tapped(params, tokens, cache, which):
        (logits, streams), cache = module.apply({"params": params}, tokens, cache, tapped=which)
        return logits, streams, cache

    def kernel(params):
        return jnp.asarray(params["embedding" if c.tie_word_embeddings else "head"]).astype(dtype)

    spec = ModelSpec(c.vocab_size, c.max_position_embeddings, c.eos_token_ids)
    tap = Tap(tapped, c.num_hidden_layers, c.hidden_size)
    return LanguageModel(init_cache, apply, layers.with_length, spec, Head(hidden, kernel), tap)


def init_params(config: LlamaConfig, key: Array, dtype: Any = jnp.bfloat16):
    """Random parameters: normal(0.02) kernels, zero biases, unit norms. The key is consumed."""
    cache = language_model(config, dtype).init_cache(None, 1, 2)
    return jax.jit(Llama(config, dtype).init)(key, jnp.zeros((1, 2), jnp.int32), cache)["params"]


def parameter_table(config: LlamaConfig) -> dict[str, Parameter]:
    """Hugging Face's name of every weight -> where it lives, and which axis of it is divided over devices."""
    c = config
    table = {
        "model.embed_tokens.weight": Parameter(("embedding",), (c.vocab_size, c.hidden_size), split=0),
        "model.norm.weight": Parameter(("norm", "scale"), (c.hidden_size,)),
    }
    if not c.tie_word_embeddings:
        table["lm_head.weight"] = Parameter(("head",), (c.vocab_size, c.hidden_size), split=0)
    for i in range(c.num_hidden_layers):
        table |= _layer_table(c, f"model.layers.{i}.", f"layer_{i}")
    return table


def params_from_named(
    config: LlamaConfig, named: weights.Named, dtype: Any = jnp.bfloat16, place: weights.Place | None = None
):
    """Parameters in `dtype` from tensors named as Hugging Face names them. Raises ValueError as `weights` says.

    A tied checkpoint may repeat its embedding as `lm_head.weight`, and old ones store rotary frequencies: both dropped.
    """
    ignored: dict[str, tuple[int, ...] | None] = {"model.rotary_emb.inv_freq": None}
    ignored |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(config.num_hidden_layers)}
    if config.tie_word_embeddings:
        ignored["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return weights.params_from_named(parameter_table(config), named, dtype, ignored=ignored, place=place)


def named_from_params(config: LlamaConfig, params: Any):
    """Host arrays named and shaped as in a Hugging Face checkpoint; `params_from_named` inverts it."""
    return weights.named_from_params(parameter_table(config), params)


def _layer_table(c: LlamaConfig, prefix: str, layer: str) -> dict[str, Parameter]:
    width, heads = c.hidden_size, (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    table = {
        prefix + "input_layernorm.weight": Parameter((layer, "attention_norm", "scale"), (width,)),
        prefix + "post_attention_layernorm.weight": Parameter((layer, "mlp_norm", "scale"), (width,)),
    }
    table |= layers.attention_table(f"{prefix}self_attn.", (layer, "attention"), heads, width, c.attention_bias)
    return table | layers.gated_mlp_table(f"{prefix}mlp.", (layer, "mlp"), c.intermediate_size, width, c.mlp_bias)


def _expect(config: Mapping[str, Any], name: str, value: str) -> None:
    if config.get(name, value) != value:
        raise ValueError(f"models/llama.py serves {name} {value!r}, got {config[name]!r}")


def _rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from either generation of config.json."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor other than 1 is not served, got {rope or config!r}")
    kind = rope_type(rope)
    rope.pop("type", None)
    scaling = None if kind == "default" else {**rope, "rope_type": kind}
    return {"rope_theta": float(theta), "rope_scaling": scaling}
