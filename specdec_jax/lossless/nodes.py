"""The state of an enumeration between rounds, and the arguments of policies and verifiers derived from it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.decoding.sampling import make_warp
from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import take
from specdec_jax.lossless.coverage import Tally
from specdec_jax.types import Distribution, Draft, Monitor, RoundContext, StoppingPolicy, Verifier


class Setting(NamedTuple):
    """The constants of an enumeration."""

    policy: StoppingPolicy
    verifier: Verifier
    monitor: Monitor
    drafter_distributions: Distribution
    # every leaf [W * toys * K * V * V * V, ...], by warp, toy, index of the draft, token whose hidden state was read at
    # the beginning of the round, and the last two tokens
    target_distributions: Distribution  # every leaf [W * toys * V * V, ...], by warp, toy and the last two tokens
    warp: Mapping[str, Any]  # arguments of `make_warp`, each a number or [W], for rows of W warps in one batch
    longest: int  # K
    tokens: int  # emitted tokens whose joint distribution is compared
    limit: int  # max_new_tokens
    batch: int  # rows per call of policy and verifier
    chosen: bool | None  # whether the drafter chooses its tokens; None: in some rows, and parts of drafts (`chosen_at`)
    tally: Tally  # counts of the policy's decisions


class Nodes(NamedTuple):
    """Rows at the beginning of a round: all possible texts with their probabilities. Leaves are numpy, [N, ...]."""

    tokens: np.ndarray  # [N, 2 + tokens] int32, the prompt and the emitted tokens
    table: np.ndarray  # [N] int64, offset of its warp and toy in the tables of distributions
    emitted: np.ndarray  # [N] int32
    chance: np.ndarray  # [N] float64
    policy: Any
    verifier: Any
    monitor: Any


class Branches(NamedTuple):
    """Drafts of one round. Leaves are [M, ...]."""

    node: np.ndarray  # [M] index of its node
    table: np.ndarray  # [M] int64, offset of its warp and toy
    text: np.ndarray  # [M, 2 + K] int32, the last two tokens and the draft
    log_q: np.ndarray  # [M, K, V]
    drafted: np.ndarray  # [M] int32
    extra: Any  # leaves [M, ...], for drafts that are not chains; else ()
    chance: np.ndarray  # [M] float64, probability of node and draft
    policy: Any


def drawn_distribution(weights: np.ndarray) -> np.ndarray:
    """The distribution of `sampling.draw` for weights [..., V] of any sign and sum (V at most its block size)."""
    vocab = weights.shape[-1]
    positive, total = weights > 0, weights.sum(axis=-1, keepdims=True)
    reached = np.where(positive, np.cumsum(weights, axis=-1), -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):  # impossible outcomes may be followed by NaN
        reached = np.clip(np.maximum.accumulate(reached, axis=-1), 0.0, np.maximum(total, 0.0))
        chance = np.diff(reached, axis=-1, prepend=0.0) / total
    last = np.where(positive.any(axis=-1), vocab - 1 - np.argmax(positive[..., ::-1], axis=-1), vocab - 1)
    fallback = np.eye(vocab)[last]
    chance = np.where(total > 0, chance, fallback)
    return chance + fallback * (1.0 - chance.sum(axis=-1, keepdims=True))


def context_of(setting: Setting, nodes: Nodes) -> RoundContext:
    """The decoder's context for policy and verifier at the beginning of the round."""
    count = len(nodes.emitted)
    warp = jax.tree.map(np.asarray, make_warp(count, **numbers_at(setting, nodes.table)))
    left = np.minimum(setting.longest, setting.limit - nodes.emitted - 1)
    alive, seed = host(np.ones(count, bool)), host(np.zeros(count, np.uint32))
    emitted, budget = host(nodes.emitted), host(np.maximum(left, 0).astype(np.int32))
    return RoundContext(emitted + 2, emitted, budget, alive, seed, warp, nodes.monitor)


def rule_answers(
    setting: Setting, nodes: Nodes, branches: Branches, draft: Draft
) -> tuple[RoundContext, Any, Draft, Distribution]:
    """The arguments of the verifier."""
    vocab, longest = setting.target_distributions.log_prob.shape[-1], setting.longest
    pairs = np.stack([pair(branches.text[:, k : k + 2], vocab) for k in range(longest + 1)], axis=1)
    distributions = take(setting.target_distributions, branches.table[:, None] + pairs)
    context = take(context_of(setting, nodes), branches.node)
    return context, take(nodes.verifier, branches.node), draft, distributions


def draft_of(setting: Setting, branches: Branches) -> Draft:
    """Branches as a Draft of the decoder."""
    drafts, one_hot, log_q = np.ascontiguousarray(branches.text[:, 2:]), chosen_at(setting, branches.text), None
    if setting.verifier.needs_log_q and not setting.chosen:
        chose_all = one_hot.all(axis=1, keepdims=True)[:, :, None]  # `multi_drafter` has no log_q for such rows
        log_q = host(np.where(chose_all & (setting.chosen is None), -np.inf, branches.log_q))
    return Draft(tokens=host(drafts), log_q=log_q, one_hot=host(one_hot), length=host(branches.drafted))


def chosen_at(setting: Setting, text: np.ndarray) -> np.ndarray:
    """Which drafts of texts [M, 2 + K] the drafter chose, [M, K] bool.

    If mixed, the two tokens before the round determine it: all, none, or every second one.
    """
    shape = len(text), setting.longest
    if setting.chosen is not None:
        return np.full(shape, setting.chosen)
    kind, step = text[:, :2].sum(axis=1, keepdims=True) % 4, np.arange(setting.longest)[None, :]
    return (kind == 1) | ((kind > 1) & (step % 2 == kind % 2))


def numbers_at(setting: Setting, table: np.ndarray) -> dict[str, Any]:
    """The arguments of `make_warp` of rows with tables [N]."""
    vocab, warps = setting.target_distributions.log_prob.shape[-1], count_of(setting.warp)
    toys = len(setting.target_distributions.log_prob) // vocab**2 // warps
    index = table // vocab**2 // toys
    return {name: np.asarray(value)[index] if np.ndim(value) else value for name, value in setting.warp.items()}


def count_of(warp: Mapping[str, Any]) -> int:
    """W, the number of warps in the arguments of `make_warp`."""
    return max(np.size(value) for value in warp.values())


def pair(last_two: np.ndarray, vocab: int) -> np.ndarray:
    """The index [M] of the last two tokens [M, 2] in a toy's table."""
    return last_two[:, 0] * vocab + last_two[:, 1]
