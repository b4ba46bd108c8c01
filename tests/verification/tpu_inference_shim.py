"""A pytest plugin for the rejection sampler's tests in the wheel of `tpu_inference`: its call and its parsing of the
output, with the target's distributions, the verifier and the draws of this project inside.

What the module imports of the rest of the wheel, which asks for vllm, is replaced by empty modules.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import jax
import numpy as np

from specdec_jax.decoding.sampling import distributions, draw, make_warp
from specdec_jax.types import Draft
from specdec_jax.verification import greedy, rejection

PACKAGE = "tpu_inference"
UNUSED = {
    "runner.input_batch": ("InputBatch",),
    "utils": ("device_array",),
    "layers.common.sharding": ("ShardingAxisName",),
}
NO_TOKEN = -1


def verify(
    self: Any,
    draft_token_ids: Any,
    num_draft_tokens: Any,
    draft_probs: Any,
    target_logits: Any,
    bonus_token_ids: Any,
    sampling_metadata: Any,
    key: Any = None,
) -> np.ndarray:
    """Output tokens [N + B] for N drafts of B sequences in a row; draft_probs and target_logits are [N, V]."""
    del self
    sampled = sampling_metadata.do_sampling
    if sampled and key is None:
        raise ValueError("A random key must be provided for non-greedy sampling.")
    length, total = np.asarray(num_draft_tokens), len(draft_token_ids)
    drafts, scores = np.append(draft_token_ids, 0), np.pad(np.float32(target_logits), ((0, 1), (0, 0)))  # also of none
    batch, width = len(length), max(int(length.max(initial=0)), 1)
    output = np.full(total + batch, NO_TOKEN)
    place = (np.cumsum(length) - length)[:, None] + np.arange(width)  # [B, K], of each draft among the N
    inside = np.arange(width) < length[:, None]
    safe = np.where(inside, place, 0)
    logits = np.pad(scores[safe], ((0, 0), (0, 1), (0, 0)))  # after all drafts the caller gives the token
    with np.errstate(divide="ignore"):
        log_q = None if draft_probs is None else np.log(np.pad(np.float32(draft_probs), ((0, 1), (0, 0))))[safe]
    draft = Draft(np.where(inside, drafts[safe], 0), log_q, np.full((batch, width), log_q is None), length)
    limits = {}
    if sampled:
        for name in ("temperature", "top_k", "top_p"):  # some tests give one for all sequences
            given = np.take(getattr(sampling_metadata, name), np.arange(batch), mode="clip")
            limits[name] = np.maximum(given, 0)  # their top-k is off at -1, too
    verifier = rejection() if sampled else greedy()
    uniforms = jax.random.uniform(key if sampled else jax.random.key(0), (2, batch))
    decide = jax.jit(_decide, static_argnums=0)
    accepted, token = map(np.asarray, decide(verifier, draft, logits, make_warp(batch, **limits), uniforms))
    kept = inside & (np.arange(width) < accepted[:, None])
    rejected = inside & (np.arange(width) == accepted[:, None])
    output[place[kept]] = draft.tokens[kept]
    output[place[rejected]] = np.broadcast_to(token[:, None], place.shape)[rejected]
    output[total:] = np.where(accepted == length, np.asarray(bonus_token_ids), NO_TOKEN)
    return output


def _decide(verifier: Any, draft: Draft, logits: Any, warp: Any, uniforms: Any) -> tuple[Any, Any]:
    state = verifier.init(len(draft.length))
    log_prob, next_distribution, _ = verifier.verify(state, draft, distributions(logits, warp), None)
    accepted = draw(jax.numpy.exp(log_prob), uniforms[0])
    return accepted, draw(next_distribution(accepted), uniforms[1])


for name, members in UNUSED.items():
    module = sys.modules[f"{PACKAGE}.{name}"] = ModuleType(f"{PACKAGE}.{name}")
    for member in members:
        setattr(module, member, type(member, (), {}))
import_module(f"{PACKAGE}.layers.jax.sample.rejection_sampler").RejectionSampler.forward = verify
