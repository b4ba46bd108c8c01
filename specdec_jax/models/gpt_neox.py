"""Hugging Face's model_type `gpt_neox` (arXiv 2204.06745, and Pythia, 2304.01373): attention and MLP side by side."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import flax.linen as nn
import jax

from specdec_jax.models import decoder_only, layers
from specdec_jax.models.decoder_only import Family, check_given, check_positive, ends_from_hf, ends_to_hf
from specdec_jax.models.rope import check_scaling, inverse_frequencies, rope_from_hf, rotation
from specdec_jax.models.weights import Parameter

Array = jax.Array

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ROTATED = 0.25  # of a head, where config.json does not say


@dataclass(frozen=True)
class GPTNeoXConfig:
    """Fields named as in Hugging Face's config.json, with its defaults. Numbers that do not fit raise ValueError."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    rotary_pct: float = ROTATED  # of a head's width
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    use_parallel_residual: bool = True
    attention_bias: bool = True
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self):
        check_positive(self, (*REQUIRED, "max_position_embeddings"))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        if self.rotated < 2 or self.rotated % 2 or self.rotated > self.head_dim:
            raise ValueError(f"rotary_pct {self.rotary_pct!r} of heads of {self.head_dim} must be an even number")
        if self.hidden_act not in layers.ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {', '.join(layers.ACTIVATIONS)}, got {self.hidden_act!r}")
        check_scaling(self.rope_scaling)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """As many as there are heads."""
        return self.num_attention_heads

    @property
    def rotated(self) -> int:
        """Of a head's width, what has rotary positions."""
        return int(self.head_dim * self.rotary_pct)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GPTNeoXConfig":
        """Reads config.json as transformers 4 (`rotary_pct`, `rotary_emb_base`) or 5 (`rope_parameters`) writes it.

        Raises ValueError on another model_type, a missing number, an unknown activation or rope type.
        """
        check_given(config, "gpt_neox", REQUIRED)
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        share = rope.pop("partial_rotary_factor", config.get("rotary_pct", ROTATED))
        rope.setdefault("rope_theta", config.get("rotary_emb_base"))
        known = {f.name for f in fields(cls)} - {"rope_theta", "rope_scaling", "rotary_pct"}
        given = {name: config[name] for name in known if config.get(name) is not None}
        given |= rope_from_hf({"rope_parameters": rope}) | {"eos_token_ids": ends_from_hf(config)}
        return cls(**given, rotary_pct=float(share))

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 both read; `from_hf` inverts it."""
        scaling = self.rope_scaling or {"rope_type": "default"}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "eos_token_ids"}
        return own | {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "rotary_emb_base": self.rope_theta,
            "rope_parameters": {**scaling, "rope_theta": self.rope_theta, "partial_rotary_factor": self.rotary_pct},
            "eos_token_id": ends_to_hf(self.eos_token_ids),
        }


class GPTNeoXBlock(nn.Module):
    """Attention and MLP of the same stream, each behind a norm of its own; or one after the other."""

    config: GPTNeoXConfig
    dtype: Any
    kind: str

    @nn.compact
    def __call__(self, x, keys, values, start, cos_sin, mask) -> tuple[Array, Array | None, Array | None]:
        c, dtype = self.config, self.dtype
        with jax.named_scope("attention"):
            normed = layers.LayerNorm(c.layer_norm_eps, dtype, name="attention_norm")(x)
            heads = (c.num_attention_heads, c.num_attention_heads, c.head_dim)
            attention = layers.Attention(*heads, c.attention_bias, c.attention_bias, dtype, name="attention")
            out, keys, values = attention(normed, keys, values, start, cos_sin, mask)
        with jax.named_scope("mlp"):
            normed = layers.LayerNorm(c.layer_norm_eps, dtype, name="mlp_norm")(
                x if c.use_parallel_residual else x + out
            )
            x = x + out + layers.MLP(c.intermediate_size, c.hidden_act, dtype, name="mlp")(normed)
        return x, keys, values


def parameter_table(config: GPTNeoXConfig) -> dict[str, Parameter]:
    """Hugging Face's name of every weight -> where it lives, and which axis of it is divided over devices."""
    c, heads = config, (config.num_attention_heads, config.head_dim)
    table = {"gpt_neox.embed_in.weight": Parameter(("embedding",), (c.vocab_size, c.hidden_size), split=0)}
    table |= layers.norm_table("gpt_neox.final_layer_norm", ("norm",), c.hidden_size)
    if not c.tie_word_embeddings:
        table["embed_out.weight"] = Parameter(("head",), (c.vocab_size, c.hidden_size), split=0)
    for i in range(c.num_hidden_layers):
        name, layer = f"gpt_neox.layers.{i}", f"layer_{i}"
        table |= layers.norm_table(f"{name}.input_layernorm", (layer, "attention_norm"), c.hidden_size)
        table |= layers.norm_table(f"{name}.post_attention_layernorm", (layer, "mlp_norm"), c.hidden_size)
        names, own = (f"{name}.attention.query_key_value", f"{name}.attention.dense"), (layer, "attention")
        table |= layers.fused_attention_table(names, own, heads, c.hidden_size, c.attention_bias)
        names = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
        table |= layers.mlp_table(names, (layer, "mlp"), c.intermediate_size, c.hidden_size)
    return table


def _ignored(config: GPTNeoXConfig) -> dict[str, tuple[int, ...] | None]:
    """Masks and frequencies that old checkpoints store, and a head that repeats a tied embedding."""
    own = ("bias", "masked_bias", "rotary_emb.inv_freq")
    layers_of = range(config.num_hidden_layers)
    ignored: dict[str, tuple[int, ...] | None] = {
        f"gpt_neox.layers.{i}.attention.{name}": None for i in layers_of for name in own
    }
    if config.tie_word_embeddings:
        ignored["embed_out.weight"] = (config.vocab_size, config.hidden_size)
    return ignored


def _told(config: GPTNeoXConfig, kind: str, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines of the part of a head that is rotated."""
    del kind
    return rotation(positions, inverse_frequencies(config.rotated, config.rope_theta, config.rope_scaling))


def _norm(config: GPTNeoXConfig, dtype: Any, name: str) -> nn.Module:
    return layers.LayerNorm(config.layer_norm_eps, dtype, name=name)


FAMILY = Family(GPTNeoXBlock, _norm, _told, parameter_table, _ignored)
language_model = functools.partial(decoder_only.language_model, FAMILY)
init_params = functools.partial(decoder_only.init_params, FAMILY)
params_from_named = functools.partial(decoder_only.params_from_named, FAMILY)
named_from_params = functools.partial(decoder_only.named_from_params, FAMILY)


def example_config() -> GPTNeoXConfig:
    """The smallest configuration that uses every part; tests ask every family for one."""
    return GPTNeoXConfig(61, 24, 40, 2, 3, rotary_pct=0.5, max_position_embeddings=64, eos_token_ids=(2,))
