"""Models of tunix (nnx) and gemma (linen) as targets and drafters, and a decoding compared with their own passes.

Question:  do rows of different lengths decode what the library's own passes say?
Command:   python docs/examples/jax_libraries.py google-tunix (or gemma), where that library is installed
Expected:  two numbers, the largest difference of `check_model` (below 1e-6) and the share of drafts that were accepted

Their cache is {layer_i: {"k": [B, S, H, D], "v": ..., "end_index": [B], ...}}. A pass takes (tokens, positions, cache,
attention_mask [B, T, S]) and writes all rows at `end_index[0]`, so that rows of different lengths need `per_row`. Copy
`from_tunix` or `from_gemma` with `_model`: the libraries themselves are imported by the demonstration alone.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import specdec_jax as sd
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.models.adapters import check_model, from_function, per_row
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


PROMPTS, NEW = [[3, 1, 4], [5], [2, 6, 5, 3, 5, 8]], 24


def decode(target, params, drafter, drafter_params, reference):
    """Greedy tokens of ragged rows are those of whole passes of the library's own model; gives accepted and drafted."""
    strategies = sd.stopping.static(draft_length=3), sd.verification.rejection()
    decoder = sd.build_decoder(target, sd.drafters.model(drafter, max_draft_length=3), *strategies)
    weights = sd.ModelParams(params, drafter_params)
    state = decoder.run(weights, decoder.prefill(weights, PROMPTS, max_new_tokens=NEW, stop_ids=()))
    for row, prompt in enumerate(PROMPTS):
        text = np.asarray(state.tokens)[row, : len(prompt) + NEW]
        choices = np.asarray(reference(jnp.asarray(text[None])))[0].argmax(-1)
        assert text[len(prompt) :].tolist() == choices[len(prompt) - 1 : -1].tolist(), row
    counts = sd.summarise(state.statistics)
    assert counts["num_draft_tokens"] > 0
    return counts["draft_acceptance_rate"]


def causal(tokens):
    at = jnp.arange(tokens.shape[1])
    return at[None], (at <= at[:, None])[None]


def tunix():
    from tunix.models.qwen3 import model as qwen3

    sizes = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64, "rope_theta": 10_000}
    config = qwen3.ModelConfig(**sizes, num_heads=4, head_dim=8, num_kv_heads=2, norm_eps=1e-6)
    module = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    state = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, nnx.state(module))  # so that tokens matter
    nnx.update(module, state)
    target, params = from_tunix(module, context=64)

    def reference(tokens):
        positions, visible = causal(tokens)
        return module(tokens, positions, None, visible)[0]

    noisy = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), params)
    rate = decode(target, params, target, noisy, reference)
    return check_model(target, params, reference=reference), rate


def gemma():
    from gemma import gm

    module = gm.testing.DummyGemma(dtype=jnp.float32)
    params = module.init(jax.random.key(0), jnp.ones((1, 2), jnp.int32))["params"]
    model = from_gemma(module, context=64)

    def reference(tokens):  # with a mask of its own, because gemma's hides token 0, its padding
        positions, visible = causal(tokens)
        return module.apply({"params": params}, tokens, positions=positions, attention_mask=visible).logits

    few = with_reduced_head(model), reduce_params(model, params, range(6))
    rate = decode(model, params, *few, reference)
    return check_model(model, params, reference=reference), rate


if __name__ == "__main__":
    print(json.dumps({"google-tunix": tunix, "gemma": gemma}[sys.argv[1]]()))
