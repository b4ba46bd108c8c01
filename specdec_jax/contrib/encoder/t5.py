"""Hugging Face's model_type `t5`: T5 (arXiv 1910.10683), T5 1.1 and Flan-T5 (gated MLP, untied head), and ByT5
(arXiv 2105.13626), which reads bytes.

Attention adds a learned bias to every score, by head and by the distance between key and query, without scaling. Large
distances share a bias, in buckets that grow with the distance (section 2.1). The encoder attends in both directions,
the decoder to the past; each stack has one table of biases for all layers. Cross-attention has no biases.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from specdec_jax.contrib.encoder import encoder_decoder
from specdec_jax.contrib.encoder.encoder_decoder import DECODER, ENCODER, Family
from specdec_jax.models import layers
from specdec_jax.models.attention import Attention, Scoring, attend, attention_table
from specdec_jax.models.config import HFConfig
from specdec_jax.models.layers import WEIGHT_INIT, Projection, RMSNorm, in_table, out_table
from specdec_jax.models.weights import Fused, Parameter
from specdec_jax.types import Array

GATED = "gated-"
KEY, VALUE = 0, 1  # indices of a head's parts in the fused projection of the source


@dataclass(frozen=True)
class T5Config(HFConfig):
    """Fields of Hugging Face's config.json, with its defaults. Raises ValueError for invalid values.

    Distances are not limited, so `n_positions`, which transformers does not read either, is ignored: a source and a
    text may have `max_position_embeddings` tokens, a number chosen here.
    """

    model_type: ClassVar[str] = "t5"
    architecture: ClassVar[str] = "T5ForConditionalGeneration"
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "num_decoder_layers",
        "num_encoder_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "hidden_act": "dense_act_fn",
    }
    required: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_encoder_layers",
        "num_attention_heads",
    )

    _: KW_ONLY
    num_encoder_layers: int
    head_dim: int = 64
    hidden_act: str = "relu"
    is_gated_act: bool = False
    max_position_embeddings: int = 4096
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    decoder_start_token_id: int = 0
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("num_encoder_layers")
        buckets, longest = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 2:
            raise ValueError(f"relative_attention_num_buckets must be even and at least 4, got {buckets!r}")
        if longest <= buckets // 2:
            raise ValueError(f"relative_attention_max_distance must exceed half of {buckets} buckets, got {longest!r}")
        if not 0 <= self.decoder_start_token_id < self.vocab_size:
            wrong = self.decoder_start_token_id
            raise ValueError(f"decoder_start_token_id must be a token, 0 to {self.vocab_size - 1}, got {wrong!r}")

    num_key_value_heads = property(lambda self: self.num_attention_heads)
    head_scale = property(lambda self: self.hidden_size**-0.5 if self.tie_word_embeddings else 1.0)

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The activation by `feed_forward_proj`, if present, and defaults that depend on other fields.

        The head is tied unless `tie_word_embeddings`, or `scale_decoder_outputs` as written by transformers 5, is
        false.
        """
        values.setdefault("num_encoder_layers", config.get("num_layers"))
        values.setdefault("num_hidden_layers", values["num_encoder_layers"])
        values.setdefault("decoder_start_token_id", values.get("pad_token_id", 0))
        if kind := config.get("feed_forward_proj"):
            act = "gelu_new" if kind == f"{GATED}gelu" else kind.removeprefix(GATED)
            values |= {"hidden_act": act, "is_gated_act": kind.startswith(GATED)}
        tied = config.get("tie_word_embeddings") is not False and config.get("scale_decoder_outputs") is not False
        return values | {"tie_word_embeddings": tied}

    def to_hf(self) -> dict[str, Any]:
        gelu = self.is_gated_act and self.hidden_act == "gelu_new"
        kind = f"{GATED if self.is_gated_act else ''}{'gelu' if gelu else self.hidden_act}"
        return super().to_hf() | {"feed_forward_proj": kind, "is_encoder_decoder": True}


class Positions(nn.Module):
    """The biases of a stack by distance, [2 M + 1, H] float32: entry d + M is for a key d slots after its query."""

    config: Any
    dtype: Any
    kind: str

    @nn.compact
    def __call__(self) -> Array:
        c = self.config
        shape = c.relative_attention_num_buckets, c.num_attention_heads
        bias = self.param("bias", WEIGHT_INIT, shape, self.dtype).astype(jnp.float32)
        longest = c.relative_attention_max_distance
        return bias[buckets(np.arange(-longest, longest + 1), shape[0], longest, both=self.kind == ENCODER)]


def buckets(distance: np.ndarray, count: int, longest: int, both: bool) -> np.ndarray:
    """The bucket of each distance, negative for a key before its query; distances from `longest` share the last one.

    Half of the buckets of a direction hold one distance each, the others grow by a constant factor. The arithmetic is
    float32, as in the models' training code: other precisions may round exact powers to another bucket.
    """
    first = np.zeros_like(distance)
    if both:
        count //= 2
        first, distance = np.where(distance > 0, count, 0), np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = count // 2
    far = np.log(np.maximum(distance, exact) / exact).astype(np.float32) / np.float32(math.log(longest / exact))
    far = np.minimum(exact + (far * np.float32(count - exact)).astype(np.int64), count - 1)
    return first + np.where(distance < exact, distance, far)


class CrossAttention(nn.Module):
    """Attention of x [B, T, D] over a source's keys and values [B, H, E, head_dim], computed by `read`."""

    heads: int
    head_dim: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, keys: Array, values: Array, seen: Array) -> Array:
        batch, width, model_width = x.shape
        rows = self.heads * self.head_dim
        self.param("key_value", WEIGHT_INIT, (2 * rows, model_width), self.dtype)  # used by `read` only
        query = Projection(rows, False, self.dtype, name="query")(x).reshape(batch, width, self.heads, self.head_dim)
        start = jnp.zeros((batch,), jnp.int32)
        return Projection(model_width, False, self.dtype, name="output")(
            attend(query, keys, values, seen, start, Scoring(scale=1.0))
        )


def read(config: Any, dtype: Any, params: Any, encoded: Array) -> tuple[Array, Array]:
    """A decoder block's cross keys and values [B, H, E, head_dim], from the encoder's output [B, E, D]."""
    batch, width, _ = encoded.shape
    both = layers.project(encoded, params["cross"]["key_value"], dtype).astype(dtype)
    both = both.reshape(batch, width, config.num_attention_heads, 2, config.head_dim).transpose(3, 0, 2, 1, 4)
    return both[KEY], both[VALUE]


class _Block(nn.Module):
    """The common parts of the blocks of both stacks, around a float32 residual stream."""

    config: Any
    dtype: Any
    kind: str

    def norm(self, name: str) -> nn.Module:
        return RMSNorm(self.config.layer_norm_epsilon, self.dtype, name=name)

    def attention(self, position_bias: Array) -> nn.Module:
        c = self.config
        heads, longest = c.num_attention_heads, position_bias.shape[0] // 2

        def bias(distance: Array) -> Array:
            return jnp.moveaxis(position_bias[jnp.clip(distance, -longest, longest) + longest], -1, 1)

        scoring = Scoring(scale=1.0, bias=bias)
        return Attention(heads, heads, c.head_dim, False, False, self.dtype, None, scoring, name="attention")

    def mlp(self) -> nn.Module:
        kind = layers.GatedMLP if self.config.is_gated_act else layers.MLP
        return kind(self.config.intermediate_size, False, self.dtype, self.config.hidden_act, name="mlp")


class EncoderBlock(_Block):
    """Attention over the whole source, and an MLP."""

    @nn.compact
    def __call__(self, x: Array, position_bias: Array, visible: Array) -> Array:
        shape = x.shape[0], self.config.num_attention_heads, x.shape[1], self.config.head_dim
        keys, values = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        start = jnp.zeros(x.shape[:1], jnp.int32)
        out, _, _ = self.attention(position_bias)(self.norm("attention_norm")(x), keys, values, start, None, visible)
        x += out
        return x + self.mlp()(self.norm("mlp_norm")(x))


class DecoderBlock(_Block):
    """Causal attention, attention over the source, and an MLP."""

    @nn.compact
    def __call__(self, x, keys, values, cross, start, position_bias, visible, seen) -> tuple[Array, Array, Array]:
        c, (cross_keys, cross_values) = self.config, cross
        out, keys, values = self.attention(position_bias)(
            self.norm("attention_norm")(x), keys, values, start, None, visible
        )
        x += out
        attend_source = CrossAttention(c.num_attention_heads, c.head_dim, self.dtype, name="cross")
        x += attend_source(self.norm("cross_norm")(x), cross_keys, cross_values, seen)
        return x + self.mlp()(self.norm("mlp_norm")(x)), keys, values


def parameter_table(config: Any) -> dict[str, Parameter]:
    """Maps Hugging Face's name of every weight to its place in the parameters and its sharded axis."""
    c, shape = config, (config.vocab_size, config.hidden_size)
    table = {"shared.weight": Parameter(("embedding",), shape, split=0)}
    if not c.tie_word_embeddings:
        table["lm_head.weight"] = Parameter(("head",), shape, split=0)
    for stack, count in ((ENCODER, c.num_encoder_layers), (DECODER, c.num_hidden_layers)):
        table[f"{stack}.final_layer_norm.weight"] = Parameter((stack, "norm", "scale"), (c.hidden_size,))
        table[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = Parameter(
            (stack, "positions", "bias"), (c.relative_attention_num_buckets, c.num_attention_heads), precise=True
        )
        for i in range(count):
            table |= _block_table(c, f"{stack}.block.{i}.layer.", (stack, f"layer_{i}"), crosses=stack == DECODER)
    return table


def _block_table(c: Any, prefix: str, path: tuple[str, ...], crosses: bool) -> dict[str, Parameter]:
    heads, width, mlp = (c.num_attention_heads, c.num_attention_heads, c.head_dim), c.hidden_size, 2 if crosses else 1
    norms = ("attention_norm", "cross_norm", "mlp_norm") if crosses else ("attention_norm", "mlp_norm")
    table = {
        f"{prefix}{i}.layer_norm.weight": Parameter((*path, norm, "scale"), (width,)) for i, norm in enumerate(norms)
    }
    projections = [f"{prefix}0.SelfAttention.{name}" for name in "qkvo"]
    table |= attention_table(projections, (*path, "attention"), heads, width)
    if crosses:  # keys and values are one projection, ordered by head, key before value
        cross, rows, parts = (*path, "cross"), c.num_attention_heads * c.head_dim, (heads[0], 2, c.head_dim)
        source = f"{prefix}1.EncDecAttention."
        table |= in_table(f"{source}q", (*cross, "query"), (rows, width), heads[0], False)
        for name, at in (("k", KEY), ("v", VALUE)):
            fused = Fused(parts, (at,))
            table[f"{source}{name}.weight"] = Parameter((*cross, "key_value"), (rows, width), fused, 0, heads[0])
        table |= out_table(f"{source}o", (*cross, "output"), (width, rows), heads[0], False)
    inner, down = f"{prefix}{mlp}.DenseReluDense.wi", f"{prefix}{mlp}.DenseReluDense.wo"
    if c.is_gated_act:
        gates = f"{inner}_0", f"{inner}_1"
        return table | layers.gated_mlp_table((gates, down), (*path, "mlp"), c.intermediate_size, width)
    return table | layers.mlp_table((inner, down), (*path, "mlp"), c.intermediate_size, width, bias=False)


def _ignored(config: Any) -> dict[str, tuple[int, ...] | None]:
    """Dropped tensors: copies of the embedding, a tied head, and unused biases of cross-attention."""
    shape = config.vocab_size, config.hidden_size
    names = [f"{stack}.embed_tokens.weight" for stack in (ENCODER, DECODER)]
    if config.tie_word_embeddings:
        names.append("lm_head.weight")
    ignored: dict[str, tuple[int, ...] | None] = dict.fromkeys(names, shape)
    return ignored | {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": None}


FAMILY = Family(
    EncoderBlock,
    DecoderBlock,
    Positions,
    norm=lambda config, dtype, name: RMSNorm(config.layer_norm_epsilon, dtype, name=name),
    read=read,
    table=parameter_table,
    ignored=_ignored,
)
_, language_model, init_params, params_from_named, named_from_params = encoder_decoder.functions(FAMILY)


def example_config() -> T5Config:
    fields = {"eos_token_ids": (2,), "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    gated = {"hidden_act": "gelu_new", "is_gated_act": True, "tie_word_embeddings": False}
    return T5Config(61, 24, 40, 2, 4, num_encoder_layers=3, head_dim=8, max_position_embeddings=64, **fields, **gated)
