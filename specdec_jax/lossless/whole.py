"""The whole compiled decoder on a toy: long texts of drawn requests, by chi-square, and requests among other ones.

Rules do not get the seed or the prompt, whose hash is half of a request's key (`DecodeState.key`). Here this protection
is removed: keys are (0, seed) with small seeds. A rule that infers its request's seed, from `policy_seed` or from the
drafts, knows the uniforms, and its use of them shows in the texts. Inferring takes many rounds, so texts are long.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from specdec_jax.decoding import Decoder
from specdec_jax.decoding.decoder import default_widths
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import slots_for
from specdec_jax.lossless.batched import take_rows
from specdec_jax.lossless.drawing import Drawing
from specdec_jax.lossless.results import Result
from specdec_jax.lossless.sampled import Positions, toy_decoder
from specdec_jax.types import Drafter, Monitor, StoppingPolicy, Verifier

ROWS, BATCHES = 384, 4  # texts of a batch, and batches
PLAIN = 2 / 3  # share of texts at keys that a rule can guess, of moderate temperature and full length
TOKENS, STRETCH = 128, 32  # length of a text and of the stretches that are summed
PROMPT = 4  # tokens of a prompt
SIBLINGS = 3  # tokens of the vocabulary beyond a draft and its siblings


def prove_whole(
    policy: StoppingPolicy,
    verifier: Verifier,
    drawing: Drawing,
    *,
    monitor: Monitor | None = None,
    drafter: Drafter | None = None,
    several: bool = False,
    max_draft_length: int = 5,
    tokens: int = TOKENS,
    rows: int = ROWS,
    batches: int = BATCHES,
) -> Result:
    """Both tests with texts of up to `tokens` tokens, a multiple of STRETCH, in two `batches` or more.

    The measure is a p-value. The toy, the verification widths and the requests are drawn; the drafter is `drafter`,
    which needs no parameters and drafts in a vocabulary of 8 tokens, or a model, with `several` also one that reads its
    target, or a lookup and one.
    """
    rng, widest = drawing.rng, policy.max_tokens(max_draft_length)
    vocab = max(8, widest // max(max_draft_length, 1) - 1 + SIBLINGS)
    kind = int(rng.integers(3)) if several and policy.drafts_chains else 0
    widths = rng.permutation([1, *default_widths(widest)])[: rng.integers(0, 4)]
    decoder, params = toy_decoder(
        policy,
        verifier,
        max_draft_length,
        vocab,
        toy=int(rng.integers(2**31)),
        distance=float(rng.uniform(0.3, 0.7)),
        monitor=monitor,
        drafter=drafter,
        reads=kind == 1,
        several=kind == 2,
        widths=sorted({*map(int, widths), 1 + widest}),
    )
    results, plain = [], np.arange(rows) < rows * PLAIN
    for index in range(batches):
        texts = [np.resize(rng.integers(0, vocab, rng.integers(1, PROMPT + 1)), PROMPT) for _ in range(rows)]
        limit = np.where(plain | (rng.uniform(size=rows) < 0.7), tokens, rng.integers(1, tokens + 1, rows))
        stop = np.where(plain | (rng.uniform(size=rows) < 0.6), -1, rng.integers(0, vocab, rows))
        warp = drawing.warps(rows, verifier.greedy_only, vocab)
        simple = make_warp(rows, rng.uniform(0.7, 1.3, rows) * (not verifier.greedy_only))
        warp = jax.tree.map(lambda a, b: np.where(plain, a, b), simple, warp)
        seed = np.where(plain, index * rows + np.arange(rows), rng.integers(2**31, 2**32, rows))
        requests = _Requests(np.stack(texts), seed, limit, stop, warp)
        results.append((requests, _decoded(decoder, params, requests, tokens)))
    p_values, wrong = _p_values(decoder, params, results, tokens), next(filter(None, map(_ends, results)), "")
    if not wrong and not policy.joins_rows:
        (requests, first), (others, _) = results[:2]
        order = rng.permutation(rows)
        half = order < rows // 2  # these requests are decoded again, in other places beside other requests
        mixed = jax.tree.map(
            lambda a, b: np.where(half.reshape(-1, *(1,) * (a.ndim - 1)), a[order], b), requests, others
        )
        again = _decoded(decoder, params, mixed, tokens)
        pairs = zip(*map(jax.tree.leaves, (take_rows(first, order[half]), take_rows(again, half))), strict=True)
        if not all(np.array_equal(mine, other) for mine, other in pairs):
            wrong = "a request's tokens or counts depend on the other requests of its batch"
    statistics = [decoded.statistics for _, decoded in results]
    counts = {"texts": rows * batches, "rounds": sum(int(each.num_rounds.sum()) for each in statistics)}
    counts["drafts"] = sum(int(each.num_drafts.sum()) for each in statistics)
    return Result(min(1.0, len(p_values) * min(p_values)), counts, wrong)


class _Requests(NamedTuple):
    prompts: np.ndarray  # [B, PROMPT]
    seed: np.ndarray  # [B]
    limit: np.ndarray  # [B], max_new_tokens
    stop: np.ndarray  # [B], a token that ends the text; -1: none
    warp: Any


class _Decoded(NamedTuple):
    tokens: np.ndarray  # [B, S]; zero beyond a text's end
    emitted: np.ndarray  # [B]
    statistics: Any


def _decoded(decoder: Decoder, params: ModelParams, requests: _Requests, tokens: int) -> _Decoded:
    """The texts of requests at keys that a rule can guess."""
    state = decoder.prefill(
        params,
        requests.prompts.tolist(),
        max_new_tokens=requests.limit.tolist(),
        seed=requests.seed.tolist(),
        warp=requests.warp,
        stop_ids=(0,),  # a column; replaced below
        slots=slots_for(PROMPT, tokens, max(decoder.parts.widths)),
    )
    ends = np.asarray(state.stop_ids).copy()
    ends[:, 0] = requests.stop
    state = decoder.run(params, state._replace(key=state.key.at[:, 0].set(0), stop_ids=ends))
    length = np.asarray(state.length)
    texts = np.where(np.arange(state.tokens.shape[1]) < length[:, None], np.asarray(state.tokens), 0)
    return _Decoded(texts, length - PROMPT, jax.tree.map(np.asarray, state.statistics))


def _ends(batch: tuple[_Requests, _Decoded]) -> str:
    """What is wrong with the texts' lengths: they end at their limit or behind their first stop token."""
    requests, decoded = batch
    emitted = decoded.tokens[:, PROMPT:]
    index = np.arange(emitted.shape[1])[None, :]
    inside = (index < requests.limit[:, None]) & (index < decoded.emitted[:, None])
    stops = (emitted == requests.stop[:, None]) & inside
    first = np.where(stops.any(axis=1), np.argmax(stops, axis=1) + 1, requests.limit)
    return "" if np.array_equal(first, decoded.emitted) else "a text does not end at its limit or its end token"


def _p_values(
    decoder: Decoder, params: ModelParams, batches: Sequence[tuple[_Requests, _Decoded]], tokens: int
) -> tuple[float, ...]:
    """The p-values of stretches and of whole texts, and of the products of neighbouring rows' differences, which are
    uncorrelated: of the first batch's plain texts, whose seeds are the smallest, of all plain ones, and of the others.
    """
    plain, p_values = np.arange(len(batches[0][1].emitted)) < len(batches[0][1].emitted) * PLAIN, []
    for some, rows in ((batches[:1], plain), (batches, plain), (batches, ~plain)):
        positions, products, variance = Positions(decoder.parts.target, params.target, PROMPT, tokens), 0.0, 0.0
        for requests, decoded in some:
            texts, warp = decoded.tokens[rows, : PROMPT + tokens], take_rows(requests.warp, rows)
            difference, chance = positions.add(texts, warp, decoded.emitted[rows])
            weight = np.random.default_rng(0).normal(size=chance.shape[-1])
            mine, spread = difference @ weight, (chance @ weight**2) - (chance @ weight) ** 2
            products += float(np.sum(mine[1:] * mine[:-1]))
            variance += float(np.sum(spread[1:] * spread[:-1]))
        z = products / np.sqrt(variance) if variance > 25 else 0.0
        p_values += [*positions.by_stretch(STRETCH), *positions.by_stretch(tokens), float(2 * stats.norm.sf(abs(z)))]
    return tuple(p_values)
