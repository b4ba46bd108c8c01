"""Chi-square tests of samples of the whole decoder, including loops and uniforms, against the target's distribution.

There are two tests of the same sequences. The joint one bins whole sequences of the first tokens; it covers all
dependencies, but its power per position decreases with their number. The one by position compares every token with the
target's exact conditional given the text before it, for drafts of any length and any vocabulary.

Models in float32 with `jax_default_matmul_precision="highest"`, because in bfloat16 the logits of one text differ
between batch shapes, and enough sequences show that.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specdec_jax.decoding import Decoder, build_decoder, default_widths
from specdec_jax.decoding.function_checks import check_parts
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import distribution, distributions, make_warp
from specdec_jax.drafters.model import model
from specdec_jax.drafters.multi_drafter import multi_drafter
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.drafters.reading import reading
from specdec_jax.lossless.batched import joined, take_rows
from specdec_jax.lossless.enumeration import PHASES
from specdec_jax.lossless.results import Counterexample
from specdec_jax.lossless.toys import ReadingTable, reading_table_model, table_model, toy_pair, with_reading
from specdec_jax.models.adapters import with_source
from specdec_jax.types import Array, Drafter, LanguageModel, Monitor, Params, StoppingPolicy, Verifier, Warp

FALSE_ALARM = 1e-4  # probability that a lossless decoder fails one of the tests
JOINT_TOKENS = 4  # default tokens of the joint test: each further one multiplies the cells
RANKS = (1, 4, 32)  # bins of the test by position there: the first token, to the fourth, to the thirty-second, the rest
SPREAD = 2_654_435_761  # an odd number: seeds are spread over 32 bits and distinct
LISTED = 16  # vocabularies up to this size are binned by token and previous token


class SampledReport(NamedTuple):
    """Chi-square tests of the first tokens: of whole sequences, and of every position."""

    statistic: float  # statistic of the joint test
    degrees: int
    p_value: float  # lossless decoders give less than FALSE_ALARM with that probability
    sequences: int
    tokens: int  # number of tokens compared by position
    cells: int  # number of cells of the joint test
    lossless: bool  # neither test fails
    by_position: tuple[float, ...] = ()  # p-value of each position's token given the text before it
    drafted: tuple[int, ...] = ()  # number of drafts of at least 1, 2, ... K tokens
    counterexample: Counterexample | None = None

    @property
    def least(self) -> float:
        """The smallest p-value of all positions, times their number."""
        return min(1.0, len(self.by_position) * min(self.by_position, default=1.0))


def toy_decoder(
    policy: StoppingPolicy,
    verifier: Verifier,
    max_draft_length: int = 2,
    vocab_size: int = 3,
    toy: int = 0,
    monitor: Monitor | None = None,
    distance: float = 1.0,
    reads: bool = False,
    widths: Sequence[int] | None = None,
    drafter: Drafter | None = None,
    several: bool = False,
) -> tuple[Decoder, ModelParams]:
    """A whole decoder over a toy pair (`toys.toy_pair`) and its parameters, ready for `test_by_sampling`.

    Args:
        reads: whether its drafter reads its target.
        widths: verification widths; None: `default_widths`.
        drafter: a drafter without a model, instead of the toy's.
        several: whether prompt lookup drafts too (`multi_drafter`).
    """
    tables, small = toy_pair(vocab_size, toy, distance), table_model(vocab_size)
    drafter, drafter_params = drafter or model(small, max_draft_length, catch_up=4), None if drafter else tables.drafter
    if reads:
        drafter = reading(reading_table_model(vocab_size), max_draft_length, catch_up=4)
        drafter_params = ReadingTable(tables.drafter, with_reading(tables, toy).read)
    if several:
        drafter = multi_drafter((prompt_lookup(max_draft_length, vocab_size=vocab_size), drafter))
        drafter_params = None, drafter_params
    monitor = monitor or (PHASES if policy.needs_phases or verifier.needs_phases else None)
    options: dict[str, Any] = {"monitor": monitor, "verification_widths": widths, "prefill_chunk": 4}
    return build_decoder(small, drafter, policy, verifier, **options), ModelParams(tables.target, drafter_params)


def check_on_toy(
    policy: StoppingPolicy, verifier: Verifier, monitor: Monitor | None, longest: int, **options: Any
) -> None:
    """Checks a user's functions at a toy's sizes, with and without drafts, before proofs that take minutes.

    Raises:
        ValueError: one line with the file and line (`function_checks.check_parts`).
    """
    widths = (1, *default_widths(policy.max_tokens(longest)))
    decoder, params = toy_decoder(policy, verifier, longest, monitor=monitor, widths=widths, **options)
    check_parts(decoder.parts, params)


def test_by_sampling(
    decoder: Decoder,
    params: ModelParams,
    prompt: Sequence[int] = (0, 1),
    *,
    warp: Mapping[str, Any] | None = None,
    tokens: int = 4,
    sequences: int = 40_960,
    batch: int | None = None,
    seed: int = 0,
    branching: int = 8,
    joint: int = JOINT_TOKENS,
    against: np.ndarray | None = None,
    source: Sequence[int] | None = None,
    progress: Callable[[int], Any] = lambda done: None,
    **strategies: Any,
) -> SampledReport:
    """Draw sequences with the whole decoder and test their first `tokens` tokens against the target's distribution.

    The joint test uses the first `joint` of them. Its cells form a tree: after each of the `branching` most probable
    prefixes of a length, its `branching` most probable next tokens and the rest; cells with expected counts below five
    are pooled. On a toy these are all sequences. The test by position bins every token by its rank in the target's
    conditional distribution, in small vocabularies by the token and the previous token.

    Args:
        params: in float32 for real models, with `jax_default_matmul_precision="highest"`.
        warp: arguments of `make_warp`; default: temperature 1.
        batch: sequences decoded at a time; None: limits the distributions of a round to 256 MB.
        seed: sequence i has seed `(seed + i) * SPREAD`, of 32 bits.
        against: [V] * tokens, a joint distribution to test against instead of the target's, such as a lossy verifier's.
        source: source of every sequence, for a target with an encoder.
        progress: called after each batch with the number of sequences.
        strategies: `policy`, `verifier` and `monitor` of the decoder with other hyperparameters.
    """
    numbers = {"temperature": 1.0} if warp is None else dict(warp)
    target, longest = decoder.parts.target, decoder.parts.drafter.max_draft_length
    target = target if source is None else with_source(target, source)
    if batch is None:
        batch = max(1, min(4096, sequences, 2**26 // (target.spec.vocab_size * (longest + 1))))
    joint = min(joint, tokens)
    if against is None:
        cells = _cells(target, params.target, prompt, numbers, joint, branching)
    else:
        cells, joint = {(text, False): float(chance) for text, chance in np.ndenumerate(against)}, tokens
    observed = dict.fromkeys(cells, 0)
    positions = None if against is not None else Positions(target, params.target, len(prompt), tokens)
    drafted, done = np.zeros(longest, np.int64), 0
    while done < sequences:
        count = min(batch, sequences - done)
        state = decoder.prefill(
            params,
            [list(prompt)] * batch,
            max_new_tokens=[tokens + longest] * count + [0] * (batch - count),
            seed=(np.arange(batch, dtype=np.uint64) + (seed + done)) * SPREAD % 2**32,
            warp=make_warp(batch, **numbers),
            **strategies,
            sources=None if source is None else [list(source)] * batch,
            stop_ids=(),
        )
        state = decoder.run(params, state)
        texts = np.asarray(state.tokens)[:count, : len(prompt) + tokens]
        drafted += np.asarray(state.statistics.drafted_at).sum(axis=0)
        for text, times in zip(
            *np.unique(texts[:, len(prompt) : len(prompt) + joint], axis=0, return_counts=True), strict=True
        ):
            prefix = tuple(text.tolist())
            while (prefix, False) not in cells and (prefix, True) not in cells:
                prefix = prefix[:-1]
            observed[prefix, (prefix, True) in cells] += int(times)
        if positions is not None:
            positions.add(texts, make_warp(count, **numbers))
        done += count
        progress(done)
    counts, expected = np.array(list(observed.values())), np.array(list(cells.values())) * done
    statistic, degrees, p_value = chi_square(counts, expected)
    by_position = () if positions is None else positions.by_stretch(1)
    sizes = done, tokens, degrees + 1
    report = SampledReport(statistic, degrees, p_value, *sizes, True, by_position, tuple(drafted.tolist()))
    lossless = p_value >= FALSE_ALARM and report.least >= FALSE_ALARM
    wrong = None if lossless else _wrong_cell(cells, observed, tuple(prompt), numbers)
    return report._replace(lossless=lossless, counterexample=wrong)


test_by_sampling.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for its own

Cell = tuple[tuple[int, ...], bool]  # a prefix, and whether the cell is the rest of its continuations


def _cells(
    target: LanguageModel, params: Params, prompt: Sequence[int], warp: Mapping[str, Any], tokens: int, branching: int
) -> dict[Cell, float]:
    """A partition of all sequences of `tokens` tokens, with the target's exact probabilities."""

    def last_distribution(params: Params, tokens: jax.Array) -> jax.Array:
        cache = target.init_cache(params, 1, tokens.shape[1])
        logits, _ = target.apply(params, tokens, cache)
        return distribution(logits[:, -1], make_warp(1, **warp)).log_prob[0]

    compiled = jax.jit(last_distribution)
    cells: dict[Cell, float] = {((), False): 1.0}
    for depth in range(tokens):
        open_cells = [cell for cell in cells if len(cell[0]) == depth and not cell[1]]
        open_cells = sorted(open_cells, key=lambda cell: -cells[cell])[: branching**2]
        for prefix, _ in open_cells:
            row = np.exp(np.asarray(compiled(params, np.array([[*prompt, *prefix]], np.int32)), np.float64))
            row, mass = row / row.sum(), cells.pop((prefix, False))
            likeliest = np.argsort(-row, kind="stable")[:branching]
            cells |= {((*prefix, int(token)), False): mass * row[token] for token in likeliest}
            cells[prefix, True] = mass * max(0.0, 1.0 - row[likeliest].sum())
    return cells


def _wrong_cell(
    cells: Mapping[Cell, float], observed: Mapping[Cell, int], prompt: tuple[int, ...], warp: Mapping[str, Any]
) -> Counterexample | None:
    """The shortest text whose frequency is off by more than four standard deviations, or None."""
    longest = max(len(prefix) for prefix, _ in cells)
    for length in range(1, longest + 1):
        chance: dict[tuple[int, ...], float] = {}
        times: dict[tuple[int, ...], int] = {}
        for (prefix, others), share in cells.items():
            for part in {prefix[:length], prefix[: length - 1]} if len(prefix) >= length else {prefix}:
                chance[part] = chance.get(part, 0.0) + share
                times[part] = times.get(part, 0) + observed[prefix, others]
        wrong, worst = None, 4.0
        for text in (text for text in chance if len(text) == length and times.get(text[:-1], 0)):
            expected, tried = chance[text] / chance[text[:-1]], times[text[:-1]]
            off = abs(times[text] - tried * expected) / max(np.sqrt(tried * expected * (1 - expected)), 1e-9)
            if off > worst:
                wrong, worst = (text, times[text] / tried, expected), off
        if wrong is not None:
            return Counterexample("samples", prompt, warp, *wrong, sampled=True)
    return None


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int, float]:
    """Pearson's statistic, its degrees of freedom and p-value, for counts by cell [N].

    Cells with expected counts below five are pooled; an observation in an impossible cell gives the p-value 0.
    """
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
    return statistic, degrees, 0.0 if impossible else p_value


class Positions:
    """Sums of observed minus expected counts by position, group and bin, and their covariance.

    Given the text before it a lossless decoder's token has the target's conditional distribution, so the differences
    are uncorrelated from position to position, and a position's sum over its covariance is chi-square distributed.
    """

    def __init__(self, target: LanguageModel, params: Params, prompt_length: int, tokens: int) -> None:
        self.params, self.prompt_length, self.tokens = params, prompt_length, tokens
        vocab = target.spec.vocab_size
        self.listed = vocab <= LISTED
        bins, groups = (vocab, vocab) if self.listed else (len(RANKS) + 1, 1)
        self.excess = np.zeros((tokens, groups, bins))
        self.covariance = np.zeros((tokens, groups, bins, bins))
        self.impossible = False
        self.rows = max(1, min(4096, 2**24 // vocab // tokens))
        self.binned = partial(_binned, target, self.listed, prompt_length)

    def add(self, texts: np.ndarray, warp: Warp, emitted: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Counts texts [N, prompt_length + tokens] of which `emitted` [N] tokens count (None: all), by warps [N].

        Returns the differences [N, T, bins] and the expected counts, zero beyond a text's end.
        """
        every = np.full(len(texts), self.tokens) if emitted is None else emitted
        each, size = [], min(self.rows, len(texts))
        for first in range(0, len(texts), size):
            index = np.minimum(np.arange(first, first + size), len(texts) - 1)
            chance, group, bins = map(np.asarray, self.binned(self.params, texts[index], take_rows(warp, index)))
            count = min(size, len(texts) - first)
            chance, inside = chance[:count].astype(np.float64), np.arange(self.tokens) < every[index[:count], None]
            chance /= chance.sum(axis=-1, keepdims=True)
            hit = np.eye(chance.shape[-1])[bins[:count]]
            self.impossible |= bool(np.any(inside & ((chance * hit).sum(axis=-1) <= 0)))
            for group_index in range(self.excess.shape[1]):
                mine = ((group[:count] == group_index) & inside)[..., None]
                p = np.where(mine, chance, 0.0)  # [N, T, bins]
                self.excess[:, group_index] += np.sum(np.where(mine, hit, 0.0) - p, axis=0)
                self.covariance[:, group_index] -= np.einsum("ntc,ntd->tcd", p, p)
                self.covariance[:, group_index] += np.eye(p.shape[-1]) * p.sum(axis=0)[:, :, None]
            each.append((np.where(inside[..., None], hit - chance, 0.0), np.where(inside[..., None], chance, 0.0)))
        return joined(each)

    def by_stretch(self, size: int) -> tuple[float, ...]:
        """The joint p-value of every `size` positions; bins with expected counts below five are pooled."""
        return tuple(self._p_value(slice(first, first + size)) for first in range(0, self.tokens, size))

    def _p_value(self, stretch: slice) -> float:
        if self.impossible:
            return 0.0
        statistic, degrees = 0.0, 0
        sums = self.excess[stretch].sum(axis=0), self.covariance[stretch].sum(axis=0)
        for excess, covariance in zip(*sums, strict=True):
            used = np.flatnonzero(np.diag(covariance) >= 5.0)[1:]  # the most probable bin follows from the others
            if len(used) == 0:
                continue
            part = covariance[np.ix_(used, used)]
            statistic += float(excess[used] @ np.linalg.pinv(part, rcond=1e-9, hermitian=True) @ excess[used])
            degrees += int(np.linalg.matrix_rank(part, rtol=1e-9, hermitian=True))
        return float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0


@partial(jax.jit, static_argnums=(0, 1, 2))
def _binned(
    target: LanguageModel, listed: bool, prompt_length: int, params: Params, texts: Array, warp: Warp
) -> tuple[Array, Array, Array]:
    """(chance [B, T, bins] under the target, group [B, T], bin of the text's token [B, T]) after the prompt."""
    batch, length = texts.shape
    logits, _ = target.apply(params, texts, target.init_cache(params, batch, length))
    prob = jnp.exp(distributions(logits[:, prompt_length - 1 : -1], warp).log_prob)
    token = texts[:, prompt_length:]
    if listed:
        return prob, texts[:, prompt_length - 1 : -1], token
    text_prob = jnp.take_along_axis(prob, token[..., None], axis=2)
    index = jnp.arange(prob.shape[-1], dtype=jnp.int32)[None, None, :]
    before = (prob > text_prob) | ((prob == text_prob) & (index < token[..., None]))
    rank = jnp.sum(before, axis=-1, dtype=jnp.int32)
    reached = jnp.cumsum(jax.lax.top_k(prob, min(RANKS[-1], prob.shape[-1]))[0], axis=-1)
    reached = [reached[..., min(bound, prob.shape[-1]) - 1] for bound in RANKS]
    edges = jnp.stack([jnp.zeros_like(reached[0]), *reached, jnp.ones_like(reached[0])], axis=-1)
    chance = jnp.maximum(jnp.diff(edges, axis=-1), 0.0)
    bin_of_token = sum((rank >= bound).astype(jnp.int32) for bound in RANKS)
    return chance, jnp.zeros_like(token), jnp.asarray(bin_of_token)
