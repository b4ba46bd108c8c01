"""A verifier in float32 at the sizes of real vocabularies, against float64: every outcome of up to two drafts.

Toys do not reveal guards against 0/0 that add up, arithmetic in bfloat16, or what concerns one token of a vocabulary.
The drafter draws from a few tokens (the tested function's constants, both ends of the vocabulary, any), the target from
all, so that all drafts can be enumerated.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.sampling import distribution
from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import take_rows
from specdec_jax.lossless.drawing import Drawing
from specdec_jax.lossless.enumeration import monitor_for
from specdec_jax.lossless.results import Counterexample, Result, shown_warp
from specdec_jax.types import Array, Distribution, Draft, Monitor, RoundContext, Verifier, Warp

VOCABULARIES = (49_152, 151_936, 262_144)  # SmolLM2, Qwen2.5, Gemma 3
FEW, DRAFTS = 3, 2  # tokens of the drafter, and drafts of the round
KINDS = ((False, 2), (True, 2), (False, 1), (True, 1))  # whether drafts are chosen (one-hot), and how many there are
WARPS = 3
ROUNDING = 1e-5  # maximum total variation by rounding in float32; correct verifiers have 1e-6


def prove_real_size(
    verifier: Verifier, drawing: Drawing, vocab_size: int, *, monitor: Monitor | None = None, warps: int = WARPS
) -> Result:
    """All rounds of drafts of the FEW tokens that are drawn for each of the `warps` requests, of all KINDS.

    Of chosen drafts there is one per request and kind. An emitted token that the warp excludes makes the total
    variation infinite.
    """
    monitor, rng, several = monitor or monitor_for(None, verifier), drawing.rng, FEW**DRAFTS
    warp = drawing.warps(warps, verifier.greedy_only, vocab_size)
    warp = warp._replace(top_p=np.where(rng.uniform(size=warps) < 0.5, np.float32(1), warp.top_p))
    tokens = np.stack([drawing.tokens(vocab_size, FEW) for _ in range(warps)])  # [W, FEW]
    # logits [W, FEW + 2, V]: before any draft, after each first one, after both
    target = 3 * rng.standard_normal((warps, FEW + 2, vocab_size), np.float32)
    likely = np.where(rng.uniform(size=(warps, FEW + 2, FEW)) < 0.8, rng.uniform(12, 20, (warps, FEW + 2, FEW)), 0)
    target[np.arange(warps)[:, None, None], np.arange(FEW + 2)[:, None], tokens[:, None]] += likely.astype(np.float32)
    spread = np.full((warps, DRAFTS, vocab_size), -np.inf, np.float32)
    spread[np.arange(warps)[:, None, None], np.arange(DRAFTS)[:, None], tokens[:, None]] = 2 * rng.standard_normal(
        (warps, DRAFTS, FEW), np.float32
    )
    choices = np.stack(np.meshgrid(range(FEW), range(FEW), indexing="ij"), axis=-1).reshape(-1, DRAFTS)
    worst, wrong, num_rounds = 0.0, None, 0
    outcomes = jax.jit(lambda *arguments: _outcomes(verifier, monitor, *arguments))
    for each, (chosen, length) in [(each, kind) for each in range(warps) for kind in KINDS]:
        here = take_rows(warp, np.full(several, each))
        drafts = tokens[each][choices].astype(np.int32)
        one_hot, size = host(np.full(drafts.shape, chosen)), host(np.full(several, length, np.int32))
        draft = Draft(drafts, None, one_hot, size)
        log_p, log_q, lengths, rest = map(
            np.asarray, outcomes(target[each], spread[each], draft, choices[:, 0].astype(np.int32), here)
        )
        temperature = float(warp.temperature[each])
        support = [log_p[0, 0], *log_p[::FEW, 1], log_p[0, 2]]
        p = [_in_float64(target[each][k], support[k], temperature) for k in range(FEW + 2)]
        q = [_in_float64(spread[each][k], log_q[0, k], temperature) for k in range(DRAFTS)]
        chance = q[0][drafts[:, 0]] * (q[1][drafts[:, 1]] if length == 2 else choices[:, 1] == 0)
        if chosen:
            chance = (np.arange(several) == rng.integers(several)).astype(np.float64)
        error, example = _compared(np.stack(p), chance, np.exp(lengths), rest, drafts, choices)
        worst, num_rounds = max(worst, error), num_rounds + int(np.sum(chance > 0))
        if wrong is None and not error < ROUNDING:
            text = example[0]
            likely_drafts = np.where(drafts[:, 0] == text[0], 1 + chance, chance)  # those that begin with the text
            shown = tuple(map(int, drafts[np.argmax(likely_drafts * (chance > 0))][:length]))
            name = f"float32, {vocab_size:,} tokens"
            wrong = Counterexample(name, (), shown_warp(warp, each), text, *example[1:], draft=shown)
    return Result(worst, {"rounds": num_rounds}, counterexample=wrong)


def _outcomes(
    verifier: Verifier, monitor: Monitor, target: Array, spread: Array, draft: Draft, first: Array, warp: Warp
) -> tuple[Array, Array, Array, Array]:
    """(log p [R, 3, V], log q [R, 2, V], log P(k accepted) [R, 3], next-token weights [R, 3, V]) of R drafts.

    `first` [R] is the index of each first draft among the FEW tokens; `draft` has no `log_q` yet.
    """
    rows = len(first)
    places = jnp.stack([jnp.zeros_like(first), 1 + first, jnp.full_like(first, FEW + 1)], axis=1)
    each: list[Distribution] = [distribution(target[places[:, k]], warp) for k in range(DRAFTS + 1)]
    p = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *each)
    q = jnp.stack([distribution(jnp.tile(row, (rows, 1)), warp).log_prob for row in spread], axis=1)
    draft = draft._replace(log_q=q if verifier.needs_log_q else None)
    ones, zero = jnp.ones_like(first), jnp.zeros_like(first)
    state, watched = jax.tree.map(jnp.asarray, (verifier.init(rows), monitor.init(rows)))
    context = RoundContext(ones + 1, zero, ones + 1, ones > 0, zero.astype(jnp.uint32), warp, watched)
    lengths, next_distribution, _ = verifier.verify(state, draft, p, context)
    following = [next_distribution(jnp.full_like(first, k)) for k in range(DRAFTS + 1)]
    return p.log_prob, q, lengths, jnp.stack(following, axis=1)


def _in_float64(logits: np.ndarray, log_prob: np.ndarray, temperature: float) -> np.ndarray:
    """The distribution [V] float64 of logits at a temperature, of the tokens that the warp left in `log_prob`."""
    allowed = log_prob > -np.inf
    scores = logits.astype(np.float64) / (temperature or 1.0)
    weights = np.where(allowed, np.exp(scores - scores[allowed].max(), where=allowed, out=np.zeros_like(scores)), 0.0)
    return weights / weights.sum()


def _compared(
    p: np.ndarray, chance: np.ndarray, lengths: np.ndarray, rest: np.ndarray, drafts: np.ndarray, choices: np.ndarray
) -> tuple[float, tuple[tuple[int, ...], float, float]]:
    """(total variation, the token with the largest error): of the first token, the second given each first, the third.

    p [FEW + 2, V] float64, the probability `chance` [R] of each draft, lengths [R, 3], rest [R, 3, V].
    """
    possible = chance > 0
    chance, lengths, rest, drafts, choices = (each[possible] for each in (chance, lengths, rest, drafts, choices))
    rest = np.maximum(rest.astype(np.float64), 0.0)
    rest /= np.maximum(rest.sum(axis=-1, keepdims=True), 1e-300)
    lengths = lengths.astype(np.float64) / lengths.sum(axis=-1, keepdims=True, dtype=np.float64)
    emitted = (chance * lengths[:, 0]) @ rest[:, 0]
    np.add.at(emitted, drafts[:, 0], chance * lengths[:, 1:].sum(axis=1))
    results: list[tuple[tuple[int, ...], np.ndarray, np.ndarray]] = [((), emitted, p[0])]
    for index in range(FEW):
        rows = np.flatnonzero(choices[:, 0] == index)
        mass = chance[rows] * lengths[rows, 1:].sum(axis=1)
        if mass.sum() <= 1e-12 * max(chance[rows].sum(), 1e-300):
            continue
        token = int(drafts[rows[0], 0])
        second = (chance[rows] * lengths[rows, 1]) @ rest[rows, 1]
        np.add.at(second, drafts[rows, 1], chance[rows] * lengths[rows, 2])
        results.append(((token,), second / mass.sum(), p[1 + index]))
        results += [(tuple(map(int, drafts[r])), rest[r, 2], p[FEW + 1]) for r in rows if lengths[r, 2] * chance[r] > 0]
    errors = []
    for before, probability, goal in results:
        error = 0.5 * float(np.abs(probability - goal).sum())
        leak = float(np.max(np.where(goal == 0, probability, 0.0)))
        errors.append(np.inf if leak > 1e-9 or not np.isfinite(error) else error)
        largest = int(np.argmax(np.nan_to_num(np.abs(probability - goal), nan=np.inf)))
        if errors[-1] == max(errors):
            example = (*before, largest), float(probability[largest]), float(goal[largest])
    return max(errors), example
