"""Models whose cache is {layer_i: {"k": [B, S, H, D], "v": ..., "end_index": [B], ...}}, as tunix and gemma have.

A pass takes (tokens, positions, cache, attention_mask [B, T, S]) and writes all rows at `end_index[0]`, so that rows of
different lengths need `per_row`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.models.adapters import from_function, per_row
from specdec_jax.types import Cache, Hidden, LanguageModel, ModelSpec, Params

Array = jax.Array


def from_tunix(module: Any, *, context: int, dtype: Any = jnp.float32) -> tuple[LanguageModel, Params]:
    """(model, params) of a decoder of `tunix.models`: `qwen2`, `qwen3` or `llama3`; Qwen3 was run, with version 0.1.7.

    Args:
        context: the longest text in tokens, which its config does not say.
        dtype: of its keys and values.

    Raises:
        ValueError: its config asks for flash attention, which does not read the cache in passes of several tokens.
    """
    from flax import nnx  # here, because its import takes half a second

    config, (graph, params) = module.config, nnx.split(module)
    if getattr(config, "use_flash_attention", False):
        raise ValueError("a tunix model with use_flash_attention reads no cache in passes of several tokens")

    def init_cache(params, batch, slots):
        def empty():
            return jnp.zeros((batch, slots, config.num_kv_heads, config.head_dim), dtype)

        end_index = jnp.zeros((batch,), jnp.int32)
        return {f"layer_{i}": {"k": empty(), "v": empty(), "end_index": end_index} for i in range(config.num_layers)}

    def call(params, tokens, positions, cache, mask):
        return nnx.merge(graph, params)(tokens, positions, cache, mask)

    return _model(call, init_cache, ModelSpec(config.vocab_size, context), Hidden()), params


def from_gemma(module: Any, *, context: int, eos_ids: tuple[int, ...] = (), dtype: Any = None) -> LanguageModel:
    """The model of a text decoder of `gemma.gm.nn`, such as `Gemma3_270M`; run with version 4.0.1.

    Its parameters are those of `gm.ckpts.load_params` or `module.init(...)["params"]`. Its last hidden states are
    offered, so that it can have a draft vocabulary.

    Args:
        context: the longest text in tokens.
        dtype: of the cache; None: that of the module.
    """
    config, dtype = module.config, dtype or module.dtype

    def init_cache(params, batch, slots):
        return config.init_cache(batch_size=batch, dtype=dtype, cache_length=slots)

    def run(params, tokens, positions, cache, mask):
        more = {"positions": positions, "cache": cache, "attention_mask": mask}
        return module.apply({"params": params}, tokens, return_hidden_states=True, **more)

    def call(*arguments):
        output = run(*arguments)
        return output.logits, output.cache

    def states(*arguments):
        output = run(*arguments)
        return output.hidden_states.astype(jnp.float32), output.cache

    kernel = lambda params: params["embedder"]["input_embedding"]  # noqa: E731
    hidden = Hidden(kernel=kernel, cap=config.final_logit_softcap, dtype=module.dtype)
    return _model(call, init_cache, ModelSpec(config.num_embed, context, eos_ids), hidden, states)


def _model(
    call: Callable[..., tuple[Array, Cache]],
    init_cache: Callable[[Params, int, int], Cache],
    spec: ModelSpec,
    hidden: Hidden,
    states: Callable[..., tuple[Array, Cache]] | None = None,
) -> LanguageModel:
    """A model from a pass `call(params, tokens, positions, cache, attention_mask)`, and `states`, one without head."""

    def at_end(call: Callable[..., tuple[Array, Cache]]) -> Callable[..., tuple[Array, Cache]]:
        def apply(params, tokens, cache, positions=None, mask=None):
            del positions, mask  # `per_row` refuses them
            layer = cache["layer_0"]
            positions = layer["end_index"][:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
            visible = jnp.arange(layer["k"].shape[1])[None, None, :] <= positions[:, :, None]
            return call(params, tokens, positions, cache, visible)

        return apply

    def with_length(cache, length):
        return {name: layer | {"end_index": length} for name, layer in cache.items()}

    model = from_function(at_end(call), init_cache, spec, with_length)
    return per_row(model.replace(hidden=hidden._replace(last=None if states is None else at_end(states))))
