"""The stack of blocks of decoder-only families over a cache, and its `LanguageModel`.

Layers are unrolled, each with its own key and value buffer: a `scan` over layers would copy the caches in every pass
(measured: 25.6 instead of 1.6 ms per step). They are traced once, and XLA compiles a kernel once for all layers.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.models import layers, weights
from specdec_jax.models.attention import PLAIN, KVCache, causal_mask, init_kv_cache, with_length
from specdec_jax.models.config import SLIDING
from specdec_jax.models.int8 import Int8, as_float32, rows
from specdec_jax.sharding import ANY, DATA, constrain
from specdec_jax.types import Array, Hidden, LanguageModel, ModelSpec


class Family(NamedTuple):
    """The parts of a family besides its config (`config.HFConfig`), which is the first argument of each function."""

    block: type[nn.Module]  # (config, dtype, kind): (x, keys, values, start, places, visible) -> (x, keys, values)
    norm: Callable[..., nn.Module]  # (config, dtype, name=): the layer after the last block
    places: Callable[[Any, str, Array], Any]  # (config, kind, positions [B, T]): position input of the blocks
    table: Callable[[Any], weights.Table]  # (config)
    ignored: Callable[[Any], weights.Ignored]  # (config): further names that a checkpoint may have
    embed: Callable[..., nn.Module] | None = None  # (config, dtype, name=): (embeddings [B, T, E], positions) -> x
    prefix: str = ""  # prefix of all names but the head's; missing in checkpoints of base models


class Decoder(nn.Module):
    """Decoder-only transformer: (tokens [B, T], cache, positions, mask) -> (logits [B, T, V] float32, cache).

    Without a cache (None) the T tokens attend to each other only, and the returned cache is None. With `head=False` it
    returns the last hidden states [B, T, D] float32 instead of logits: training applies the head to a few positions at
    a time. With `tapped` layers it also returns the residual stream after each of them: ((logits, [B, T, N, D]
    float32), cache). `added` [B, T, D] is added to the embeddings.
    """

    family: Family
    config: Any
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(
        self, tokens, cache: KVCache | None, positions=None, mask=None, head: bool = True, tapped=(), added=None
    ):
        c, width, kinds = self.config, tokens.shape[1], self.config.layer_kinds
        start = jnp.zeros((tokens.shape[0],), jnp.int32) if cache is None else cache.length
        slots = width if cache is None else cache.keys[0].shape[2]
        if positions is None:
            positions = start[:, None] + jnp.arange(width)[None, :]
        places = {kind: self.family.places(c, kind, positions) for kind in dict.fromkeys(kinds)}
        windows = {kind: c.sliding_window if kind.startswith(SLIDING) else None for kind in places}
        visible = {kind: causal_mask(start, width, slots, mask, windows[kind]) for kind in places}
        shape = c.vocab_size, c.embedding_width
        embedding = self.param("embedding", layers.WEIGHT_INIT, shape, self.dtype)
        x = as_float32(rows(embedding, tokens))
        if self.family.embed is not None:
            x = self.family.embed(c, self.dtype, name="embed")(x, positions)
        x = constrain(x if added is None else x + added, DATA)
        keys: list[Any] = [None] * len(kinds) if cache is None else list(cache.keys)
        values: list[Any] = [None] * len(kinds) if cache is None else list(cache.values)
        streams = [x]  # streams that are not tapped take no memory: they are values of the trace, not buffers
        for i, kind in enumerate(kinds):
            inputs = x, keys[i], values[i], start, places[kind], visible[kind]
            x, keys[i], values[i] = run_block(self, self.family.block, f"layer_{i}", kind, *inputs)
            x = constrain(x, DATA)
            streams.append(x)
        cache = None if cache is None else KVCache(tuple(keys), tuple(values), start + width)
        x = self.family.norm(c, self.dtype, name="norm")(x)
        if not c.tie_word_embeddings:
            embedding = self.param("head", layers.WEIGHT_INIT, shape, self.dtype)
        if not head:
            return x, cache
        with jax.named_scope("head"):
            logits = constrain(layers.project(x, embedding, self.dtype), DATA, None, ANY)
        logits = constrain(logits, DATA)  # gathers the logits, instead of the head's rows before the product
        logits = layers.soft_cap(logits, c.logit_cap)
        return ((logits, jnp.stack([streams[i] for i in tapped], axis=2)) if tapped else logits), cache


def run_block(stack: Any, block: type[nn.Module], name: str, kind: str, *inputs: Any) -> Any:
    """Runs a stack's block of that name, in its compact method; at initialisation it creates the parameters."""
    if stack.is_initializing():
        return block(stack.config, stack.dtype, kind, name=name)(*inputs)
    with jax.named_scope(name):
        return _traced_block(block, stack.config, stack.dtype, kind, stack.get_variable("params", name), *inputs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _traced_block(block: Any, config: Any, dtype: Any, kind: str, params: Any, *inputs: Any):
    """A block as a function of its parameters: traced and lowered once for all layers of equal shapes.

    XLA inlines the calls, so the compiled program is the same; flax's modules would be traced once per layer.
    """
    return block(config, dtype, kind, parent=None).apply({"params": params}, *inputs)


def functions(family: Family) -> tuple[Callable[..., Any], ...]:
    """The family's table and the functions below for it: what `loading` uses of its module, besides its config."""
    every = (language_model, init_params, params_from_named, named_from_params)
    return family.table, *(functools.partial(function, family) for function in every)


@functools.lru_cache(maxsize=16)
def language_model(family: Family, config: Any, dtype: Any = jnp.bfloat16) -> LanguageModel:
    """The family's `LanguageModel`; equal arguments give the same object, so that checkpoints share compiled programs.

    `dtype`: of matmul inputs and cache; other parameters are cast in every pass.
    """
    module, c = Decoder(family, config, dtype), config

    def init_cache(params, batch, slots, source=None):
        return init_kv_cache(c.num_hidden_layers, batch, slots, c.num_key_value_heads, c.head_dim, dtype)

    def apply(params, tokens, cache, positions=None, mask=None):
        return module.apply({"params": params}, tokens, cache, positions, mask)

    def hidden(params, tokens, cache, positions=None, mask=None):
        return module.apply({"params": params}, tokens, cache, positions, mask, head=False)

    def tapped(params, tokens, cache, which, positions=None, mask=None):
        (logits, streams), cache = module.apply({"params": params}, tokens, cache, positions, mask, tapped=which)
        return logits, streams, cache

    # Windows and biases are by slot, which is wrong if several tokens share a position.
    by_slot = any(kind.startswith(SLIDING) for kind in c.layer_kinds) or getattr(c, "scoring", PLAIN).bias is not None
    spec = ModelSpec(c.vocab_size, c.context, c.eos_token_ids, by_position=not by_slot)
    kernel = functools.partial(head_kernel, c, dtype)
    hidden_states = Hidden(
        hidden, kernel, c.logit_cap, dtype, tapped, c.num_hidden_layers, c.hidden_size, with_wide_vectors
    )
    return LanguageModel(init_cache, apply, with_length, spec, hidden_states)


def with_wide_vectors(params: Any) -> Any:
    """The parameters with biases and scales of norms in float32: a TPU converts each by an operation in every pass."""

    def wide(leaf: Any) -> Any:
        is_vector = leaf.ndim == 1 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(jnp.float32) if is_vector else leaf

    return jax.tree.map(wide, params)


def head_kernel(config: Any, dtype: Any, params: Any) -> Any:
    """The head's kernel, which is the embedding if they are tied; int8 is not cast."""
    kernel = params["embedding" if config.tie_word_embeddings else "head"]
    return kernel if isinstance(kernel, Int8) else jnp.asarray(kernel).astype(dtype)


def init_params(family: Family, config: Any, key: Array, dtype: Any = jnp.bfloat16):
    """Random parameters: normal(0.02) kernels, zero biases, unit norms. The key is consumed."""
    cache = language_model(family, config, dtype).init_cache(None, 1, 2)
    return jax.jit(Decoder(family, config, dtype).init)(key, jnp.zeros((1, 2), jnp.int32), cache)["params"]


def params_from_named(
    family: Family,
    config: Any,
    named: weights.Named,
    dtype: Any = jnp.bfloat16,
    place: weights.Place | None = None,
    int8: bool = False,
):
    """Parameters from tensors with Hugging Face's names. For arguments and errors see `weights.params_from_named`."""
    table, ignored = family.table(config), family.ignored(config)
    whole = {name: name for name in (*table, *ignored)}
    whole = {name.removeprefix(family.prefix): name for name in whole} | whole  # base models lack the prefix
    renamed = ((whole.get(name, name), tensor) for name, tensor in weights.pairs(named))
    return weights.params_from_named(table, renamed, dtype, ignored=ignored, place=place, int8=int8)


def named_from_params(family: Any, config: Any, params: Any) -> Mapping[str, Any]:
    """Host arrays named and shaped as in a Hugging Face checkpoint; `params_from_named` inverts it."""
    return weights.named_from_params(family.table(config), params)
