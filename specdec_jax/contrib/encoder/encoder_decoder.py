"""The stacks of families with an encoder, a cache with the encoded source, and their `LanguageModel`.

The encoder runs once, in `init_cache`: the keys and values of cross-attention are constant during decoding. Layers are
unrolled and traced once, as in decoder_only.py.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.models import layers, weights
from specdec_jax.models.attention import causal_mask, init_kv_cache, with_length
from specdec_jax.models.decoder_only import head_kernel, named_from_params, run_block
from specdec_jax.models.int8 import as_float32, rows
from specdec_jax.sharding import ANY, DATA, constrain
from specdec_jax.types import Hidden, LanguageModel, ModelSpec, SourceSpec

Array = jax.Array
ENCODER, DECODER = "encoder", "decoder"


class CrossCache(NamedTuple):
    """A decoder's cache, and the keys and values of its source for cross-attention."""

    keys: tuple[Array, ...]  # L times [B, H, S, head_dim]
    values: tuple[Array, ...]  # L times [B, H, S, head_dim]
    cross_keys: tuple[Array, ...]  # L times [B, H, E, head_dim]
    cross_values: tuple[Array, ...]  # L times [B, H, E, head_dim]
    source_length: Array  # [B] int32, number of valid slots of the source
    length: Array  # [B] int32, number of valid slots of the text; the others are never read


class Family(NamedTuple):
    """The parts of a family besides its config (`config.HFConfig`), which is the first argument of each function."""

    encoder_block: type[nn.Module]  # (config, dtype, ENCODER): (x, places, visible) -> x
    decoder_block: type[nn.Module]
    # (config, dtype, DECODER): (x, keys, values, (cross keys, cross values), start, places, visible, seen) -> (x, keys,
    # values)
    places: Callable[..., nn.Module]  # (config, dtype, kind, name=): () -> position input of all blocks of a stack
    norm: Callable[..., nn.Module]  # (config, dtype, name=): the layer after the last block
    read: Callable[..., tuple[Array, Array]]
    # (config, dtype, a decoder block's parameters, encoded [B, E, D]) -> cross keys and values [B, H, E, head_dim]
    table: Callable[[Any], weights.Table]  # (config)
    ignored: Callable[[Any], weights.Ignored]  # (config): further names that a checkpoint may have


class Encoder(nn.Module):
    """Embeddings of the source [B, E, D] float32 -> [B, E, D] float32; row b has length[b] tokens."""

    family: Family
    config: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, length: Array) -> Array:
        c, (batch, width, _) = self.config, x.shape
        places = self.family.places(c, self.dtype, ENCODER, name="positions")()
        visible = jnp.broadcast_to(_counting(width, length), (batch, width, width))
        for i in range(c.num_encoder_layers):
            x = run_block(self, self.family.encoder_block, f"layer_{i}", ENCODER, x, places, visible)
            x = constrain(x, DATA)
        return self.family.norm(c, self.dtype, name="norm")(x)


class Decoder(nn.Module):
    """(embeddings of the tokens [B, T, D] float32, cache, mask) -> (last hidden states [B, T, D] float32, cache)."""

    family: Family
    config: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, cache: CrossCache, mask: Array | None = None) -> tuple[Array, CrossCache]:
        c, (batch, width, _), start = self.config, x.shape, cache.length
        places = self.family.places(c, self.dtype, DECODER, name="positions")()
        visible = causal_mask(start, width, cache.keys[0].shape[2], mask)
        slots = cache.cross_keys[0].shape[2]
        seen = jnp.broadcast_to(_counting(slots, cache.source_length), (batch, width, slots))
        keys, values = list(cache.keys), list(cache.values)
        for i in range(c.num_hidden_layers):
            inputs = x, keys[i], values[i], (cache.cross_keys[i], cache.cross_values[i]), start, places, visible, seen
            x, keys[i], values[i] = run_block(self, self.family.decoder_block, f"layer_{i}", DECODER, *inputs)
            x = constrain(x, DATA)
        x = self.family.norm(c, self.dtype, name="norm")(x)
        return x, cache._replace(keys=tuple(keys), values=tuple(values), length=start + width)


def _counting(slots: int, length: Array) -> Array:
    """[B, 1, slots] bool, True for the first length[b] slots."""
    return jnp.arange(slots, dtype=jnp.int32)[None, None, :] < length[:, None, None]


def functions(family: Family) -> tuple[Callable[..., Any], ...]:
    """As `decoder_only.functions`."""
    every = (language_model, init_params, params_from_named, named_from_params)
    return family.table, *(functools.partial(function, family) for function in every)


@functools.lru_cache(maxsize=16)
def language_model(family: Family, config: Any, dtype: Any = jnp.bfloat16) -> LanguageModel:
    """The family's `LanguageModel`. `dtype`: of matmul inputs and cache; other parameters are cast in every pass."""
    c, decoder = config, Decoder(family, config, dtype)
    kernel = functools.partial(head_kernel, c, dtype)

    def init_cache(params, batch, slots, source=None):
        if source is None:
            raise ValueError(f"a model of type {c.model_type!r} has an encoder: its cache begins with a source")
        tokens, length = source
        with jax.named_scope(ENCODER):
            encoder, embedded = Encoder(family, c, dtype), _embedded(params, tokens)
            encoded: Any = encoder.apply({"params": params[ENCODER]}, embedded, length)
        blocks = [params[DECODER][f"layer_{i}"] for i in range(c.num_hidden_layers)]
        cross_keys, cross_values = zip(*(family.read(c, dtype, block, encoded) for block in blocks), strict=True)
        empty = init_kv_cache(c.num_hidden_layers, batch, slots, c.num_key_value_heads, c.head_dim, dtype)
        return CrossCache(empty.keys, empty.values, cross_keys, cross_values, length.astype(jnp.int32), empty.length)

    def hidden(params, tokens, cache, positions=None, mask=None):
        if positions is not None:
            raise ValueError("positions of these families are distances between slots: positions must be None")
        x, cache = decoder.apply({"params": params[DECODER]}, _embedded(params, tokens), cache, mask)
        return x * c.head_scale, cache

    def apply(params, tokens, cache, positions=None, mask=None):
        x, cache = hidden(params, tokens, cache, positions, mask)
        with jax.named_scope("head"):
            logits = constrain(layers.project(x, kernel(params), dtype), DATA, None, ANY)
        return constrain(logits, DATA), cache

    spec = ModelSpec(c.vocab_size, c.context, c.eos_token_ids, SourceSpec(c.decoder_start_token_id, c.context))
    return LanguageModel(init_cache, apply, with_length, spec, Hidden(hidden, kernel, dtype=dtype))


def _embedded(params: Any, tokens: Array) -> Array:
    return constrain(as_float32(rows(params["embedding"], tokens)), DATA)


def init_params(family: Family, config: Any, key: Array, dtype: Any = jnp.bfloat16):
    """Random parameters: normal(0.02) kernels and biases of positions, unit norms. The key is consumed."""
    c = config
    shape = c.num_hidden_layers, 1, 2, c.num_key_value_heads, c.head_dim, dtype
    cross, empty, ones = init_kv_cache(*shape), init_kv_cache(*shape), jnp.ones((1,), jnp.int32)

    def made(key: Array) -> Any:
        keys = jax.random.split(key, 4)
        cache = CrossCache(empty.keys, empty.values, cross.keys, cross.values, ones, empty.length)
        x = jnp.zeros((1, 2, c.hidden_size), jnp.float32)
        tree = {
            "embedding": layers.WEIGHT_INIT(keys[0], (c.vocab_size, c.hidden_size), dtype),
            ENCODER: Encoder(family, c, dtype).init(keys[1], x, ones)["params"],
            DECODER: Decoder(family, c, dtype).init(keys[2], x, cache)["params"],
        }
        head = {} if c.tie_word_embeddings else {"head": layers.WEIGHT_INIT(keys[3], tree["embedding"].shape, dtype)}
        return tree | head

    return jax.jit(made)(key)


def params_from_named(
    family: Family,
    config: Any,
    named: weights.Named,
    dtype: Any = jnp.bfloat16,
    place: weights.Place | None = None,
    int8: bool = False,
):
    """Parameters from tensors with Hugging Face's names. For arguments and errors see `weights.params_from_named`.

    A missing untied head is a copy of the embedding: transformers does not store it if they are equal.
    """
    table, ignored = family.table(config), family.ignored(config)
    paths = {parameter.path: name for name, parameter in table.items()}
    head, embedding = paths.get(("head",)), paths["embedding",]

    def with_head() -> Iterator[tuple[str, Any]]:
        shared: dict[str, Any] = {}
        for name, tensor in weights.pairs(named):
            shared |= {name: tensor} if name in (head, embedding) else {}
            yield name, tensor
        if head is not None and head not in shared and embedding in shared:
            yield head, shared[embedding]

    return weights.params_from_named(table, with_head(), dtype, ignored=ignored, place=place, int8=int8)
