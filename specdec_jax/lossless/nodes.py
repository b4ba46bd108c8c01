"""What an enumeration carries from round to round, and what policy, verifier and drafter are told of it."""

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
    """What stays the same through one enumeration."""

    policy: StoppingPolicy
    verifier: Verifier
    monitor: Monitor
    drafter_distributions: Distribution
    # every leaf [toys * K * V * V * V, ...], by toy, number of the draft, token whose hidden state was read when the
    # round began, and the last two tokens
    target_distributions: Distribution  # every leaf [toys * V * V, ...], by toy and the last two tokens
    warp: Mapping[str, Any]
    most: int  # K
    tokens: int  # emitted tokens whose joint distribution is compared
    limit: int  # max_new_tokens
    batch: int  # rows that policy and verifier see at a time
    chosen: bool
    tally: Tally  # what was asked and answered, counted as it happens


class Nodes(NamedTuple):
    """Rows at the beginning of a round: all that can happen, with its probability. Leaves are numpy, [N, ...]."""

    tokens: np.ndarray  # [N, 2 + tokens] int32, the prompt and what was emitted
    table: np.ndarray  # [N] int64, where its toy begins in the tables of distributions
    emitted: np.ndarray  # [N] int32
    chance: np.ndarray  # [N] float64
    policy: Any
    verifier: Any
    monitor: Any


class Branches(NamedTuple):
    """Drafts of one round. Leaves are [M, ...]."""

    node: np.ndarray  # [M] where it began
    table: np.ndarray  # [M] int64, of its toy
    text: np.ndarray  # [M, 2 + K] int32, the last two tokens and the draft
    log_q: np.ndarray  # [M, K, V]
    drafted: np.ndarray  # [M] int32
    parent: np.ndarray  # [M, E] int32, of siblings that are expanded
    chance: np.ndarray  # [M] float64, of the node and the draft
    policy: Any


def drawn_distribution(weights: np.ndarray) -> np.ndarray:
    """The distribution of `sampling.draw` for [..., V] weights (V at most one of its blocks) of any sign and sum."""
    vocab = weights.shape[-1]
    positive, total = weights > 0, weights.sum(axis=-1, keepdims=True)
    reached = np.where(positive, np.cumsum(weights, axis=-1), -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):  # what follows an outcome that cannot occur may be no number
        reached = np.clip(np.maximum.accumulate(reached, axis=-1), 0.0, np.maximum(total, 0.0))
        chance = np.diff(reached, axis=-1, prepend=0.0) / total
    last = np.where(positive.any(axis=-1), vocab - 1 - np.argmax(positive[..., ::-1], axis=-1), vocab - 1)
    fallback = np.eye(vocab)[last]
    chance = np.where(total > 0, chance, fallback)
    return chance + fallback * (1.0 - chance.sum(axis=-1, keepdims=True))


def context_of(setting: Setting, nodes: Nodes) -> RoundContext:
    """What the decoder would tell policy and verifier at the beginning of the round."""
    count = len(nodes.emitted)
    warp = jax.tree.map(np.asarray, make_warp(count, **setting.warp))
    room = np.minimum(setting.most, setting.limit - nodes.emitted - 1)
    alive, seed = host(np.ones(count, bool)), host(np.zeros(count, np.uint32))
    emitted, budget = host(nodes.emitted), host(np.maximum(room, 0).astype(np.int32))
    return RoundContext(emitted + 2, emitted, budget, alive, seed, warp, nodes.monitor)


def asked(
    setting: Setting, nodes: Nodes, branches: Branches, draft: Draft
) -> tuple[RoundContext, Any, Draft, Distribution]:
    """What the verifier is told."""
    vocab, most = setting.target_distributions.log_prob.shape[-1], setting.most
    pairs = np.stack([pair(branches.text[:, k : k + 2], vocab) for k in range(most + 1)], axis=1)
    distributions = take(setting.target_distributions, branches.table[:, None] + pairs)
    context = take(context_of(setting, nodes), branches.node)
    return context, take(nodes.verifier, branches.node), draft, distributions


def draft_of(setting: Setting, branches: Branches) -> Draft:
    """Branches as the decoder hands drafts about."""
    drafts = np.ascontiguousarray(branches.text[:, 2:])
    return Draft(
        tokens=host(drafts),
        log_q=host(branches.log_q) if setting.verifier.needs_log_q and not setting.chosen else None,
        one_hot=host(np.full(drafts.shape, setting.chosen)),
        length=host(branches.drafted),
    )


def pair(last_two: np.ndarray, vocab: int) -> np.ndarray:
    """Where the last two tokens [M, 2] stand in a toy's table, [M]."""
    return last_two[:, 0] * vocab + last_two[:, 1]
