"""The exact output distribution of decoding on a toy model, by enumeration of all drafts and verifications per round.

The states of policy and verifier are carried from round to round, which is necessary for adaptive rules: a rule that
reads forbidden values may be unbiased within one round and biased over two. Policy and verifier are called as in the
decoder, `batch` rows at a time; only the draft loop (decoding/draft_loop.py) is reimplemented here.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.sampling import distribution, make_warp
from specdec_jax.hyperparameters import host, select_rows
from specdec_jax.lossless.batched import in_batches, joined, take
from specdec_jax.lossless.coverage import Tally
from specdec_jax.lossless.nodes import (
    Branches,
    Nodes,
    Setting,
    chosen_at,
    context_of,
    count_of,
    draft_of,
    drawn_distribution,
    pair,
    rule_answers,
)
from specdec_jax.lossless.toys import FADES, Toy
from specdec_jax.types import Distribution, Draft, Monitor, RoundContext, StoppingPolicy, VerificationResult, Verifier

BATCH = 32  # default number of rows per call of policy and verifier
PROMPT = np.array([[0, 1]], np.int32)


def distribution_table(tables: Sequence[np.ndarray], warp: Mapping[str, Any]) -> Distribution:
    """Distributions by warp, toy and the last two tokens, of [V, V, V] logits each."""
    flat = jnp.asarray(np.concatenate([table.reshape(-1, table.shape[-1]) for table in tables]), jnp.float64)
    parts = []
    for index in range(count_of(warp)):
        numbers = {name: value[index] if np.ndim(value) else value for name, value in warp.items()}
        parts.append(jax.tree.map(np.asarray, jax.jit(distribution)(flat, make_warp(len(flat), **numbers))))
    return joined(parts)


def drafter_table(toys: Sequence[Toy], longest: int, warp: Mapping[str, Any]) -> Distribution:
    """Distributions of the drafters, laid out as in `Setting`; without `Toy.read` the token read has no effect."""
    tables = []
    for toy in toys:
        vocab = toy.drafter.shape[-1]
        read = np.zeros((vocab, vocab)) if toy.read is None else toy.read
        faded = FADES ** np.arange(longest)[:, None, None] * read[None]  # [K, V, V]
        tables.append(faded[:, :, None, :] + toy.drafter.reshape(1, 1, vocab * vocab, vocab))
    return distribution_table(tables, warp)


def setting_of(
    policy: StoppingPolicy,
    verifier: Verifier,
    monitor: Monitor,
    longest: int,
    warp: Mapping[str, Any],
    toys: Sequence[Toy],
    *,
    tokens: int,
    limit: int,
) -> Setting:
    """The setting of toys whose drafters draw up to `longest` (K) tokens; `tokens` and `limit` as in `Setting`."""
    tables = drafter_table(toys, longest, warp), distribution_table([toy.target for toy in toys], warp)
    return Setting(policy, verifier, monitor, *tables, warp, longest, tokens, limit, BATCH, False, Tally(longest))


def first_nodes(setting: Setting, prompts: np.ndarray = PROMPT, toy: Any = 0) -> Nodes:
    """One row per prompt [N, 2], each with probability 1, with room for `setting.tokens` more tokens.

    `toy` [N] is the index of the row's toy, over all warps.
    """
    count, vocab = len(prompts), setting.target_distributions.log_prob.shape[-1]
    host = functools.partial(jax.tree.map, np.asarray)
    return Nodes(
        tokens=np.pad(prompts, ((0, 0), (0, setting.tokens))).astype(np.int32),
        table=np.broadcast_to(np.asarray(toy, np.int64) * vocab**2, count),
        emitted=np.zeros(count, np.int32),
        chance=np.ones(count),
        policy=host(setting.policy.init(count)),
        verifier=host(setting.verifier.init(count)),
        monitor=host(setting.monitor.init(count)),
    )


def enumerate_distribution(setting: Setting, nodes: Nodes) -> np.ndarray:
    """The joint distribution of the emitted tokens, [V] * tokens float64."""
    vocab = setting.target_distributions.log_prob.shape[-1]
    joint = np.zeros((vocab,) * setting.tokens)
    while len(nodes.chance):
        branches = draft_tree(setting, nodes)
        if setting.policy.rounds is None:
            outcomes = verified(setting, nodes, branches)
            chosen = np.nonzero(outcomes.chance)
            following = after(setting, nodes, branches, outcomes, chosen, outcomes.chance[chosen])
        else:
            following = setting.policy.rounds.enumerate_round(setting, nodes, branches)
        following = _merged(following)
        done = following.emitted >= setting.tokens
        finished = take(following, done)
        np.add.at(joint, tuple(finished.tokens[:, 2:].T), finished.chance)
        nodes = take(following, ~done)
    return joint


def target_joint(setting: Setting) -> np.ndarray:
    """The target's joint distribution of the same tokens: the product of its conditionals."""
    prob = np.exp(setting.target_distributions.log_prob)
    vocab = prob.shape[-1]
    joint = np.zeros((vocab,) * setting.tokens)
    for sequence in np.ndindex(joint.shape):
        text = (0, 1, *sequence)
        pairs = zip(text, text[1:], text[2:], strict=False)
        joint[sequence] = np.prod([prob[a * vocab + b, c] for a, b, c in pairs])
    return joint


def draft_tree(setting: Setting, nodes: Nodes) -> Branches:
    """All drafts of a round: the counterpart of the draft loop, with all possible draws instead of one."""
    context, rules, tally = context_of(setting, nodes), _rules(setting.policy.bare, setting.batch), setting.tally
    going, policy = rules.begin(context, nodes.policy)
    ends = nodes.emitted[:, None] + np.arange(2)[None, :]
    vocab, count, longest = setting.drafter_distributions.log_prob.shape[-1], len(going), setting.longest
    text = np.full((count, 2 + longest), vocab - 1, np.int32)
    text[:, :2] = np.take_along_axis(nodes.tokens, ends, axis=1)
    log_q = np.full((count, longest, vocab), -np.inf)  # beyond a draft's end the loop leaves one of two things:
    log_q[1::2] = -np.log(vocab)  # nothing, or distributions of other rows or rounds
    none = np.zeros(count, np.int32)
    rounds = setting.policy.rounds
    extra = () if rounds is None else rounds.without_extras(setting, count)
    branches = Branches(np.arange(count), nodes.table, text, log_q, none, extra, nodes.chance, policy)
    has_budget = context.budget > 0
    tally.asks(0, going[has_budget])
    going, finished = going & has_budget, []
    for step in range(longest):
        finished.append(take(branches, ~going))
        branches = take(branches, going)
        if rounds is not None:
            branches = rounds.before_pass(setting, context, branches, step)
        here = (branches.table // vocab**2 * longest + step) * vocab + branches.text[:, 0]
        here = here * vocab**2 + pair(branches.text[:, step : step + 2], vocab)
        distributions = take(setting.drafter_distributions, here)
        branches.log_q[:, step] = distributions.log_prob
        draws, policy = rules.check(take(context, branches.node), branches.policy, distributions, branches.drafted)
        tally.checks(step, draws)
        branches = branches._replace(policy=policy)
        finished.append(take(branches, ~draws))
        branches, distributions = take(branches, draws), take(distributions, draws)
        branches, distributions, token = _each_token(setting, branches, distributions, step)
        row = take(context, branches.node)
        going, policy = rules.proceed(row, branches.policy, distributions, token, branches.drafted)
        branches = branches._replace(policy=policy)
        has_budget = branches.drafted < row.budget
        tally.asks(step + 1, going[has_budget])
        going = going & has_budget
    return joined([*finished, branches])


def _each_token(
    setting: Setting, branches: Branches, distributions: Distribution, step: int
) -> tuple[Branches, Distribution, np.ndarray]:
    """One branch per possible token, with the distribution it was drawn from."""
    prob = np.exp(distributions.log_prob)  # [M, V]
    chose = chosen_at(setting, branches.text)[:, step]
    prob = np.where(chose[:, None], np.eye(prob.shape[-1])[distributions.top_token], prob)
    parent, token = np.nonzero(prob > 0)
    branches, distributions, token = take(branches, parent), take(distributions, parent), token.astype(np.int32)
    branches.text[:, 2 + step] = token
    return (
        branches._replace(drafted=branches.drafted + 1, chance=branches.chance * prob[parent, token]),
        distributions,
        token,
    )


class Outcomes(NamedTuple):
    """All outcomes of M drafts: the number of accepted tokens, and the token after them."""

    chance: np.ndarray  # [M, K+1, V] float64, probability of node, draft and outcome
    draft: Draft
    distributions: Distribution  # the target's, every leaf [M, K+1, ...]
    verifier: Any  # its state after the round, [M, ...]


def verified(setting: Setting, nodes: Nodes, branches: Branches) -> Outcomes:
    """All outcomes of all drafts."""
    arguments = rule_answers(setting, nodes, branches, draft_of(setting, branches))
    log_prob_accepted, weights, state = _verification(setting.verifier.bare, setting.batch, setting.longest)(*arguments)
    lengths = drawn_distribution(np.exp(log_prob_accepted))
    setting.tally.accepts(branches.drafted, lengths)
    chance = branches.chance[:, None, None] * lengths[:, :, None] * drawn_distribution(weights)
    return Outcomes(chance, arguments[2], arguments[3], state)


def after(
    setting: Setting,
    nodes: Nodes,
    branches: Branches,
    outcomes: Outcomes,
    chosen: tuple[np.ndarray, ...],
    chance: np.ndarray,
) -> Nodes:
    """The rows at the beginning of the next round, for chosen (branch, accepted, token) with probability `chance`."""
    branch, accepted, token = chosen
    tokens = tokens_of(branches, chosen)
    result = VerificationResult(host(tokens), host((accepted + 1).astype(np.int32)))
    return advance(setting, nodes, branches, outcomes, branch, chance, result, result)


def tokens_of(branches: Branches, chosen: tuple[np.ndarray, ...]) -> np.ndarray:
    """[N, K+1] int32, the accepted drafts of the chosen (branch, accepted, token) and the token after them."""
    branch, accepted, token = chosen
    index = np.arange(branches.text.shape[1] - 1)[None, :]
    drafts = np.pad(branches.text[:, 2:], ((0, 0), (0, 1)))[branch]
    return np.where(index < accepted[:, None], drafts, token[:, None]).astype(np.int32)


def advance(
    setting: Setting,
    nodes: Nodes,
    branches: Branches,
    outcomes: Any,
    branch: np.ndarray,
    chance: np.ndarray,
    result: Any,
    emitted: VerificationResult,
) -> Nodes:
    """The rows at the beginning of the next round.

    Args:
        outcomes: `draft`, `distributions` and `verifier` of all branches, as in `Outcomes`.
        branch: [N], index of each row's branch; chance: [N], probability of the row.
        result: argument of the policy's `update`; emitted: the tokens that the round emits.
    """
    rules, context = _rules(setting.policy.bare, setting.batch), take(context_of(setting, nodes), branches.node[branch])
    policy = rules.update(context, take(branches.policy, branch), take(outcomes.draft, branch), result)
    monitor = context.monitor
    if jax.tree.leaves(monitor):
        watch = _watch(setting.monitor.bare, setting.batch)
        # By the drafts only: the toys' monitor reads the distributions at the chain's positions.
        monitor = watch(context, monitor, take(outcomes.distributions, branch), VerificationResult(*result[:2]))
    node = branches.node[branch]
    tokens = _appended(nodes.tokens[node], nodes.emitted[node], emitted)
    count = (nodes.emitted[node] + emitted.length).astype(np.int32)
    return Nodes(tokens, branches.table[branch], count, chance, policy, take(outcomes.verifier, branch), monitor)


def _appended(tokens: np.ndarray, emitted: np.ndarray, result: VerificationResult) -> np.ndarray:
    """Texts with a round's tokens appended; tokens that do not fit are dropped."""
    tokens = tokens.copy()
    for k in range(result.tokens.shape[1]):
        place = 2 + emitted + k
        rows = np.flatnonzero((k < result.length) & (place < tokens.shape[1]))
        tokens[rows, place[rows]] = result.tokens[rows, k]
    return tokens


def _merged(nodes: Nodes) -> Nodes:
    """Merges rows with identical futures."""
    leaves = [nodes.tokens, nodes.table, np.minimum(nodes.emitted, nodes.tokens.shape[1] - 2)]
    leaves += jax.tree.leaves((nodes.policy, nodes.verifier, nodes.monitor))
    count = len(nodes.chance)
    raw = [np.ascontiguousarray(leaf).reshape(count, -1).view(np.uint8).reshape(count, -1) for leaf in leaves]
    _, first, group = np.unique(np.concatenate(raw, axis=1), axis=0, return_index=True, return_inverse=True)
    chance = np.bincount(group.ravel(), weights=nodes.chance, minlength=len(first))
    return take(nodes, first)._replace(chance=chance)


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

    def update(context: RoundContext, state: Any, draft: Draft, result: VerificationResult) -> Any:
        return select_rows(context.alive, policy.update(state, draft, result), state)

    return _Rules(
        begin=in_batches(begin, batch),
        check=in_batches(
            lambda context, state, distribution, drafted: policy.check(state, distribution, drafted, context), batch
        ),
        proceed=in_batches(
            lambda context, state, distribution, token, drafted: policy.proceed(
                state, distribution, token, drafted, context
            ),
            batch,
        ),
        update=in_batches(update, batch),
    )


@functools.lru_cache(maxsize=64)
def _verification(verifier: Verifier, batch: int, longest: int) -> Callable[..., Any]:
    """(context, state, draft, distributions) -> log_prob_accepted [M, K+1], next-token weights [M, K+1, V], state."""

    def verify(context: RoundContext, state: Any, draft: Draft, distributions: Distribution) -> Any:
        log_prob_accepted, next_distribution, state = verifier.verify(state, draft, distributions, context)
        weights = [next_distribution(jnp.full((batch,), k, jnp.int32)) for k in range(longest + 1)]
        return log_prob_accepted, jnp.stack(weights, axis=1), state

    return in_batches(verify, batch)


@functools.lru_cache(maxsize=64)
def _watch(monitor: Monitor, batch: int) -> Callable[..., Any]:
    """(context, state, distributions, result) -> state, for unfinished rows."""

    def observe(context: RoundContext, state: Any, distributions: Distribution, result: VerificationResult) -> Any:
        assert distributions.raw_log_prob is not None  # logits up to a constant
        return select_rows(context.alive, monitor.observe(state, distributions.raw_log_prob, result, context), state)

    return in_batches(observe, batch)
