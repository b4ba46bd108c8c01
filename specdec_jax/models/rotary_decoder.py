"""Families with rotary attention, a gated MLP and RMS norms, like Llama: config, block, and table of weights."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax

from specdec_jax.models import attention, layers
from specdec_jax.models.config import FULL, SLIDING, RopeConfig
from specdec_jax.models.decoder_only import Family
from specdec_jax.models.rope import rope
from specdec_jax.models.weights import Parameter
from specdec_jax.types import Array


@dataclass(frozen=True)
class RotaryConfig(RopeConfig):
    """The base of these families' configs; a family's class overrides the attributes in which its block differs.

    Heads may share keys and values, and may have any width. Raises ValueError for invalid values.
    """

    qkv_bias: ClassVar[Any] = False
    output_bias: ClassVar[Any] = False
    mlp_bias: ClassVar[Any] = False
    qk_norm: ClassVar[bool] = False  # queries and keys are normalised per head
    post_norms: ClassVar[bool] = False  # the outputs of attention and MLP are normalised too
    norm_offset: ClassVar[float] = 0.0  # `layers.RMSNorm`
    fused_weights: ClassVar[bool] = False  # checkpoints store q, k and v as one tensor, and gate and up as another
    scoring: ClassVar[Any] = attention.PLAIN

    num_key_value_heads: int
    head_dim: int
    _: KW_ONLY
    rms_norm_eps: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """By default one key head per head, and heads that divide the width."""
        values = super().read_fields(config, values)
        heads = values.get("num_attention_heads")
        width = values.get("hidden_size", 0) // heads if heads else 0
        return {"num_key_value_heads": heads, "head_dim": width, **values}


@dataclass(frozen=True)
class RotaryWindowedConfig(RotaryConfig):
    """Layers may see only the last `sliding_window` tokens, including the current one; None: no layer does."""

    _: KW_ONLY
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None  # None: all layers sliding, or none

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
        usual = FULL if self.sliding_window is None else SLIDING
        return self.layer_types or (usual,) * self.num_hidden_layers

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Converts the kinds of layers to a tuple, which is hashable."""
        values = super().read_fields(config, values)
        return values | {"layer_types": tuple(values["layer_types"]) if values.get("layer_types") else None}


@dataclass(frozen=True)
class AttentionBias:
    """A mixin for configs: a single field for the biases of all of attention's projections."""

    _: KW_ONLY
    attention_bias: bool = False

    qkv_bias = property(lambda self: self.attention_bias)
    output_bias = property(lambda self: self.attention_bias)


def _norm(config: Any, dtype: Any) -> Callable[..., nn.Module]:
    return functools.partial(layers.RMSNorm, config.rms_norm_eps, dtype, config.norm_offset)


class RotaryBlock(nn.Module):
    """Pre-norm attention and MLP around a float32 residual stream."""

    config: Any
    dtype: Any
    kind: str

    @nn.compact
    def __call__(self, x, keys, values, start, cos_sin, mask) -> tuple[Array, Array | None, Array | None]:
        c, dtype, norm = self.config, self.dtype, _norm(self.config, self.dtype)
        with jax.named_scope("attention"):
            heads, biases = (c.num_attention_heads, c.num_key_value_heads, c.head_dim), (c.qkv_bias, c.output_bias)
            head_norm = norm if c.qk_norm else None
            attend = attention.Attention(*heads, *biases, dtype, head_norm, c.scoring, name="attention")
            out, keys, values = attend(norm(name="attention_norm")(x), keys, values, start, cos_sin, mask)
            x += norm(name="attention_post_norm")(out) if c.post_norms else out
        with jax.named_scope("mlp"):
            out = self.mlp()(norm(name="mlp_norm")(x))
            x += norm(name="mlp_post_norm")(out) if c.post_norms else out
        return x, keys, values

    def mlp(self) -> nn.Module:
        """The module after attention, named `mlp`."""
        c = self.config
        return layers.GatedMLP(c.intermediate_size, c.mlp_bias, self.dtype, c.hidden_act, name="mlp")


def mlp_table(config: Any, layer: int, prefix: str, path: tuple[str, ...]) -> dict[str, Parameter]:
    """Table of a layer's MLP: Hugging Face's names with the layer's `prefix`, and their places below `path`."""
    gates = ("gate_up_proj",) if config.fused_weights else ("gate_proj", "up_proj")
    names = (tuple(f"{prefix}mlp.{gate}" for gate in gates), f"{prefix}mlp.down_proj")
    return layers.gated_mlp_table(names, path, config.intermediate_size, config.hidden_size, config.mlp_bias)


def parameter_table(config: Any, mlp: Callable[..., dict[str, Parameter]] = mlp_table) -> dict[str, Parameter]:
    """Maps Hugging Face's name of every weight to its place in the parameters and its sharded axis."""
    c = config
    table = {
        "model.embed_tokens.weight": Parameter(("embedding",), (c.vocab_size, c.hidden_size), split=0),
        "model.norm.weight": Parameter(("norm", "scale"), (c.hidden_size,)),
    }
    if not c.tie_word_embeddings:
        table["lm_head.weight"] = Parameter(("head",), (c.vocab_size, c.hidden_size), split=0)
    heads, biases = (c.num_attention_heads, c.num_key_value_heads, c.head_dim), (c.qkv_bias, c.output_bias)
    for i in range(c.num_hidden_layers):
        prefix, layer = f"model.layers.{i}.", f"layer_{i}"
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
        if c.post_norms:
            norms |= {"post_attention_layernorm": "attention_post_norm", "pre_feedforward_layernorm": "mlp_norm"}
            norms["post_feedforward_layernorm"] = "mlp_post_norm"
        for name, leaf in norms.items():
            table[f"{prefix}{name}.weight"] = Parameter((layer, leaf, "scale"), (c.hidden_size,))
        for kind, leaf in (("q", "query_norm"), ("k", "key_norm")) if c.qk_norm else ():
            table[f"{prefix}self_attn.{kind}_norm.weight"] = Parameter(
                (layer, "attention", leaf, "scale"), (c.head_dim,)
            )
        inputs = ("qkv_proj",) if c.fused_weights else ("q_proj", "k_proj", "v_proj")
        names, path = [f"{prefix}self_attn.{name}" for name in (*inputs, "o_proj")], (layer, "attention")
        table |= attention.attention_table(names, path, heads, c.hidden_size, biases, by_kind=c.fused_weights)
        table |= mlp(c, i, prefix, (layer, "mlp"))
    return table


def _ignored(config: Any) -> dict[str, tuple[int, ...] | None]:
    """Dropped tensors: a head that repeats a tied embedding, and rotary frequencies of old checkpoints."""
    ignored: dict[str, tuple[int, ...] | None] = {"model.rotary_emb.inv_freq": None}
    ignored |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(config.num_hidden_layers)}
    if config.tie_word_embeddings:
        ignored["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return ignored


FAMILY = Family(
    RotaryBlock,
    norm=lambda config, dtype, name: _norm(config, dtype)(name=name),
    places=lambda config, kind, positions: rope(config, positions),
    table=parameter_table,
    ignored=_ignored,
    prefix="model.",
)
