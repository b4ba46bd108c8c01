"""Runs with tunix or gemma: a model of theirs passes `check_model`, and decodes what its own passes say.

Prints the largest difference of `check_model`, and the share of drafts that were accepted.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import specdec_jax as sd
from specdec_jax.contrib.jax_libraries import from_gemma, from_tunix
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.models.adapters import check_model

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


print(json.dumps({"google-tunix": tunix, "gemma": gemma}[sys.argv[1]]()))
