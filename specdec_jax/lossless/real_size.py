"""A verifier in float32 at the size of real vocabularies: every outcome of two drafts, summed in float64.

The other enumerations use toys in float64, which do not reveal errors in guards against 0/0 or arithmetic in bfloat16.
The drafter draws from six tokens, the target from 49,152, so that all drafts can be enumerated.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.sampling import distribution, make_warp
from specdec_jax.lossless.counterexample import Counterexample
from specdec_jax.lossless.exact import monitor_for, warps_for
from specdec_jax.stopping.static import static
from specdec_jax.types import Array, Distribution, Draft, Monitor, RoundContext, Verifier

VOCABULARY, FEW, DRAFTS = 49_152, 6, 2
ROUNDING = 1e-5  # maximum total variation by rounding in float32; correct verifiers have 3e-8
REAL_WARPS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.0},
)


class RealSizeReport(NamedTuple):
    """The worst total variation of a round's tokens from the target's."""

    total_variation: float
    truncated: float  # the largest probability of a token that the warp excludes
    vocab_size: int
    lossless: bool  # below ROUNDING, and no excluded tokens
    counterexample: Counterexample | None = None


def prove_real_size(
    verifier: Verifier, *, monitor: Monitor | None = None, vocab_size: int = VOCABULARY
) -> RealSizeReport:
    """One round of two drafts in float32, of `vocab_size` tokens, at temperature 1, with truncations, and greedily."""
    monitor = monitor or monitor_for(static(), verifier)
    target, drafter, drafts = _models(vocab_size)
    worst, truncated, wrong = 0.0, 0.0, None
    outcomes = jax.jit(lambda *arguments: _outcomes(verifier, monitor, *arguments))
    for warp in warps_for(verifier, REAL_WARPS):
        numbers = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **warp}
        outcome = outcomes(target, drafter, drafts, make_warp(FEW**DRAFTS, **numbers))
        p, q, lengths, following = jax.tree.map(np.asarray, outcome)
        error, outside, example = _compared(p, q, lengths, following, drafts)
        worst, truncated = max(worst, error), max(truncated, outside)
        if wrong is None and example is not None and not (error < ROUNDING and outside == 0):
            tokens, probability, expected = example
            draft = tuple(map(int, drafts[np.argmax(drafts[:, 0] == tokens[0])]))
            name = f"float32, {vocab_size:,} tokens"
            wrong = Counterexample(name, (), warp, tokens, len(tokens), probability, expected, draft)
    return RealSizeReport(worst, truncated, vocab_size, worst < ROUNDING and truncated == 0, wrong)


def _models(vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits of the target [1 + FEW + 1, V] before any draft, after each first one, and after both; of the drafter
    [2, FEW]; all drafts [FEW ** 2, 2] int32).

    Four of the drafter's tokens are among the target's most probable ones, two are not.
    """
    rng = np.random.default_rng(0)
    target = 3 * rng.normal(size=(FEW + 2, vocab_size)).astype(np.float32)
    likely = np.argsort(-target[0])[: 4 * FEW]
    tokens = np.concatenate([rng.choice(likely, FEW - 2, False), rng.choice(vocab_size, 2, False)])
    target[1 : 1 + FEW, tokens[: FEW - 2]] += 8  # likely after each other too
    drafts = np.stack(np.meshgrid(tokens, tokens, indexing="ij"), axis=-1).reshape(-1, DRAFTS).astype(np.int32)
    return target, rng.normal(size=(DRAFTS, FEW)).astype(np.float32), drafts


def _outcomes(
    verifier: Verifier, monitor: Monitor, target: Array, drafter: Array, drafts: Array, warp: Any
) -> tuple[Array, Array, Array, Array]:
    """(log p [R, 3, V], log q [R, 2, V], log P(k accepted) [R, 3], next-token weights [R, 3, V]) of R drafts."""
    rows, vocab = FEW**DRAFTS, target.shape[1]
    first = jnp.arange(rows, dtype=jnp.int32) // FEW
    places = jnp.stack([jnp.zeros_like(first), 1 + first, jnp.full_like(first, FEW + 1)], axis=1)  # [R, 3]
    each: list[Distribution] = [distribution(target[places[:, k]], warp) for k in range(DRAFTS + 1)]
    p = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *each)
    spread = jnp.full((DRAFTS, vocab), -jnp.inf, jnp.float32).at[:, drafts[::FEW, 0]].set(drafter)
    q = jnp.stack([distribution(jnp.tile(row, (rows, 1)), warp).log_prob for row in spread], axis=1)
    draft = Draft(
        drafts, q if verifier.needs_log_q else None, jnp.zeros(drafts.shape, bool), jnp.full_like(first, DRAFTS)
    )
    ones, zero = jnp.ones_like(first), jnp.zeros_like(first)
    state, watched = jax.tree.map(jnp.asarray, (verifier.init(rows), monitor.init(rows)))
    context = RoundContext(ones + 1, zero, ones + 1, ones > 0, zero.astype(jnp.uint32), warp, watched)
    lengths, next_distribution, _ = verifier.verify(state, draft, p, context)
    following = [next_distribution(jnp.full_like(first, k)) for k in range(DRAFTS + 1)]
    return p.log_prob, q, lengths, jnp.stack(following, axis=1)


def _compared(
    log_p: np.ndarray, log_q: np.ndarray, lengths: np.ndarray, following: np.ndarray, drafts: np.ndarray
) -> tuple[float, float, tuple[tuple[int, ...], float, float] | None]:
    """(total variation, the largest probability of an excluded token, the token with the largest error)."""
    p, q, length, rest = (_normalised(part) for part in (np.exp(log_p), np.exp(log_q), np.exp(lengths), following))
    first, second = drafts[:, 0], drafts[:, 1]
    rows = np.arange(len(drafts))
    chance = q[rows, 0, first] * q[rows, 1, second]  # [R]
    length, emitted = chance[:, None] * length, np.zeros((1 + FEW, p.shape[2]))
    emitted[0] = length[:, 0] @ rest[:, 0]
    np.add.at(emitted[0], first, length[:, 1:].sum(axis=1))
    goals = np.zeros_like(emitted)
    goals[0] = p[0, 0]
    for index, token in enumerate(first[::FEW]):  # texts that begin with it, whether drafted or not
        mine = rows // FEW == index
        others = (length[:, 0] * rest[:, 0, token]).sum()
        emitted[1 + index] = length[mine, 1] @ rest[mine, 1] + others * p[mine][0, 1]
        np.add.at(emitted[1 + index], second[mine], length[mine, 2])
        goals[1 + index] = goals[0][token] * p[mine][0, 1]
    last = 0.5 * length[:, 2] @ np.abs(rest[:, 2] - p[:, 2]).sum(axis=1)
    distances = [0.5 * np.abs(emitted[0] - goals[0]).sum(), 0.5 * np.abs(emitted[1:] - goals[1:]).sum(), last]
    error = float(np.max(distances)) if np.all(np.isfinite(distances)) else np.inf
    ruled_out = float(np.max(np.where(goals[:1] == 0, emitted[:1], 0.0)))
    ruled_out = max(ruled_out, float(np.max(np.where(p == 0, length[:, :, None] * rest, 0.0))))
    if not np.isfinite(error):
        return np.inf, ruled_out, None
    row, token = np.unravel_index(np.argmax(np.abs(emitted - goals) * (np.arange(1 + FEW) == 0)[:, None]), goals.shape)
    if distances[0] < ROUNDING and ruled_out == 0:
        row, token = np.unravel_index(np.argmax(np.abs(emitted - goals)), goals.shape)
    before = 1.0 if row == 0 else goals[0][first[(row - 1) * FEW]]
    tokens = (int(token),) if row == 0 else (int(first[(row - 1) * FEW]), int(token))
    return error, ruled_out, (tokens, float(emitted[row, token] / before), float(goals[row, token] / before))


def _normalised(weights: np.ndarray) -> np.ndarray:
    """Weights as in `sampling.draw`: non-negative, with sum 1."""
    weights = np.maximum(weights.astype(np.float64), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return np.divide(weights, total, where=total > 0, out=np.zeros_like(weights))
