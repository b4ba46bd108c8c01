"""Is the output law the target's? Exactly, by enumeration on toy models; and of the whole decoder, by chi-square.

`prove_exactly` sums over every draft, every number of accepted tokens and every next token, round after round with the
states of policy and verifier carried along, in float64. It calls the policy and the verifier as the decoder does, so it
proves a user's own file too; only the draft loop (drafters/model.py) has a twin here. Carrying the states is what
catches adaptive rules: a rule that looks at what it may not is unbiased within one round and biased over two.

`test_by_sampling` compares what the whole decoder draws (its loops, its uniforms) with the target's conditionals. It
works on any pair of models; float32 with `jax_default_matmul_precision="highest"`, because in bfloat16 the logits of
one text differ between batch shapes, and enough sequences show that.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from specdec_jax.analysis.enumeration import Setting, enumerate_law, first_node, law_table, target_joint
from specdec_jax.analysis.toys import Toy, table_model, toy_pair, toy_phases
from specdec_jax.decoding import Decoder, build_decoder, no_monitor
from specdec_jax.drafters.model import model
from specdec_jax.rounds import ModelParams
from specdec_jax.sampling import law, make_warp
from specdec_jax.types import LanguageModel, Monitor, Params, StoppingPolicy, Verifier

TOLERANCE = 1e-6  # honest rules come out below 1e-12
FALSE_ALARM = 1e-4  # how often an honest decoder may fail the sampled test
WARPS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0.0},
)
PHASES, UNWATCHED = toy_phases(), no_monitor()  # made once, so that what was compiled for them is found again
TOYS = (toy_pair(3, 0), toy_pair(3, 1), toy_pair(3, 2, distance=0.0))


class Case(NamedTuple):
    """One enumeration."""

    toy: int  # index of its toy pair
    warp: Mapping[str, Any]
    batch: int
    chosen: bool  # the drafter chose its tokens (one-hot laws) instead of drawing them
    total_variation: float
    draft_lengths: tuple[int, ...]  # that occurred
    law: np.ndarray | None = None  # [V] * tokens float64, of the emitted tokens


class LosslessReport(NamedTuple):
    """The worst total variation between the output law and the target's over all cases."""

    total_variation: float
    lossless: bool  # total_variation < TOLERANCE
    draft_lengths: tuple[int, ...]  # that occurred: a rule that never drafts proves nothing
    cases: tuple[Case, ...]


def prove_exactly(
    policy: StoppingPolicy,
    verifier: Verifier,
    *,
    policy_numbers: Mapping[str, Any] | None = None,
    verifier_numbers: Mapping[str, Any] | None = None,
    monitor: Monitor | None = None,
    monitor_numbers: Mapping[str, Any] | None = None,
    max_draft_length: int = 2,
    tokens: int = 3,
    batches: Sequence[int] = (1, 3),
    warps: Sequence[Mapping[str, Any]] = WARPS,
    toys: Sequence[Toy] = TOYS,
    chosen: Sequence[bool] = (False, True),
) -> LosslessReport:
    """The exact law of the first `tokens` emitted tokens against the target's, over all the given cases.

    Args:
        monitor: what they may read of the text; unless given, phases that change with every token where one of them
            reads phases, else none.
        batches: rows that policy and verifier see at a time; rows of different texts and states stand side by side.
        warps: arguments of `make_warp`; a verifier for greedy decoding is held to those at temperature 0.
        toys: pairs of models; the default has one whose drafter equals its target, where residuals are 0/0.
        chosen: drafters that draw their tokens (False), and that choose them (True: one-hot laws).

    Raises:
        ValueError: no warp is left to prove anything at, or numbers that `init` refuses.
    """
    warps = [warp for warp in warps if not (verifier.greedy_only and warp["temperature"] > 0)]
    if not warps:
        raise ValueError("this verifier is for temperature 0 only, and no such warp is given")
    monitor = monitor or (PHASES if policy.needs_phases or verifier.needs_phases else UNWATCHED)
    cases = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for index, toy in enumerate(toys):
            for warp in warps:
                drafts, targets = law_table(toy.drafter, warp), law_table(toy.target, warp)
                for batch, one_hot in itertools.product(batches, chosen):
                    setting = Setting(
                        policy,
                        verifier,
                        monitor,
                        drafts,
                        targets,
                        warp,
                        most=max_draft_length,
                        tokens=tokens,
                        limit=tokens + 1,
                        batch=batch,
                        chosen=one_hot,
                    )
                    start = first_node(setting, policy_numbers or {}, verifier_numbers or {}, monitor_numbers or {})
                    joint, lengths = enumerate_law(setting, start)
                    distance = float(0.5 * np.abs(joint - target_joint(setting)).sum())
                    distance = distance if np.isfinite(distance) else np.inf
                    cases.append(Case(index, warp, batch, one_hot, distance, lengths, joint))
    worst = max(case.total_variation for case in cases)
    lengths = tuple(sorted({length for case in cases for length in case.draft_lengths}))
    return LosslessReport(worst, worst < TOLERANCE, lengths, tuple(cases))


class SampledReport(NamedTuple):
    """A chi-square test of the first tokens' joint law."""

    statistic: float
    degrees: int
    p_value: float  # lossless decoders give less than FALSE_ALARM with that probability
    sequences: int
    tokens: int
    cells: int
    lossless: bool  # p_value >= FALSE_ALARM


def toy_decoder(
    policy: StoppingPolicy,
    verifier: Verifier,
    max_draft_length: int = 2,
    vocab_size: int = 3,
    toy: int = 0,
    monitor: Monitor | None = None,
) -> tuple[Decoder, ModelParams]:
    """A whole decoder over a toy pair and its parameters, ready for `test_by_sampling`."""
    tables, small = toy_pair(vocab_size, toy), table_model(vocab_size)
    drafter = model(small, max_draft_length, catch_up=4)
    monitor = monitor or (PHASES if policy.needs_phases or verifier.needs_phases else None)
    decoder = build_decoder(small, drafter, policy, verifier, monitor=monitor, prefill_chunk=4)
    return decoder, ModelParams(tables.target, tables.drafter)


def test_by_sampling(
    decoder: Decoder,
    params: ModelParams,
    prompt: Sequence[int] = (0, 1),
    *,
    warp: Mapping[str, Any] | None = None,
    policy_numbers: Mapping[str, Any] | None = None,
    verifier_numbers: Mapping[str, Any] | None = None,
    monitor_numbers: Mapping[str, Any] | None = None,
    tokens: int = 4,
    sequences: int = 40_960,
    batch: int | None = None,
    seed: int = 0,
    branching: int = 8,
    against: np.ndarray | None = None,
) -> SampledReport:
    """Draw sequences with the whole decoder and test the joint law of their first tokens against the target's.

    The cells are a tree: after each of the `branching` likeliest prefixes of a length, its `branching` likeliest next
    tokens and the rest; cells expected fewer than five times are pooled. On a toy that is every sequence.

    Args:
        params: in float32 for real models, with `jax_default_matmul_precision="highest"`.
        warp: arguments of `make_warp`; temperature 1 unless given.
        batch: sequences decoded at a time; None: what keeps the laws of a round under 256 MB.
        seed: sequence i has seed `seed + i`.
        against: [V] * tokens, a joint law to test against in the place of the target's, as a lossy verifier's.
    """
    numbers = {"temperature": 1.0} if warp is None else dict(warp)
    target, most = decoder.parts.target, decoder.parts.drafter.max_draft_length
    if batch is None:
        batch = max(1, min(4096, sequences, 2**26 // (target.spec.vocab_size * (most + 1))))
    if against is None:
        cells = _cells(target, params.target, prompt, numbers, tokens, branching)
    else:
        cells = {(text, False): float(chance) for text, chance in np.ndenumerate(against)}
    observed = dict.fromkeys(cells, 0)
    for first in range(0, sequences, batch):
        count = min(batch, sequences - first)
        state = decoder.prefill(
            params,
            [list(prompt)] * batch,
            max_new_tokens=[tokens + most] * count + [0] * (batch - count),
            seed=(seed + first) % 2**32,
            warp=make_warp(batch, **numbers),
            policy_numbers=policy_numbers,
            verifier_numbers=verifier_numbers,
            monitor_numbers=monitor_numbers,
            stop_ids=(),
        )
        drawn = np.asarray(decoder.run(params, state).tokens)[:count, len(prompt) : len(prompt) + tokens]
        for text, times in zip(*np.unique(drawn, axis=0, return_counts=True), strict=True):
            observed[_cell_of(cells, text.tolist())] += int(times)
    counts, expected = np.array(list(observed.values())), np.array(list(cells.values())) * sequences
    return _chi_square(counts, expected, sequences, tokens)


test_by_sampling.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for its own

Cell = tuple[tuple[int, ...], bool]  # a prefix, and whether the cell is all that goes on from it otherwise


def _cells(
    target: LanguageModel,
    params: Params,
    prompt: Sequence[int],
    warp: Mapping[str, Any],
    tokens: int,
    branching: int,
) -> dict[Cell, float]:
    """A partition of all sequences of that many tokens, with the target's exact probabilities."""
    cells: dict[Cell, float] = {((), False): 1.0}
    for depth in range(tokens):
        open_cells = [cell for cell in cells if len(cell[0]) == depth and not cell[1]]
        open_cells = sorted(open_cells, key=lambda cell: -cells[cell])[: branching**2]
        prob = _conditionals(target, params, [[*prompt, *prefix] for prefix, _ in open_cells], warp)
        for (prefix, _), row in zip(open_cells, prob, strict=True):
            mass = cells.pop((prefix, False))
            likeliest = np.argsort(-row, kind="stable")[:branching]
            cells |= {((*prefix, int(token)), False): mass * row[token] for token in likeliest}
            cells[prefix, True] = mass * max(0.0, 1.0 - row[likeliest].sum())
    return cells


def _conditionals(target: LanguageModel, params: Params, texts: list[list[int]], warp: Mapping[str, Any]) -> np.ndarray:
    """The target's law [N, V] float64 after each text; all of one length."""

    def last_law(params: Params, tokens: jax.Array) -> jax.Array:
        cache = target.init_cache(params, 1, tokens.shape[1])
        logits, _ = target.apply(params, tokens, cache)
        return law(logits[:, -1], make_warp(1, **warp)).log_prob[0]

    compiled = jax.jit(last_law)
    rows = [np.exp(np.asarray(compiled(params, np.array([text], np.int32)), np.float64)) for text in texts]
    return np.stack([row / row.sum() for row in rows])


def _cell_of(cells: Mapping[Cell, float], text: Sequence[int]) -> Cell:
    prefix = tuple(text)
    if (prefix, False) in cells:
        return prefix, False
    while (prefix, False) not in cells and (prefix, True) not in cells:
        prefix = prefix[:-1]
    return prefix, (prefix, True) in cells


def _chi_square(observed: np.ndarray, expected: np.ndarray, sequences: int, tokens: int) -> SampledReport:
    """Cells expected fewer than five times count as one; what cannot happen and did settles the test."""
    impossible = bool(np.any(observed[expected <= 0]))
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    rare = int(np.sum(expected < 5))
    while 0 < rare < len(expected) and expected[:rare].sum() < 5:
        rare += 1
    if rare:
        observed = np.append(observed[rare:], observed[:rare].sum())
        expected = np.append(expected[rare:], expected[:rare].sum())
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    degrees = len(expected) - 1
    p_value = float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    p_value = 0.0 if impossible else p_value
    return SampledReport(statistic, degrees, p_value, sequences, tokens, len(expected), p_value >= FALSE_ALARM)
