"""The state of an enumeration between rounds, and the arguments of policies and verifiers derived from it."""

from typing import Any, NamedTuple

import numpy as np

from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import Neighbours, take
from specdec_jax.lossless.results import Coverage
from specdec_jax.types import Distribution, Draft, Monitor, RoundContext, StoppingPolicy, Verifier, Warp

DRAWN, CHOSEN, EVEN, ODD = 0, 1, 2, 3  # which drafts of a request are chosen: none, all, every second one


class Requests(NamedTuple):
    """What differs from request to request; leaves are numpy, [R, ...]."""

    warp: Warp
    kind: np.ndarray  # int8, DRAWN, CHOSEN, EVEN or ODD
    limit: np.ndarray  # int32, tokens to emit in the enumerated rounds
    before: np.ndarray  # int32, tokens emitted before them
    seed: np.ndarray  # uint32, policy_seed
    prompt: np.ndarray  # int32, tokens of the prompt


class Setting(NamedTuple):
    """The constants of an enumeration."""

    policy: StoppingPolicy | None  # None: drafts end at random
    verifier: Verifier
    monitor: Monitor
    requests: Requests
    drafter_distributions: Distribution
    # every leaf [R * D * C * V * V, ...], by request, index of the draft (D is K, or 1 without effect), token whose
    # hidden state was read at the beginning of the round (C is V, or 1), and the last two tokens
    target_distributions: Distribution  # every leaf [R * V * V, ...], by request and the last two tokens
    longest: int  # K
    batch: int  # rows per call of policy and verifier
    tokens: int  # emitted tokens that are kept
    tally: Coverage
    siblings: np.ndarray  # [K+1], by draft the sum of the probabilities that a sibling of it is accepted
    neighbours: Neighbours

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target_distributions.log_prob.shape[-1]


class Nodes(NamedTuple):
    """Rows at the beginning of a round: texts with their probabilities. Leaves are numpy, [N, ...]."""

    tokens: np.ndarray  # [N, 2 + tokens] int32, the prompt and the emitted tokens
    request: np.ndarray  # [N] int64, index in `Setting.requests`
    emitted: np.ndarray  # [N] int32
    chance: np.ndarray  # [N] float64
    policy: Any
    verifier: Any
    monitor: Any


class Branches(NamedTuple):
    """Drafts of one round. Leaves are [M, ...]."""

    node: np.ndarray  # [M] index of its node
    request: np.ndarray  # [M] int64
    text: np.ndarray  # [M, 2 + K] int32, the last two tokens and the draft
    log_q: np.ndarray  # [M, K, V]
    drafted: np.ndarray  # [M] int32
    chance: np.ndarray  # [M] float64, probability of node and draft
    policy: Any


def drawn_distribution(weights: np.ndarray) -> np.ndarray:
    """The distribution of `sampling.draw` for weights [..., V] of any sign and sum (V at most its block size)."""
    weights = np.asarray(weights, np.float64)
    vocab = weights.shape[-1]
    positive, total = weights > 0, weights.sum(axis=-1, keepdims=True)
    if np.all(weights >= 0) and np.all(total > 0):  # without cancellation
        return weights / total
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
    request = take(setting.requests, nodes.request)
    budget = np.clip(request.limit - nodes.emitted - 1, 0, setting.longest).astype(np.int32)
    emitted, alive = (request.before + nodes.emitted).astype(np.int32), host(np.ones(len(budget), bool))
    length = (request.prompt + emitted).astype(np.int32)
    return RoundContext(length, emitted, budget, alive, request.seed, request.warp, nodes.monitor)


def verify_arguments(
    setting: Setting, nodes: Nodes, branches: Branches, draft: Draft
) -> tuple[RoundContext, Any, Draft, Distribution]:
    """The arguments of the verifier."""
    vocab, longest = setting.vocab_size, setting.longest
    pairs = np.stack([pair(branches.text[:, k : k + 2], vocab) for k in range(longest + 1)], axis=1)
    distributions = take(setting.target_distributions, branches.request[:, None] * vocab**2 + pairs)
    context = take(context_of(setting, nodes), branches.node)
    return context, take(nodes.verifier, branches.node), draft, distributions


def draft_of(setting: Setting, branches: Branches) -> Draft:
    """Branches as a Draft of the decoder, which has no distributions where a row's drafts are all chosen."""
    one_hot, log_q = chosen_at(setting, branches), None
    if setting.verifier.needs_log_q and np.any(setting.requests.kind != CHOSEN):
        log_q = host(np.where(one_hot.all(axis=1)[:, None, None], -np.inf, branches.log_q).astype(branches.log_q.dtype))
    drafts = host(np.ascontiguousarray(branches.text[:, 2:]))
    return Draft(tokens=drafts, log_q=log_q, one_hot=host(one_hot), length=host(branches.drafted))


def chosen_at(setting: Setting, branches: Branches) -> np.ndarray:
    """Which drafts the drafter chose, [M, K] bool."""
    kind, step = setting.requests.kind[branches.request][:, None], np.arange(setting.longest)[None, :]
    return (kind == CHOSEN) | ((kind == EVEN) & (step % 2 == 0)) | ((kind == ODD) & (step % 2 == 1))


def drafter_place(setting: Setting, branches: Branches, step: Any) -> np.ndarray:
    """The index [M] in `drafter_distributions` of draft `step`, by all but the last two tokens; times V ** 2."""
    vocab = setting.vocab_size
    per_request = len(setting.drafter_distributions.log_prob) // len(setting.requests.kind) // vocab**2
    place = branches.request * per_request
    return (place if per_request == 1 else place + step * vocab + branches.text[:, 0]) * vocab**2


def pair(last_two: np.ndarray, vocab: int) -> np.ndarray:
    """The index [M] of the last two tokens [M, 2] in a toy's table."""
    return last_two[:, 0].astype(np.int64) * vocab + last_two[:, 1]
