"""Tests of long texts of the whole decoder on a toy: with keys that a rule can guess, and of independence of rows.

Rules do not get the seed or the prompt, whose hash is half of a request's key (`DecodeState.key`). The first test
removes this protection: its keys are (0, seed) with seeds 0 to 255. A rule that infers its request's seed, from
`policy_seed` or from the drafts, knows the drafting uniforms, and its use of them is detected. Inferring takes many
rounds, so texts are long. Late deviations have the same weight as early ones: the differences between tokens and the
target's conditional distributions are summed over stretches of a text.

The second test decodes the same requests together with others, in another order. A request's tokens and counts must be
equal in every round, for any shape of drafts (`beside`, `expand`).
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.decoding import Decoder, build_decoder
from specdec_jax.decoding.decoder import widest_draft
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import slots_for
from specdec_jax.drafters.model import model
from specdec_jax.lossless.exact import PHASES
from specdec_jax.lossless.sampled import FALSE_ALARM, Positions
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.types import DecodeState, Monitor, StoppingPolicy, Verifier

ROWS = 256  # number of texts in each test
TOKENS, STRETCH = 192, 32  # length of a text and of the stretches that are summed
VOCAB, CANDIDATES = 8, 3  # minimum vocabulary of the toy, also beyond the siblings of a draft token
DISTANCE = 0.5  # distance of its drafter, as in `toy_pair`
PROMPT = (0, 1)
GREEDY = 3  # index of the greedy warp below
ALONE = {"temperature": (1.0, 0.6, 1.3, 0.0, 1.0), "top_k": (0, 3, 0, 0, 0), "top_p": (1.0, 1.0, 0.8, 1.0, 0.9)}


class LongTextsReport(NamedTuple):
    """The results of both tests."""

    p_values: tuple[float, ...]  # chi-square of each stretch of tokens, with keys that a rule can guess
    rows: int
    tokens: int
    rounds: int  # number of rounds of the longest text
    alone: bool | None  # whether a request is independent of other rows; None: not tested for rules that join rows
    lossless: bool

    @property
    def least(self) -> float:
        """The smallest p-value of all stretches, times their number."""
        return min(1.0, len(self.p_values) * min(self.p_values))


def prove_long_texts(
    policy: StoppingPolicy,
    verifier: Verifier,
    *,
    monitor: Monitor | None = None,
    max_draft_length: int = 5,
    tokens: int | None = None,
) -> LongTextsReport:
    """Both tests, with texts of `tokens` tokens, a multiple of STRETCH. None: TOKENS, half of it for trees."""
    widest = widest_draft(policy, max_draft_length)
    tokens = tokens or (TOKENS if widest == max_draft_length else TOKENS // 2)  # rounds of trees take longer
    vocab = max(VOCAB, widest // max_draft_length - 1 + CANDIDATES)
    tables, small = toy_pair(vocab, distance=DISTANCE), table_model(vocab)
    decoder = build_decoder(
        small,
        model(small, max_draft_length, catch_up=4),
        policy,
        verifier,
        monitor=monitor or (PHASES if policy.needs_phases or verifier.needs_phases else None),
        verification_widths=(1 + widest,),
        prefill_chunk=4,
    )
    params = ModelParams(tables.target, tables.drafter)
    temperature = 0.0 if verifier.greedy_only else 1.0
    p_values, rounds = _at_known_keys(decoder, params, temperature, tokens)
    alone = None if policy.joins_rows else _alone(decoder, params, tokens)
    lossless = min(p_values) * len(p_values) >= FALSE_ALARM and alone is not False
    return LongTextsReport(p_values, ROWS, tokens, rounds, alone, lossless)


def _at_known_keys(
    decoder: Decoder, params: ModelParams, temperature: float, tokens: int, guessed: bool = True
) -> tuple[tuple[float, ...], int]:
    """The p-values of stretches and the rounds of the longest text; keys have the prompt's hash unless `guessed`."""
    warp = {"temperature": temperature}
    state = decoder.prefill(
        params,
        [PROMPT] * ROWS,
        max_new_tokens=tokens + decoder.parts.drafter.max_draft_length,
        seed=0,
        warp=make_warp(ROWS, **warp),
        stop_ids=(),
    )
    state = decoder.run(params, state._replace(key=state.key.at[:, 0].set(0)) if guessed else state)
    positions = Positions(decoder.parts.target, params.target, len(PROMPT), tokens, warp)
    positions.add(np.asarray(state.tokens)[:, : len(PROMPT) + tokens])
    return positions.by_stretch(STRETCH), int(np.max(np.asarray(state.statistics.num_rounds)))


def _alone(decoder: Decoder, params: ModelParams, tokens: int) -> bool:
    """Whether half of the requests of a batch have equal results in another order, together with other requests."""
    first = _decoded(decoder, params, np.arange(ROWS), tokens)
    order = np.random.default_rng(0).permutation(ROWS) + ROWS // 2
    greedy = np.flatnonzero(order % len(ALONE["temperature"]) == GREEDY)[0]
    order[[0, greedy]] = order[[greedy, 0]]  # the first row has another temperature than in the first batch
    second = _decoded(decoder, params, order, tokens)
    place = np.argsort(order)[: ROWS // 2]  # indices of requests of the first batch
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(leaf[ROWS // 2 :], other[place]) for leaf, other in pairs)


def _decoded(decoder: Decoder, params: ModelParams, requests: np.ndarray, tokens: int) -> Any:
    """Tokens, lengths and counts of the requests with these numbers, which differ in all their arguments."""
    vocab, greedy = decoder.parts.target.spec.vocab_size, decoder.parts.verifier.greedy_only
    warp = {name: np.array(numbers)[requests % len(numbers)] for name, numbers in ALONE.items()}
    warp["temperature"] = warp["temperature"] * (not greedy)
    longest = tokens + decoder.parts.drafter.max_draft_length
    limits = longest - requests * 7 % (tokens // 2)  # rows end at different times
    state: DecodeState = decoder.prefill(
        params,
        [[int(number) % vocab, int(number) // vocab % vocab] for number in requests],
        max_new_tokens=limits.tolist(),
        seed=(requests * 40_503).tolist(),
        warp=make_warp(len(requests), **warp),
        stop_ids=(),
        slots=slots_for(2, longest, max(decoder.parts.widths)),
    )
    state = decoder.run(params, state)
    return jax.tree.map(np.asarray, (state.tokens, state.length, state.statistics))
