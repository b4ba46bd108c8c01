"""Families of rotary attention and a gated MLP behind RMS norms, as Llama's: config, block, table of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import flax.linen as nn
import jax

from specdec_jax.models import layers
from specdec_jax.models.decoder_only import (
    FULL,
    SLIDING,
    Family,
    check_given,
    check_positive,
    ends_from_hf,
    ends_to_hf,
)
from specdec_jax.models.rope import check_scaling, inverse_frequencies, rope_from_hf, rotation
from specdec_jax.models.weights import Parameter

Array = jax.Array

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
POSITIVE = (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True)
class RotaryConfig:
    """Fields named as in Hugging Face's config.json, with its defaults. Numbers that do not fit raise ValueError."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]

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
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        check_positive(self, POSITIVE)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        check_scaling(self.rope_scaling)

    # What a block has; a family's class says otherwise where its block does.
    qkv_bias: ClassVar[Any] = False
    output_bias: ClassVar[Any] = False
    gated_bias: ClassVar[Any] = False
    qk_norm: ClassVar[bool] = False

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Of each layer."""
        return (FULL,) * self.num_hidden_layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any:
        """Reads config.json as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) writes it.

        Raises ValueError on another model_type or activation, a missing number, an unknown rope type.
        """
        check_given(config, cls.model_type, REQUIRED)
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"models/{cls.model_type}.py serves hidden_act 'silu', got {config['hidden_act']!r}")
        known = {f.name for f in fields(cls)} - {"rope_theta", "rope_scaling"}
        given = {name: config[name] for name in known if config.get(name) is not None}
        heads = config["num_attention_heads"]
        given.setdefault("num_key_value_heads", heads)
        given.setdefault("head_dim", config["hidden_size"] // heads if heads else 0)
        given["eos_token_ids"] = ends_from_hf(config)
        return cls(**cls.own_fields(config, given), **rope_from_hf(config))

    @classmethod
    def own_fields(cls, config: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """The fields as the family means them, of those that config.json gives by name."""
        del config
        return given

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 both read; `from_hf` inverts it."""
        scaling = self.rope_scaling or {"rope_type": "default"}
        config = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "eos_token_ids"}
        return config | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "rope_parameters": {**scaling, "rope_theta": self.rope_theta},
            "eos_token_id": ends_to_hf(self.eos_token_ids),
        }


@dataclass(frozen=True)
class AttentionBias:
    """A base before a family's config: one field says of all of attention's projections whether they have biases."""

    attention_bias: bool = False

    @property
    def qkv_bias(self) -> bool:
        """Of the projections into attention."""
        return self.attention_bias

    @property
    def output_bias(self) -> bool:
        """Of the projection out of it."""
        return self.attention_bias


@dataclass(frozen=True)
class WindowedConfig(RotaryConfig):
    """A family of which some layers see `sliding_window` tokens only, their own among them; None: no layer does."""

    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None  # None: all sliding, or none

    def __post_init__(self):
        super().__post_init__()
        window, kinds = self.sliding_window, self.layer_types
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"sliding_window must be a positive integer, got {window!r}")
        if kinds is None:
            return
        if len(kinds) != self.num_hidden_layers or set(kinds) - {FULL, SLIDING}:
            raise ValueError(f"layer_types must be {FULL} or {SLIDING} of each of {self.num_hidden_layers} layers")
        if SLIDING in kinds and window is None:
            raise ValueError(f"layer_types has {SLIDING}, and sliding_window is none")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Of each layer."""
        usual = FULL if self.sliding_window is None else SLIDING
        return self.layer_types or (usual,) * self.num_hidden_layers


class RotaryBlock(nn.Module):
    """Pre-norm attention and MLP around a float32 residual stream."""

    config: RotaryConfig
    dtype: Any
    kind: str

    @nn.compact
    def __call__(self, x, keys, values, start, cos_sin, mask) -> tuple[Array, Array | None, Array | None]:
        c, dtype = self.config, self.dtype
        with jax.named_scope("attention"):
            normed = layers.RMSNorm(c.rms_norm_eps, dtype, name="attention_norm")(x)
            heads, biases = (c.num_attention_heads, c.num_key_value_heads, c.head_dim), (c.qkv_bias, c.output_bias)
            norm = c.rms_norm_eps if c.qk_norm else None
            attention = layers.Attention(*heads, *biases, dtype, norm, name="attention")
            out, keys, values = attention(normed, keys, values, start, cos_sin, mask)
            x += out
        with jax.named_scope("mlp"):
            normed = layers.RMSNorm(c.rms_norm_eps, dtype, name="mlp_norm")(x)
            x += layers.GatedMLP(c.intermediate_size, c.gated_bias, dtype, name="mlp")(normed)
        return x, keys, values


def parameter_table(config: RotaryConfig) -> dict[str, Parameter]:
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


def _layer_table(c: RotaryConfig, prefix: str, layer: str) -> dict[str, Parameter]:
    width, heads = c.hidden_size, (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    table = {
        prefix + "input_layernorm.weight": Parameter((layer, "attention_norm", "scale"), (width,)),
        prefix + "post_attention_layernorm.weight": Parameter((layer, "mlp_norm", "scale"), (width,)),
    }
    biases, own = (c.qkv_bias, c.output_bias), (layer, "attention")
    table |= layers.attention_table(f"{prefix}self_attn.", own, heads, width, biases, c.qk_norm)
    return table | layers.gated_mlp_table(f"{prefix}mlp.", (layer, "mlp"), c.intermediate_size, width, c.gated_bias)


def _ignored(config: RotaryConfig) -> dict[str, tuple[int, ...] | None]:
    """A tied checkpoint may repeat its embedding as the head, and old ones store rotary frequencies: both dropped."""
    ignored: dict[str, tuple[int, ...] | None] = {"model.rotary_emb.inv_freq": None}
    ignored |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(config.num_hidden_layers)}
    if config.tie_word_embeddings:
        ignored["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return ignored


def _told(config: RotaryConfig, kind: str, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines."""
    del kind
    return rotation(positions, inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))


def _norm(config: RotaryConfig, dtype: Any, name: str) -> nn.Module:
    return layers.RMSNorm(config.rms_norm_eps, dtype, name=name)


FAMILY = Family(RotaryBlock, _norm, _told, parameter_table, _ignored, lambda config: config.layer_kinds)
