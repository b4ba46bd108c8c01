"""Beam search on the models and caches of `generate`, for comparison with sampling and greedy decoding.

It maximises the target's probability and is not speculative decoding: every step is one target pass over `width` rows.
Plain autoregressive decoding is `generate(..., drafter=None)`: one target pass per token, in the same decoder as
speculative decoding, so that their times are comparable.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding.prefill import counted
from specdec_jax.hyperparameters import in_rows
from specdec_jax.loading import LoadedModel
from specdec_jax.ranges import Between
from specdec_jax.text.generation import Conversation, prepare
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import Array, Cache, LanguageModel, Params

MOST_PENALTY = 8.0  # maximum length penalty: length**8 of the longest contexts fits float32


class Hypothesis(NamedTuple):
    """One finished beam."""

    text: str
    tokens: list[int]  # including the end of sequence
    score: float  # log_prob / len(tokens) ** length_penalty
    log_prob: float  # nats, of all tokens under the target at temperature 1
    finish_reason: str  # "stop" or "length"


class _Search(NamedTuple):
    emitted: Array  # int32, tokens of every open beam
    last: Array  # [W] int32, the next token to feed for each beam
    tokens: Array  # [W, S] int32, new tokens of the open beams
    log_prob: Array  # [W] float32, nats; -inf: no beam
    cache: Cache  # W rows, with all tokens but the last
    finished: "_Finished"


class _Finished(NamedTuple):
    """The best finished hypotheses so far, best first."""

    score: Array  # [W] float32, -inf: none
    log_prob: Array  # [W] float32
    tokens: Array  # [W, S] int32
    length: Array  # [W] int32


class _Numbers(NamedTuple):
    """Traced numbers: other values need no compilation."""

    length_penalty: Any  # float32
    min_new_tokens: Any  # int32
    max_new_tokens: Any  # int32


def beam_search(
    prompt: Conversation,
    *,
    target: LoadedModel | str = "smollm2",
    width: int = 4,
    length_penalty: float = 1.0,
    min_new_tokens: int = 0,
    max_new_tokens: int = 128,
    stop_ids: Sequence[int] | None = None,
    chat: bool = True,
    system: str | None = None,
    parse_special: bool = False,
    dtype: str = "auto",
    slots: int | None = None,
) -> list[Hypothesis]:
    """The most probable continuations found by `width` beams, best first; at most `width` of them.

    The score of a hypothesis is sum(log p) / length ** length_penalty, with its length in new tokens including the end
    of sequence (as in transformers' `generate(num_beams=...)`). Every step ranks the candidates of all open beams:
    finished ones among the best `width` are set aside, and the best `width` others stay open. Ties are resolved in
    favour of the better beam, then the smaller token; among hypotheses in favour of the one that ended first.

    The search ends when no open beam can exceed the worst of `width` hypotheses. Log-probabilities never increase, so a
    beam with sum s cannot score above s / max_new_tokens ** length_penalty if the penalty is positive, nor above
    s / L ** length_penalty if it is negative, with L the shortest length at which it may end. This bound is exact;
    transformers' `early_stopping=False` uses the current length instead, which may stop too early.

    Args:
        length_penalty: in [-8, 8]; above 0 favours long hypotheses, below 0 short ones, 0 compares sums.
        min_new_tokens: number of tokens before an end of sequence is allowed; probabilities are not renormalised.

    Raises:
        ValueError: a number out of range or a prompt that does not fit, before anything compiles.
    """
    for name, value in (("width", width), ("max_new_tokens", max_new_tokens)):
        in_rows(1, value, name, Between(1, whole=True))
    penalty = in_rows(1, length_penalty, "length_penalty", Between(-MOST_PENALTY, MOST_PENALTY))[0]
    least = in_rows(1, min_new_tokens, "min_new_tokens", Between(0, max_new_tokens, whole=True))[0]
    numbers = _Numbers(penalty, least, np.int32(max_new_tokens))
    pair = measured_pair(target, None, dtype=dtype)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    request = prepare(pair, [prompt], sampling, chat=chat, system=system, parse_special=parse_special, slots=slots)
    ends = request.options["stop_ids"]
    state = pair.decoder.prefill(pair.params, request.prompts, **request.options)
    search = _program(pair.target.model, width)
    last, ids = np.int32(request.prompts[0][-1]), np.array(ends, np.int32)
    finished = jax.device_get(search(pair.params.target, state.target_cache, last, ids, numbers, state.tokens.shape[1]))
    hypotheses = []
    for row in np.flatnonzero(np.isfinite(finished.score)):
        tokens = finished.tokens[row, : finished.length[row]].tolist()
        text = pair.target.tokenizer.decode([token for token in tokens if token not in ends])
        reason = "stop" if tokens[-1] in ends else "length"
        hypotheses.append(Hypothesis(text, tokens, float(finished.score[row]), float(finished.log_prob[row]), reason))
    return hypotheses


@functools.lru_cache(maxsize=16)
def _program(target: LanguageModel, width: int) -> Callable[..., _Finished]:
    """The jitted search: (params, cache of one row, last token, stop ids [E], numbers, slots) -> _Finished."""

    def search(params: Params, cache: Cache, last: Array, ends: Array, numbers: _Numbers, slots: int) -> _Finished:
        def unfinished(now: _Search) -> Array:
            soonest = jnp.minimum(jnp.maximum(now.emitted, numbers.min_new_tokens) + 1, numbers.max_new_tokens)
            length = jnp.where(numbers.length_penalty > 0, numbers.max_new_tokens, soonest)
            bound = _score(jnp.max(now.log_prob), length, numbers)  # of all continuations of open beams
            return (now.emitted < numbers.max_new_tokens) & (bound > jnp.min(now.finished.score))

        def step(now: _Search) -> _Search:
            logits, cache = target.apply(params, now.last[:, None], now.cache)
            return _advance(now._replace(cache=cache), logits[:, 0], ends, numbers)

        # One open beam, the prompt; the other rows have a copy of its cache and probability zero.
        rows = jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), cache)
        none = jnp.full((width,), -jnp.inf, jnp.float32)
        tokens, zeros = jnp.zeros((width, slots), jnp.int32), jnp.zeros((width,), jnp.int32)
        first, finished = jnp.where(jnp.arange(width) == 0, jnp.float32(0), none), _Finished(none, none, tokens, zeros)
        begun = _Search(jnp.int32(0), jnp.full((width,), last, jnp.int32), tokens, first, rows, finished)
        return lax.while_loop(unfinished, step, begun).finished

    return jax.jit(counted(search), static_argnums=5)


def _score(log_prob: Array, length: Array, numbers: _Numbers) -> Array:
    return log_prob / jnp.power(length.astype(jnp.float32), numbers.length_penalty)


def _advance(now: _Search, logits: Array, ends: Array, numbers: _Numbers) -> _Search:
    """One step, of a fed cache: ranks the candidates of all beams, sets finished ones aside, keeps the best others."""
    width, vocab = logits.shape
    length = now.emitted + 1
    distribution = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    is_end = jnp.any(jnp.arange(vocab, dtype=jnp.int32)[:, None] == ends[None, :], axis=-1)
    distribution = jnp.where(is_end[None, :] & (now.emitted < numbers.min_new_tokens), -jnp.inf, distribution)
    # Up to one candidate per beam and stop token may be finished, and `width` others must remain.
    count = min(width * (1 + ends.shape[0]), width * vocab)
    log_prob, index = lax.top_k((now.log_prob[:, None] + distribution).reshape(-1), count)
    parent, token = index // vocab, (index % vocab).astype(jnp.int32)
    ended = is_end[token]
    done = (ended | (length >= numbers.max_new_tokens))[:width]
    written = jnp.arange(now.tokens.shape[1]) == now.emitted
    best = jnp.where(written[None, :], token[:width, None], now.tokens[parent[:width]])
    ended_now = _Finished(
        jnp.where(done, _score(log_prob[:width], length, numbers), -jnp.inf),
        log_prob[:width],
        best,
        jnp.broadcast_to(length, (width,)),
    )
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), now.finished, ended_now)
    finished = jax.tree.map(lambda leaf: leaf[lax.top_k(both.score, width)[1]], both)
    log_prob, chosen = lax.top_k(jnp.where(ended, -jnp.inf, log_prob), width)
    parent, token = parent[chosen], token[chosen]
    return _Search(
        emitted=length,
        last=token,
        tokens=jnp.where(written[None, :], token[:, None], now.tokens[parent]),
        log_prob=log_prob,
        cache=jax.tree.map(lambda leaf: leaf[parent], now.cache),
        finished=finished,
    )
