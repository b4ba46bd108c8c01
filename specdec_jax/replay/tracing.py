"""Creates traces: both models along texts of the target, and the drafter's continuation after every rejected token.

Continuations are drafted from the last position of a text to the first: each overwrites cache entries that only later
positions needed, so that no cache is copied. A pass feeds one token: those before it are in the cache.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding import sampling
from specdec_jax.decoding.cache_feed import window
from specdec_jax.decoding.state import laid, slots_for
from specdec_jax.decoding.teacher_forcing import PREFILL, PairCache, Text, feed_both, filled_caches
from specdec_jax.drafters.draft_models import with_vocabulary
from specdec_jax.drafters.model import FED
from specdec_jax.hyperparameters import in_rows
from specdec_jax.ranges import Between
from specdec_jax.replay.chains import Rejected, Written, chains, features, right_candidate
from specdec_jax.replay.trace import FEATURES, TRUNCATIONS, Trace
from specdec_jax.types import Array, Cache, LanguageModel, Params, Warp


def trace_texts(
    models: tuple[LanguageModel, LanguageModel],
    params: tuple[Params, Params],
    texts: Sequence[Text],
    *,
    limit: int,
    warp: dict[str, Any] | None = None,
    seed: int | Sequence[int] = 0,
    max_draft_length: int = 16,
    chunk: int = 16,
    about: dict[str, Any] | None = None,
) -> Trace:
    """The trace of (prompt, answer) texts that the target generated with this warp, in a single batch.

    Args:
        models: target and drafter, with their `params` in that order; the vocabularies may have different padding.
        limit: maximum number of tokens of an answer; shorter ones ended with a stop token.
        warp: arguments of `make_warp`; default: greedy.
        seed: seed of acceptance bits and tails, and the request's seed for policies; one, or one per text.
        max_draft_length: K, the longest draft of a replay.
        chunk: positions per teacher-forced pass; memory holds the logits of texts * chunk positions.

    Raises:
        ValueError: no texts, an empty prompt or answer, an answer longer than the limit, or a text that does not fit.
    """
    if not texts:
        raise ValueError("a trace needs at least one text")
    Between(1).check("max_draft_length", max_draft_length)
    check_texts(texts, models[0].spec.context, limit)
    batch, (target, drafter) = len(texts), models
    prompts, sizes = (np.array([len(part) for part in parts], np.int32) for parts in zip(*texts, strict=True))
    slots = slots_for(int(prompts.max()), limit, max(chunk, max_draft_length, PREFILL) + FED)  # few shapes
    tokens = laid([[*prompt, *answer] for prompt, answer in texts], slots + -slots % PREFILL)
    device = Written(jnp.asarray(tokens), jnp.asarray(prompts), jnp.asarray(sizes))
    device_warp = jax.tree.map(jnp.asarray, sampling.make_warp(batch, **(warp or {})))
    seeds = jnp.asarray(in_rows(batch, seed, "seed", Between(0, whole=True), np.uint32))
    fill, along, continue_from, chains_of = _programs(
        target, with_vocabulary(drafter, target.spec.vocab_size), chunk, max_draft_length
    )
    caches = fill(params, device.tokens, jnp.max(device.prompt))
    chunks, log_probs = [], []
    for start in range(0, limit + 1, chunk):
        positions, caches, log_p = along(params, device, caches, jnp.int32(start), device_warp, seeds)
        chunks.append(jax.device_get(positions))
        log_probs.append(log_p)
    path = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1)[:, : limit + 1], *chunks)
    inside = np.arange(limit + 1) < sizes[:, None]
    accepted, chained = path["accepted"] & inside, None
    if caches.reads is not None:
        log_p = jnp.concatenate(log_probs, axis=1)[:, : limit + 1]
        chained = jax.device_get(chains_of(params[1], device, log_p, caches, device_warp, seeds))
        accepted = chained.run > 0
    candidate = np.where(~accepted & inside, path["candidate"], 0)
    at, tail_of = _rejected(accepted, sizes)
    first = np.take_along_axis(path["rejected"], np.maximum(at, 0), axis=1)
    if chained is None:
        drawn = continue_from(params[1], device, caches.drafter, device_warp, seeds, at, first)
        # entry 0: the rejected position's features, with log q of the rejected token
        heads = np.take_along_axis(path["features"], np.maximum(at, 0)[:, :, None], axis=1)
        heads[..., FEATURES.index("log_q")] = np.take_along_axis(path["rejected_log_q"], np.maximum(at, 0), axis=1)
        tails = np.concatenate([heads[:, :, None], np.asarray(drawn)[:, :, 1:]], axis=2)[at >= 0]
    else:
        tails = np.take_along_axis(chained.features, np.maximum(at, 0)[:, :, None, None], axis=1)[at >= 0]
    beyond = np.arange(limit + 1) > sizes[:, None]
    unknown = lambda values: np.where(beyond, np.nan, values).astype(np.float32)  # noqa: E731
    return Trace(
        path=np.where(beyond[..., None], 0.0, path["features"]).astype(np.float32),
        accepted=accepted,
        tail_of=tail_of,
        tails=tails.astype(np.float32),
        length=sizes,
        limit=np.full(batch, limit, np.int32),
        prompt_length=prompts,
        seed=np.asarray(seeds),
        temperature=np.asarray(device_warp.temperature),
        tokens=np.asarray(laid([answer for _, answer in texts], limit)),
        **{name: unknown(path[name]) for name in ("overlap", "cross_entropy", "target_entropy", "raw_target_entropy")},
        about=dict(about or {}),
        chains=None if chained is None else np.where(beyond[..., None, None], 0.0, chained.features).astype(np.float32),
        run=None if chained is None else chained.run,
        candidate=(candidate if chained is None else chained.candidate).astype(np.int8),
        truncation=np.stack([np.asarray(getattr(device_warp, name), np.float32) for name in TRUNCATIONS], axis=1),
        prompt_hash=sampling.prompt_hashes((np.asarray(tokens), prompts)),
    )


def check_texts(texts: Sequence[Text], context: int, limit: int | None = None) -> None:
    """Raises ValueError for a (prompt, answer) with an empty part, or of more tokens than the limit or the context."""
    for index, (prompt, answer) in enumerate(texts):
        total, highest = len(prompt) + len(answer), len(answer) if limit is None else limit
        if not len(prompt) or not len(answer):
            raise ValueError(
                f"text {index} has {len(prompt)} tokens of prompt and {len(answer)} of answer: both need one"
            )
        if len(answer) > highest:
            raise ValueError(f"text {index} has an answer of {len(answer)} tokens, over the limit of {highest}")
        if total > context:
            raise ValueError(f"text {index} of {total} tokens exceeds the target's context, {context}")


def _rejected(accepted: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rejected positions of each row, descending and padded with -1, [B, T+1] int32; and the row in `tails` of each.

    The position after a text's last token is included, because a draft may exceed the end of a text.
    """
    batch, positions = accepted.shape
    row, place = np.nonzero(((np.arange(positions)[None, :] <= sizes[:, None]) & ~accepted)[:, ::-1])
    place, counts = positions - 1 - place, np.bincount(row, minlength=batch)
    at, tail_of = np.full((batch, positions), -1, np.int32), np.zeros((batch, positions), np.int32)
    at[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = place
    tail_of[row, place] = np.arange(len(row))
    return at, tail_of


@functools.lru_cache(maxsize=8)
def _programs(
    target: LanguageModel, drafter: LanguageModel, chunk: int, longest: int
) -> tuple[Callable[..., Any], ...]:
    """Programs for any weights of two models: both caches filled, positions along texts, tails, and chains."""
    models = target, drafter

    def path(
        params: Any, texts: Written, caches: PairCache, start: Array, warp: Warp, seeds: Array
    ) -> tuple[dict[str, Array], PairCache, Array | None]:
        """By position [B, C, ...]; log q among the features is of the text's token, `candidate` as in `Trace`."""
        # Rows that ended earlier stay within their cache; their results are cut off.
        begin = jnp.minimum(texts.prompt - 1 + start, texts.tokens.shape[1] - chunk - 1)
        fed, text = window(texts.tokens, begin, chunk), window(texts.tokens, begin + 1, chunk)
        p_logits, q_logits, after = feed_both(models, params, fed, caches, begin)
        emitted = start + jnp.arange(chunk, dtype=jnp.int32)
        over = emitted[None, :] >= texts.answer[:, None]
        # Whether the drafter's token before each of the text, or which candidate, would have become the text's. Where
        # the text is over the drafter's token is drawn from q.
        p_distribution, q_distribution = sampling.distributions(p_logits, warp), sampling.distributions(q_logits, warp)
        p, q = jnp.exp(p_distribution.log_prob), jnp.exp(q_distribution.log_prob)
        p_text, q_text = sampling.pick(p, text), sampling.pick(q, text)
        shape = text.shape
        flat_seeds = jnp.repeat(seeds, shape[1])
        flat_at = jnp.tile(emitted, shape[0])

        def uniform(candidate: int, role: int) -> Array:
            return sampling.uniforms(flat_seeds, flat_at, jnp.int32(candidate * sampling.BY_CANDIDATE), role)

        coin = uniform(0, sampling.ACCEPT).reshape(shape)
        greedy = (warp.temperature <= 0)[:, None]
        accepted = jnp.where(greedy, q_distribution.top_token == text, coin * p_text < q_text)
        excess = jnp.maximum(q - p, 0.0)
        some = (jnp.sum(excess, axis=-1, keepdims=True) > 0) & ~greedy[..., None] & ~over[..., None]
        weights = jnp.where(some, excess, q).reshape(-1, q.shape[-1])
        rejected = sampling.draw(weights, uniform(0, sampling.DRAFT)).reshape(shape)
        rejected_log_q = sampling.pick(q_distribution.log_prob, rejected)
        at_hand = Rejected(p_distribution.log_prob, q_distribution.log_prob, q_logits, rejected, text)
        at_hand = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), at_hand)
        candidate = right_candidate(at_hand, jnp.repeat(~greedy[:, 0], shape[1]), uniform)
        raw_p = jax.nn.log_softmax(p_logits)
        raw_q = jnp.where(greedy[..., None], jax.nn.softmax(q_logits), q)
        compared = dict(
            features=features(q_distribution, jnp.log(q_text)),
            accepted=accepted,
            rejected=rejected,
            rejected_log_q=rejected_log_q,
            candidate=candidate.reshape(shape),
            overlap=jnp.sum(jnp.minimum(p, q), axis=-1),
            cross_entropy=-jnp.sum(jnp.where(raw_q > 0, raw_q * raw_p, 0.0), axis=-1),
            target_entropy=p_distribution.entropy,
            raw_target_entropy=sampling.raw_entropy(p_logits),
        )
        return compared, after, None if caches.reads is None else p_distribution.log_prob

    def tails(params: Params, texts: Written, cache: Cache, warp: Warp, seeds: Array, at: Array, first: Array) -> Array:
        """Tails [B, M, K, F]: entry m goes on from position at[:, m] after token first[:, m]; entry 0 of K is empty."""
        tail = jnp.zeros((*at.shape, longest, len(FEATURES)), jnp.float32)

        def one_tail(index: Array, carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
            cache, tail = carry
            position = jnp.maximum(lax.dynamic_index_in_dim(at, index, axis=1, keepdims=False), 0)
            token = lax.dynamic_index_in_dim(first, index, axis=1, keepdims=False)
            end = texts.prompt + position  # [B], the slot of the rejected token

            def one_pass(step: Array, inner: tuple[Cache, Array, Array]) -> tuple[Cache, Array, Array]:
                cache, last, tail = inner
                logits, cache = drafter.apply(params, last[:, None], drafter.with_length(cache, end + step - 1))
                seen = sampling.distribution(logits[:, 0], warp)
                drawn = sampling.draw_token(seen, warp, sampling.uniforms(seeds, position, step, sampling.DRAFT))
                line = features(seen, sampling.log_prob_of(seen, drawn))[:, None, None]
                return cache, drawn, lax.dynamic_update_slice(tail, line, (0, index, step, 0))

            cache, _, tail = lax.fori_loop(1, longest, one_pass, (cache, token, tail))
            return cache, tail

        return lax.fori_loop(0, jnp.max(jnp.sum(at >= 0, axis=1)), one_tail, (cache, tail))[1]

    fill, every_chain = functools.partial(filled_caches, models), functools.partial(chains, drafter, longest)
    return jax.jit(fill), jax.jit(path, donate_argnums=2), jax.jit(tails), jax.jit(every_chain)
