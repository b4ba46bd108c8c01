"""Families with layer norms and a plain MLP, like GPT-2: base of their configs, block, and table of weights."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.models import attention, layers
from specdec_jax.models.decoder_only import Family
from specdec_jax.models.layers import WEIGHT_INIT, mlp_table, norm_table
from specdec_jax.models.weights import Parameter
from specdec_jax.types import Array


class LayerNorms:
    """A mixin for configs: the defaults of a block, which a family may override.

    The heads divide the width, and each has its own keys and values.
    """

    hidden_size: int
    num_attention_heads: int
    layer_norm_eps: ClassVar[Any] = 1e-5
    attention_bias: ClassVar[Any] = True
    mlp_bias: ClassVar[Any] = True
    order: ClassVar[Any] = "pre"
    """`pre`: attention, then the MLP, each after a norm; `normed`: likewise, with the norm's output as the residual;
    `parallel`: both from the same stream, each after its norm; `post`: the stream is normalised after each."""
    scoring: ClassVar[Any] = attention.PLAIN
    num_positions: ClassVar[Any] = 0  # number of learned positions, of which `position_offset` are never used
    position_offset: ClassVar[int] = 0
    norm_of_embeddings: ClassVar[bool] = False
    last_norm: ClassVar[Any] = True

    @property
    def head_dim(self) -> int:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"a width of {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        return self.hidden_size // self.num_attention_heads

    num_key_value_heads = property(lambda self: self.num_attention_heads)


class Names(NamedTuple):
    """The names of a checkpoint's tensors, without `.weight` and `.bias`."""

    prefix: str  # prefix of all names but the head's; base models are saved without it
    layers: str
    embedding: str
    head: str
    norms: tuple[str, str, str]  # in a layer, before attention and MLP; and the last norm
    attention: tuple[str, ...]  # in a layer: q, k and v in one tensor or in three, and the output
    mlp: tuple[str, str]  # in a layer: up, down
    positions: str = ""  # learned positions
    embedding_norm: str = ""
    projections: tuple[str, str] = ("", "")  # between embeddings of another width and the stream
    ignored: tuple[str, ...] = ()  # in a layer: masks and frequencies of old checkpoints
    by_kind: bool = False  # `attention.attention_table`
    turned: bool = False  # kernels are stored as [in, out]


class Embed(nn.Module):
    """Embeddings [B, T, E], positions [B, T] -> [B, T, D]: projection, learned positions and norm, where present."""

    config: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, positions: Array) -> Array:
        c = self.config
        if c.embedding_width != c.hidden_size:
            x = layers.Projection(c.hidden_size, False, self.dtype, name="project")(x)
        if c.num_positions:
            table = self.param("positions", WEIGHT_INIT, (c.num_positions, c.hidden_size), self.dtype)
            x += table[positions + c.position_offset].astype(jnp.float32)
        return layers.LayerNorm(c.layer_norm_eps, self.dtype, name="norm")(x) if c.norm_of_embeddings else x


class End(nn.Module):
    """After the last block: a norm, and a projection to the head's input width, where present."""

    config: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        if c.last_norm:
            x = layers.LayerNorm(c.layer_norm_eps, self.dtype, name="norm")(x)
        if c.embedding_width != c.hidden_size:
            x = layers.Projection(c.embedding_width, False, self.dtype, name="project")(x)
        return x


class LayerNormBlock(nn.Module):
    """Attention and MLP around a float32 residual stream, in the config's order."""

    config: Any
    dtype: Any
    kind: str

    @nn.compact
    def __call__(self, x, keys, values, start, places, mask) -> tuple[Array, Array | None, Array | None]:
        c, dtype, order = self.config, self.dtype, self.config.order
        norm = functools.partial(layers.LayerNorm, c.layer_norm_eps, dtype)
        after, is_normed = order == "post", order == "normed"
        with jax.named_scope("attention"):
            first = norm(name="attention_norm")
            heads = (c.num_attention_heads, c.num_attention_heads, c.head_dim)
            biases = (c.attention_bias, c.attention_bias)
            attend = attention.Attention(*heads, *biases, dtype, None, c.scoring, name="attention")
            normed = x if after else first(x)
            out, keys, values = attend(normed, keys, values, start, places, mask)
            out += normed if is_normed else x
            out = first(out) if after else out
        with jax.named_scope("mlp"):
            second = norm(name="mlp_norm")
            mlp = layers.MLP(c.intermediate_size, c.mlp_bias, dtype, c.hidden_act, name="mlp")
            normed = second(x) if order == "parallel" else out if after else second(out)
            out = (normed if is_normed else out) + mlp(normed)
            return (second(out) if after else out), keys, values


def _table(config: Any, names: Names) -> dict[str, Parameter]:
    """Maps Hugging Face's name of every weight to its place in the parameters and its sharded axis."""
    c, shape = config, (config.vocab_size, config.embedding_width)
    table = {f"{names.prefix}{names.embedding}.weight": Parameter(("embedding",), shape, split=0)}
    if not c.tie_word_embeddings:
        table[f"{names.head}.weight"] = Parameter(("head",), shape, split=0)
    if c.num_positions:
        table[f"{names.prefix}{names.positions}.weight"] = Parameter(
            ("embed", "positions"), (c.num_positions, c.hidden_size), precise=True
        )
    if c.norm_of_embeddings:
        table |= norm_table(names.prefix + names.embedding_norm, ("embed", "norm"), c.hidden_size)
    if c.last_norm:
        table |= norm_table(names.prefix + names.norms[-1], ("norm", "norm"), c.hidden_size)
    if c.embedding_width != c.hidden_size:
        widths = c.hidden_size, c.embedding_width
        for name, place, out in zip(names.projections, ("embed", "norm"), (widths, widths[::-1]), strict=True):
            table[f"{names.prefix}{name}.weight"] = Parameter((place, "project", "kernel"), out)
    heads = c.num_attention_heads, c.num_attention_heads, c.head_dim
    for i in range(c.num_hidden_layers):
        prefix, layer = f"{names.prefix}{names.layers}.{i}.", f"layer_{i}"
        for name, leaf in zip(names.norms, ("attention_norm", "mlp_norm"), strict=False):
            table |= norm_table(prefix + name, (layer, leaf), c.hidden_size)
        biases, path = (c.attention_bias, c.attention_bias), (layer, "attention")
        parts = [prefix + name for name in names.attention]
        table |= attention.attention_table(parts, path, heads, c.hidden_size, biases, names.by_kind, names.turned)
        up, down = (prefix + name for name in names.mlp)
        table |= mlp_table((up, down), (layer, "mlp"), c.intermediate_size, c.hidden_size, c.mlp_bias, names.turned)
    return table


def _ignored(config: Any, names: Names) -> Mapping[str, tuple[int, ...] | None]:
    """Further tensors of old checkpoints, and a head that repeats a tied embedding."""
    ignored: dict[str, tuple[int, ...] | None] = {
        f"{names.prefix}{names.layers}.{i}.{name}": None
        for i in range(config.num_hidden_layers)
        for name in names.ignored
    }
    if config.tie_word_embeddings:
        ignored[f"{names.head}.weight"] = (config.vocab_size, config.embedding_width)
    return ignored


def family(names: Names, places: Callable[..., Any] = lambda config, kind, positions: None) -> Family:
    """The family with these names; without `places` its blocks get no positions."""
    table, ignored = functools.partial(_table, names=names), functools.partial(_ignored, names=names)
    return Family(LayerNormBlock, End, places, table, ignored, Embed, names.prefix)
