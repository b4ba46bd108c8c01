"""Families of rotary attention and a gated MLP behind RMS norms, as Llama's: config, block, table of weights."""

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax

from specdec_jax.models import attention, layers
from specdec_jax.models.config import GroupedConfig, WindowedConfig
from specdec_jax.models.decoder_only import Family
from specdec_jax.models.rope import rope
from specdec_jax.models.weights import Parameter

Array = jax.Array


class Rotary:
    """What a block has; a family's config says otherwise where its block does."""

    qkv_bias: ClassVar[Any] = False
    output_bias: ClassVar[Any] = False
    gated_bias: ClassVar[Any] = False
    qk_norm: ClassVar[bool] = False  # queries and keys are normed, head by head
    post_norms: ClassVar[bool] = False  # what attention and MLP add to the stream is normed too
    norm_offset: ClassVar[float] = 0.0  # `layers.RMSNorm`
    fused_weights: ClassVar[bool] = False  # in a checkpoint q, k and v are one tensor, gate and up another
    scoring: ClassVar[Any] = attention.PLAIN


@dataclass(frozen=True)
class RotaryConfig(Rotary, GroupedConfig):
    """A config of these families. Numbers that do not fit raise ValueError."""

    _: KW_ONLY
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class RotaryWindowedConfig(Rotary, WindowedConfig):
    """A config of those of them that may have sliding windows. Numbers that do not fit raise ValueError."""

    _: KW_ONLY
    rms_norm_eps: float = 1e-6


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
            own = norm if c.qk_norm else None
            attend = attention.Attention(*heads, *biases, dtype, own, c.scoring, name="attention")
            out, keys, values = attend(norm(name="attention_norm")(x), keys, values, start, cos_sin, mask)
            x += norm(name="attention_post_norm")(out) if c.post_norms else out
        with jax.named_scope("mlp"):
            out = self.mlp()(norm(name="mlp_norm")(x))
            x += norm(name="mlp_post_norm")(out) if c.post_norms else out
        return x, keys, values

    def mlp(self) -> nn.Module:
        """What follows attention, named `mlp`."""
        c = self.config
        return layers.GatedMLP(c.intermediate_size, c.gated_bias, self.dtype, c.hidden_act, name="mlp")


def mlp_table(config: Any, layer: int, prefix: str, path: tuple[str, ...]) -> dict[str, Parameter]:
    """Of a layer's MLP: Hugging Face's names behind `prefix`, the layer's, and where they live at `path`."""
    del layer
    gates = ("gate_up_proj",) if config.fused_weights else ("gate_proj", "up_proj")
    names = (tuple(f"{prefix}mlp.{gate}" for gate in gates), f"{prefix}mlp.down_proj")
    return layers.gated_mlp_table(names, path, config.intermediate_size, config.hidden_size, config.gated_bias)


def parameter_table(config: Any, mlp: Callable[..., dict[str, Parameter]] = mlp_table) -> dict[str, Parameter]:
    """Hugging Face's name of every weight -> where it lives, and which axis of it is divided over devices."""
    c = config
    table = {
        "model.embed_tokens.weight": Parameter(("embedding",), (c.vocab_size, c.hidden_size), split=0),
        "model.norm.weight": Parameter(("norm", "scale"), (c.hidden_size,)),
    }
    if not c.tie_word_embeddings:
        table["lm_head.weight"] = Parameter(("head",), (c.vocab_size, c.hidden_size), split=0)
    for i in range(c.num_hidden_layers):
        prefix, layer = f"model.layers.{i}.", f"layer_{i}"
        table |= norms_table(c, prefix, layer) | _attention_table(c, f"{prefix}self_attn.", (layer, "attention"))
        table |= mlp(c, i, prefix, (layer, "mlp"))
    return table


def norms_table(c: Any, prefix: str, layer: str) -> dict[str, Parameter]:
    """Of a layer's norms but those of queries and keys."""
    names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if c.post_norms:
        names |= {"post_attention_layernorm": "attention_post_norm", "pre_feedforward_layernorm": "mlp_norm"}
        names["post_feedforward_layernorm"] = "mlp_post_norm"
    return {
        f"{prefix}{name}.weight": Parameter((layer, leaf, "scale"), (c.hidden_size,)) for name, leaf in names.items()
    }


def _attention_table(c: Any, prefix: str, path: tuple[str, ...]) -> dict[str, Parameter]:
    heads, biases = (c.num_attention_heads, c.num_key_value_heads, c.head_dim), (c.qkv_bias, c.output_bias)
    norms = {
        f"{prefix}{kind}_norm.weight": Parameter((*path, leaf, "scale"), (c.head_dim,))
        for kind, leaf in (("q", "query_norm"), ("k", "key_norm"))
        if c.qk_norm
    }
    if c.fused_weights:
        names = f"{prefix}qkv_proj", f"{prefix}o_proj"
        return norms | attention.fused_attention_table(names, path, heads, c.hidden_size, biases, by_kind=True)
    names = f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj", f"{prefix}o_proj"
    return norms | attention.attention_table(names, path, heads, c.hidden_size, biases)


def _ignored(config: Any) -> dict[str, tuple[int, ...] | None]:
    """A tied checkpoint may repeat its embedding as the head, and old ones store rotary frequencies: both dropped."""
    ignored: dict[str, tuple[int, ...] | None] = {"model.rotary_emb.inv_freq": None}
    ignored |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(config.num_hidden_layers)}
    if config.tie_word_embeddings:
        ignored["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return ignored


def _told(config: Any, kind: str, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines."""
    del kind
    return rope(config, positions)


def _last_norm(config: Any, dtype: Any, name: str) -> nn.Module:
    return _norm(config, dtype)(name=name)


FAMILY = Family(RotaryBlock, _last_norm, _told, parameter_table, _ignored, prefix="model.")
