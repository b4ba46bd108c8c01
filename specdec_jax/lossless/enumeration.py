"""One round of decoding on a toy model by enumeration: all drafts, all numbers of accepted tokens, all next tokens.

Policy and verifier are called as in the decoder, a batch of rows at a time, and their states are carried from round to
round; only the draft loop (decoding/draft_loop.py) is reimplemented here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import no_monitor
from specdec_jax.decoding.sampling import distribution
from specdec_jax.hyperparameters import host, select_rows
from specdec_jax.lossless.batched import Neighbours, in_batches, joined, take_rows
from specdec_jax.lossless.results import Coverage
from specdec_jax.lossless.toys import FADES, Toy, toy_phases
from specdec_jax.types import (
    Distribution,
    Draft,
    Monitor,
    RoundContext,
    StoppingPolicy,
    VerificationResult,
    Verifier,
    Warp,
)

DRAWN, CHOSEN, EVEN, ODD = 0, 1, 2, 3  # which drafts of a request are chosen: none, all, every second one
PHASES, UNWATCHED = toy_phases(), no_monitor()  # created once, so that compiled functions are reused
TABLE_ROWS = 2048  # rows per call when distributions are computed
PROMPT = np.array([[0, 1]], np.int32)
ENDS = 0.15  # probability that a draft ends at a position, where no policy is tested
_distribution = jax.jit(distribution)


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


def monitor_for(policy: StoppingPolicy | None, verifier: Verifier) -> Monitor:
    """Phases that change with every token if policy or verifier reads phases, else no monitor."""
    return PHASES if verifier.needs_phases or (policy is not None and policy.needs_phases) else UNWATCHED


def distribution_table(logits: np.ndarray, warp: Warp) -> Distribution:
    """Distributions [R * N, ...] of logits [R, N, V] under the requests' warps [R]."""
    requests, each, vocab = logits.shape
    flat, index = logits.reshape(-1, vocab), np.repeat(np.arange(requests), each)
    parts = []
    for first in range(0, len(flat), TABLE_ROWS):
        rows = np.minimum(np.arange(first, first + TABLE_ROWS), len(flat) - 1)
        parts.append(jax.tree.map(np.asarray, _distribution(flat[rows], take_rows(warp, index[rows]))))
    return take_rows(joined(parts), slice(0, len(flat)))


def setting_of(
    policy: StoppingPolicy | None,
    verifier: Verifier,
    monitor: Monitor | None,
    longest: int,
    requests: Requests,
    toys: Sequence[Toy],
    *,
    tokens: int,
    batch: int,
    seed: int = 0,
) -> Setting:
    """The setting of requests with a toy each, whose drafters draft up to `longest` (K) tokens."""
    target = np.stack([toy.target for toy in toys])
    drafter, vocab = np.stack([toy.drafter for toy in toys]), target.shape[-1]
    if any(toy.read is not None for toy in toys):
        nothing = np.zeros((vocab, vocab), drafter.dtype)
        read = np.stack([nothing if toy.read is None else toy.read for toy in toys])
        faded = (FADES ** np.arange(longest))[None, :, None, None] * read[:, None]  # [R, K, V, V]
        drafter = drafter[:, None, None] + faded[:, :, :, None, None].astype(drafter.dtype)
    drafts, goal = (distribution_table(each.reshape(len(toys), -1, vocab), requests.warp) for each in (drafter, target))
    watched = monitor or monitor_for(policy, verifier)
    counts = Coverage.of(longest), np.zeros(longest + 1), Neighbours(seed)
    return Setting(policy, verifier, watched, requests, drafts, goal, longest, batch, tokens, *counts)


def first_nodes(setting: Setting, prompts: np.ndarray = PROMPT, request: Any = 0) -> Nodes:
    """One row per prompt [N, 2] of the requests [N], each with probability 1."""
    count = len(prompts)
    host = functools.partial(jax.tree.map, np.asarray)
    return Nodes(
        tokens=np.pad(prompts, ((0, 0), (0, setting.tokens))).astype(np.int32),
        request=np.broadcast_to(np.asarray(request, np.int64), count),
        emitted=np.zeros(count, np.int32),
        chance=np.ones(count),
        policy=() if setting.policy is None else host(setting.policy.init(count)),
        verifier=host(setting.verifier.init(count)),
        monitor=host(setting.monitor.init(count)),
    )


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
    request = take_rows(setting.requests, nodes.request)
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
    distributions = take_rows(setting.target_distributions, branches.request[:, None] * vocab**2 + pairs)
    context = take_rows(context_of(setting, nodes), branches.node)
    return context, take_rows(nodes.verifier, branches.node), draft, distributions


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


def draft_tree(setting: Setting, nodes: Nodes) -> Branches:
    """All drafts of a round: the counterpart of the draft loop, with all possible draws instead of one."""
    context, watch, tally = context_of(setting, nodes), setting.neighbours, setting.tally
    context = context._replace(relative_drafter_cost=np.ones(len(nodes.emitted), np.float32))

    def at_random(neighbours: Any, context: RoundContext, state: Any, *rest: Any) -> tuple[np.ndarray, Any]:
        """Drafts end before or after a pass; one in thirty rounds drafts nothing."""
        return watch.rng.random(len(context.length)) >= ENDS * (1.0 if rest else 0.2), state

    rules = _Rules(*[at_random] * 4) if setting.policy is None else _rules(setting.policy.bare, setting.batch)
    going, policy = rules.begin(watch, context, nodes.policy)
    ends = nodes.emitted[:, None] + np.arange(2)[None, :]
    vocab, count, longest = setting.vocab_size, len(going), setting.longest
    text = np.full((count, 2 + longest), vocab - 1, np.int32)
    text[:, :2] = np.take_along_axis(nodes.tokens, ends, axis=1)
    log_q = np.full((count, longest, vocab), -np.inf, setting.drafter_distributions.log_prob.dtype)
    log_q[1::2] = -np.log(vocab)  # beyond a draft's end the loop leaves nothing, or distributions of earlier rounds
    none = np.zeros(count, np.int32)
    branches = Branches(np.arange(count), nodes.request, text, log_q, none, nodes.chance, policy)
    has_budget = context.budget > 0
    tally.asks(0, going[has_budget])
    going, finished = going & has_budget, []
    for step in range(longest):
        finished.append(take_rows(branches, ~going))
        branches = take_rows(branches, going)
        here = drafter_place(setting, branches, step) + pair(branches.text[:, step : step + 2], vocab)
        distributions = take_rows(setting.drafter_distributions, here)
        branches.log_q[:, step] = distributions.log_prob
        row = take_rows(context, branches.node)
        draws, policy = rules.check(watch, row, branches.policy, distributions, branches.drafted)
        tally.checks(step, draws)
        branches = branches._replace(policy=policy)
        finished.append(take_rows(branches, ~draws))
        branches, distributions = take_rows(branches, draws), take_rows(distributions, draws)
        prob = np.exp(distributions.log_prob.astype(np.float64))  # [M, V]
        chose = chosen_at(setting, branches)[:, step]
        prob = np.where(chose[:, None], np.eye(vocab)[distributions.top_token], prob)
        prob /= prob.sum(axis=1, keepdims=True)
        parent, token = np.nonzero(prob > 0)  # one branch per possible token
        (branches, distributions), token = take_rows((branches, distributions), parent), token.astype(np.int32)
        branches.text[:, 2 + step] = token
        chance = branches.chance * prob[parent, token]
        branches = branches._replace(drafted=branches.drafted + 1, chance=chance)
        row = take_rows(context, branches.node)
        going, policy = rules.proceed(watch, row, branches.policy, distributions, token, branches.drafted)
        branches = branches._replace(policy=policy)
        has_budget = branches.drafted < row.budget
        tally.asks(step + 1, going[has_budget])
        going = going & has_budget
    return joined([*finished, branches])


class Ends(NamedTuple):
    """All ways in which the rounds of N nodes end: leaves [L, ...]."""

    branch: np.ndarray  # [L] index of its draft
    text: np.ndarray  # [L, W] int32, the emitted tokens
    length: np.ndarray  # [L] int32, their number
    chance: np.ndarray  # [L] float64, probability of node, draft and outcome
    following: Callable[[np.ndarray, np.ndarray], Nodes]
    # (index [I], chance [I]) -> the rows at the beginning of the next round after these ends


def ends_of_round(setting: Setting, nodes: Nodes) -> tuple[Branches, Ends]:
    """All drafts of a round and all ways in which it ends."""
    branches = draft_tree(setting, nodes)
    if setting.policy is not None and setting.policy.tree_hooks is not None:
        return setting.policy.tree_hooks.ends_of_round(setting, nodes, branches)
    verify = _verification(setting.verifier.bare, setting.batch, setting.longest)
    context, *arguments = verify_arguments(setting, nodes, branches, draft_of(setting, branches))
    log_prob_accepted, weights, state = verify(setting.neighbours, context, *arguments)
    lengths = drawn_distribution(np.exp(log_prob_accepted.astype(np.float64)))
    setting.tally.accepts(branches.drafted, lengths)
    chance = branches.chance[:, None, None] * lengths[:, :, None] * drawn_distribution(weights)
    branch, accepted, token = np.nonzero(chance)
    tokens = emitted_tokens(branches, branch, accepted, token)

    def following(index: np.ndarray, probability: np.ndarray) -> Nodes:
        result = VerificationResult(host(tokens[index]), host((accepted[index] + 1).astype(np.int32)))
        _, draft, distributions = arguments
        learnt = take_rows((draft, distributions, state), branch[index])
        return advance(setting, nodes, branches, branch[index], probability, learnt, result, result)

    length = (accepted + 1).astype(np.int32)
    return branches, Ends(branch, tokens, length, chance[branch, accepted, token], following)


def emitted_tokens(branches: Branches, branch: np.ndarray, accepted: np.ndarray, token: np.ndarray) -> np.ndarray:
    """[L, K+1] int32, the accepted drafts of (branch, accepted, token) [L] and the token after them."""
    index = np.arange(branches.text.shape[1] - 1)[None, :]
    drafts = np.pad(branches.text[:, 2:], ((0, 0), (0, 1)))[branch]
    return np.where(index < accepted[:, None], drafts, token[:, None]).astype(np.int32)


def advance(
    setting: Setting,
    nodes: Nodes,
    branches: Branches,
    branch: np.ndarray,
    chance: np.ndarray,
    learnt: tuple[Any, Distribution, Any],
    result: Any,
    emitted: VerificationResult,
) -> Nodes:
    """The rows [I, ...] at the beginning of the next round, from the drafts `branch` [I] with probability `chance`.

    `learnt` are the rows' drafts, the target's distributions and the verifier's state; `result` is the argument of the
    policy's `update`, and `emitted` are the tokens that the round emits.
    """
    draft, distributions, verifier = learnt
    node, watch = branches.node[branch], setting.neighbours
    context, policy = take_rows(context_of(setting, nodes), node), take_rows(branches.policy, branch)
    if setting.policy is not None:
        policy = _rules(setting.policy.bare, setting.batch).update(watch, context, policy, draft, result)
    monitor = context.monitor
    if jax.tree.leaves(monitor):
        # By the drafts only: the toys' monitor reads the distributions at the chain's positions.
        observed = context, monitor, distributions, VerificationResult(*result[:2])
        monitor = _watch(setting.monitor.bare, setting.batch)(watch, *observed)
    tokens, count = nodes.tokens[node].copy(), (nodes.emitted[node] + emitted.length).astype(np.int32)
    for k in range(emitted.tokens.shape[1]):
        place = 2 + nodes.emitted[node] + k
        rows = np.flatnonzero((k < emitted.length) & (place < tokens.shape[1]))
        tokens[rows, place[rows]] = emitted.tokens[rows, k]
    return Nodes(tokens, branches.request[branch], count, chance, policy, verifier, monitor)


class _Rules(NamedTuple):
    begin: Callable[..., Any]
    check: Callable[..., Any]
    proceed: Callable[..., Any]
    update: Callable[..., Any]


@functools.lru_cache(maxsize=64)
def _rules(policy: StoppingPolicy, batch: int) -> _Rules:
    """The policy's functions as called by the draft loop, in batches; finished rows keep their state."""

    def begin(context: RoundContext, state: Any) -> Any:
        go_on, new = policy.begin(state, context)
        return go_on & context.alive, select_rows(context.alive, new, state)

    def check(context: RoundContext, state: Any, distribution: Distribution, drafted: Any) -> Any:
        return policy.check(state, distribution, drafted, context)

    def proceed(context: RoundContext, state: Any, distribution: Distribution, token: Any, drafted: Any) -> Any:
        return policy.proceed(state, distribution, token, drafted, context)

    def update(context: RoundContext, state: Any, draft: Draft, result: VerificationResult) -> Any:
        return select_rows(context.alive, policy.update(state, draft, result), state)

    each = begin, check, proceed, update
    return _Rules(*(in_batches(f, batch, f"the policy's {f.__name__}", policy.joins_rows) for f in each))


def scaled(weights: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Weights [N, K+1, V] with the sums `chance` [N, K+1], how likely they are used."""
    total = weights.sum(axis=-1, keepdims=True)
    return weights * np.where(total > 0, chance[..., None] / np.where(total > 0, total, 1.0), 0.0)


@functools.lru_cache(maxsize=64)
def _verification(verifier: Verifier, batch: int, longest: int) -> Callable[..., Any]:
    """(context, state, draft, distributions) -> log_prob_accepted [M, K+1], next-token weights [M, K+1, V], state."""

    def verify(context: RoundContext, state: Any, draft: Draft, distributions: Distribution) -> Any:
        log_prob_accepted, next_distribution, state = verifier.verify(state, draft, distributions, context)
        rows = len(context.length)
        size = longest + 1  # as in decoding, rows accept different numbers
        mixed = ((np.arange(size)[:, None] + np.arange(rows)[None, :]) % size).astype(np.int32)
        weights = jnp.stack([next_distribution(jnp.asarray(accepted)) for accepted in mixed], axis=1)
        weights = jnp.take_along_axis(weights, np.argsort(mixed, axis=0).T[:, :, None], axis=1)
        return log_prob_accepted, weights, state

    def as_used(answers: Any) -> Any:
        log_prob_accepted, weights, state = answers
        return log_prob_accepted, scaled(weights, np.exp(log_prob_accepted)), state

    return in_batches(verify, batch, "the verifier's verify", as_used=as_used)


@functools.lru_cache(maxsize=64)
def _watch(monitor: Monitor, batch: int) -> Callable[..., Any]:
    """(context, state, distributions, result) -> state, for unfinished rows."""

    def observe(context: RoundContext, state: Any, distributions: Distribution, result: VerificationResult) -> Any:
        assert distributions.raw_log_prob is not None  # logits up to a constant
        return select_rows(context.alive, monitor.observe(state, distributions.raw_log_prob, result, context), state)

    return in_batches(observe, batch, "the monitor's observe")
