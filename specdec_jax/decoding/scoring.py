"""Scores of a text under target and drafter, from teacher-forced passes."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.decoder import Decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import distributions, make_warp, pick
from specdec_jax.decoding.state import padded_rows, refuse_encoder
from specdec_jax.decoding.teacher_forcing import feed_both, init_caches
from specdec_jax.types import Array, LanguageModel, ModelSpec, Warp


class Scores(NamedTuple):
    """Scores of a text under both models; entry t is for token t + 1 after tokens 0..t."""

    log_p: Array  # [B, T-1] float32, the target's, warped
    log_q: Array  # [B, T-1] float32, the drafter's (NaN without a drafter model)
    target_entropy: Array  # [B, T-1] float32, nats, as sampled
    drafter_entropy: Array  # [B, T-1] float32


def texts_of_one_length(needed: str, tokens: Any, spec: ModelSpec) -> np.ndarray:
    """Texts [B, T] int32. Raises ValueError, which `needed` begins, for other lengths than a T in [2, context]."""
    text, lengths = map(np.asarray, padded_rows("text", tokens, spec.vocab_size))
    if not 2 <= min(lengths) == text.shape[1] <= spec.context:
        raise ValueError(f"{needed} texts of one length in [2, {spec.context}], got {sorted({*lengths.tolist()})}")
    return text


def score(decoder: Decoder, params: ModelParams, tokens: Any, warp: Warp | None = None, chunk: int = 32) -> Scores:
    """Scores of [B, T] tokens by the decoder's target and drafter, `chunk` tokens per pass.

    Args:
        warp: None: temperature 1.

    Raises:
        ValueError: tokens of another shape or T < 2, or a target with an encoder.
    """
    target, drafter = decoder.parts.target, decoder.parts.drafter.model
    refuse_encoder(target, "score")
    text = texts_of_one_length("score needs", tokens, target.spec)
    padded = np.pad(text, ((0, 0), (0, -text.shape[1] % chunk + 1)))
    scores = _score(target, drafter, chunk, params, padded, warp or make_warp(len(text), temperature=1.0))
    return jax.tree.map(lambda leaf: leaf[:, : text.shape[1] - 1], scores)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _score(
    target: LanguageModel, drafter: LanguageModel | None, chunk: int, params: ModelParams, tokens: Array, warp: Warp
) -> Scores:
    """Logits exist for one pass at a time; the last token is only predicted."""
    batch, length = tokens.shape

    def scored(logits: Array, following: Array) -> tuple[Array, Array]:
        seen = distributions(logits, warp)
        return pick(seen.log_prob, following), seen.entropy

    def score_chunk(caches: Any, index: Array) -> tuple[Any, Scores]:
        fed = lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1)
        following = lax.dynamic_slice_in_dim(tokens, index * chunk + 1, chunk, axis=1)
        if drafter is None:
            logits, caches = target.apply(params.target, fed, caches)
            log_p, entropy = scored(logits, following)
            unknown = jnp.full_like(log_p, jnp.nan)
            return caches, Scores(log_p, unknown, entropy, unknown)
        p_logits, q_logits, caches = feed_both((target, drafter), both, fed, caches)
        (log_p, entropy), (log_q, drafter_entropy) = scored(p_logits, following), scored(q_logits, following)
        return caches, Scores(log_p, log_q, entropy, drafter_entropy)

    both = params.target, params.drafter
    caches = target.init_cache(params.target, batch, length)
    if drafter is not None:
        caches = init_caches((target, drafter), both, batch, length)
    _, scores = lax.scan(score_chunk, caches, jnp.arange((length - 1) // chunk, dtype=jnp.int32))
    return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1).reshape(batch, -1), scores)
