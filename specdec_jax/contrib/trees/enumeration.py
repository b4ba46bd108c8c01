"""Rounds with siblings, exactly: all ways of drawing siblings, all outcomes, and proofs of drawn rounds.

Drawing is reimplemented here, like the draft loop in lossless/enumeration.py; the number of siblings is decided by the
policy, and their acceptance by the verifier or `siblings.py`, as in the decoder.

In a proof, shapes, toys and requests are drawn, and rounds enumerated as in `lossless.rounds`. Policies do not see the
tokens of siblings, so only their acceptance can be wrong: a verifier's `outcomes`, or its next distribution, by which
they are tested. A verifier's rounds have up to SIBLINGS siblings at one draft, or one sibling at every draft; a
policy's have its own shapes. Toys have more tokens than a draft and its siblings.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.contrib.trees.seams import TreeDraft, TreePolicy, TreeResult
from specdec_jax.contrib.trees.siblings import outcomes
from specdec_jax.contrib.trees.stopping.comb import comb
from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import in_batches, joined, take_rows
from specdec_jax.lossless.drawing import Drawing, Shape
from specdec_jax.lossless.enumeration import (
    CHOSEN,
    DRAWN,
    Branches,
    Ends,
    Nodes,
    Setting,
    advance,
    context_of,
    draft_of,
    drafter_place,
    drawn_distribution,
    emitted_tokens,
    pair,
    scaled,
    setting_of,
    verify_arguments,
)
from specdec_jax.lossless.results import Result, shortest
from specdec_jax.lossless.rounds import enumerate_rounds
from specdec_jax.lossless.toys import drawn_pair
from specdec_jax.types import Distribution, Draft, Monitor, RoundContext, StoppingPolicy, VerificationResult, Verifier

PLACES = 64  # of the widest verification
SIBLINGS, DRAFTS, REQUESTS, ROUNDS = 3, 4, 8, 2  # of a proof


class _Rows(NamedTuple):
    """Drafts whose siblings are being drawn; [N, ...]."""

    branch: np.ndarray
    chance: np.ndarray  # float64, probability of the siblings
    siblings: np.ndarray  # [N, K, M] int32
    count: np.ndarray  # [N], number of siblings to draw
    left: np.ndarray  # [N, V], weights of the remaining candidates


@functools.lru_cache(maxsize=64)
def _counted(policy: TreePolicy, batch: int) -> Callable[..., Any]:
    """(context, state, draft) -> the draft with the numbers of siblings that the policy, a bare one, wants."""

    def wanted(context: RoundContext, state: Any, draft: Draft) -> TreeDraft:
        assert policy.beside is not None
        siblings, free = jnp.zeros((*draft.tokens.shape, policy.siblings), jnp.int32), PLACES - draft.length
        return TreeDraft.of(draft, siblings, policy.beside(state, draft.length, free, context), free)

    return in_batches(wanted, batch, "the policy's beside", policy.joins_rows)


def with_siblings(setting: Setting, nodes: Nodes, branches: Branches) -> tuple[Branches, TreeDraft]:
    """One branch per way of drawing the siblings that the policy wants, and their drafts."""
    policy, temperature = setting.policy, setting.requests.warp.temperature
    assert isinstance(policy, TreePolicy)
    is_greedy = float(temperature[0]) <= 0
    assert np.all((temperature <= 0) == is_greedy), "rounds with siblings are greedy for all requests or for none"
    seen, context = setting.drafter_distributions, take_rows(context_of(setting, nodes), branches.node)
    count = _counted(policy.bare, setting.batch)
    draft = count(setting.neighbours, context, branches.policy, draft_of(setting, branches))
    tokens, length, counts, siblings = map(
        np.asarray, (draft.tokens, draft.length, draft.sibling_counts, draft.siblings)
    )
    table = np.exp(np.float64(seen.raw_log_prob if is_greedy else seen.log_prob))  # ranks of candidates, or weights
    rows = _Rows(np.arange(len(tokens)), np.ones(len(tokens)), siblings.copy(), length, table)
    for depth in range(setting.longest):
        branch, text = take_rows(branches, rows.branch), tokens[rows.branch, depth]
        left = table[
            drafter_place(setting, branch, depth) + pair(branch.text[:, depth : depth + 2], setting.vocab_size)
        ]
        left[np.arange(len(left)), text] = 0.0
        rows = rows._replace(count=np.where(depth < length, counts[:, depth], 0)[rows.branch], left=left)
        for index in range(siblings.shape[2]):
            rows = _drawn_next(rows, is_greedy, depth, index)
    branches = take_rows(branches, rows.branch)
    branches = branches._replace(chance=branches.chance * rows.chance)
    return branches, take_rows(draft, rows.branch)._replace(siblings=host(rows.siblings))


def _drawn_next(rows: _Rows, is_greedy: bool, depth: int, index: int) -> _Rows:
    """Draws sibling `index`: one row per possible token; rows that draw none are unchanged."""
    total = rows.left.sum(axis=1, keepdims=True)
    draws = (index < rows.count) & (total[:, 0] > 0)
    chance = rows.left / np.where(total > 0, total, 1.0)
    if is_greedy:
        chance = np.eye(chance.shape[1])[np.argmax(rows.left, axis=1)]
    chance[~draws] = np.eye(chance.shape[1])[0]  # the one branch of a row that draws nothing
    row, token = np.nonzero(chance)
    rows = _Rows(*(column[row] for column in rows))
    rows.siblings[:, depth, index] = token
    rows.left[np.arange(len(row)), token] = np.where(draws[row], 0.0, rows.left[np.arange(len(row)), token])
    return rows._replace(chance=rows.chance * chance[row, token])


@functools.lru_cache(maxsize=64)
def decided(verifier: Verifier, batch: int, longest: int) -> Callable[..., Any]:
    """(context, state, draft, distributions) -> log_prob_accepted [M, K+1], `SiblingOutcomes` [M, K+1, ...], state."""

    def decide(context: RoundContext, state: Any, draft: TreeDraft, distributions: Distribution) -> Any:
        log_prob_accepted, next_distribution, state = verifier.verify(state, draft, distributions, context)  # type: ignore[arg-type]
        numbers = [jnp.full(context.length.shape, k, jnp.int32) for k in range(longest + 1)]
        ends = [outcomes(verifier, next_distribution, draft, distributions, k, context) for k in numbers]
        chances, rests = (jnp.stack([getattr(end, name) for end in ends], axis=1) for name in ("chance", "rest"))
        return log_prob_accepted, chances, rests, state

    def as_used(answers: Any) -> Any:
        log_prob_accepted, chances, rests, state = answers
        reached = np.exp(log_prob_accepted)
        return log_prob_accepted, scaled(chances, reached), scaled(rests, reached * chances[..., 0]), state

    return in_batches(decide, batch, "the verifier's outcomes", as_used=as_used)


def ends_of_round(setting: Setting, nodes: Nodes, branches: Branches) -> tuple[Branches, Ends]:
    """All ways in which a round ends, for all orders of siblings and all outcomes of all drafts."""
    branches, draft = with_siblings(setting, nodes, branches)
    context, *arguments = verify_arguments(setting, nodes, branches, draft)  # type: ignore[arg-type]
    decide = decided(setting.verifier.bare, setting.batch, setting.longest)
    log_prob_accepted, several, rest, state = decide(setting.neighbours, context, *arguments)
    lengths = drawn_distribution(np.exp(log_prob_accepted.astype(np.float64)))
    setting.tally.accepts(branches.drafted, lengths)
    reached, several, rest = branches.chance[:, None] * lengths, drawn_distribution(several), drawn_distribution(rest)
    branch, accepted = np.nonzero(reached > 0)
    last, vocab, parts = branches.text[branch, 1 + accepted], setting.vocab_size, []
    for candidate in range(several.shape[2]):  # 0: no sibling is accepted
        sibling, following = np.full(len(branch), -1, np.int32), rest[branch, accepted]
        if candidate:
            sibling = np.asarray(draft.siblings)[branch, np.minimum(accepted, setting.longest - 1), candidate - 1]
            place = (branches.request[branch] * vocab + last) * vocab + sibling
            following = drawn_distribution(np.exp(setting.target_distributions.log_prob[place].astype(np.float64)))
        each = (reached * several[:, :, candidate])[branch, accepted][:, None] * following
        row, token = np.nonzero(each)
        parts.append((branch[row], accepted[row], token, sibling[row], each[row, token]))
    branch, accepted, token, sibling, chance = joined(parts)
    tokens, index = emitted_tokens(branches, branch, accepted, token), np.arange(setting.longest + 1)[None, :]
    tokens = np.where((sibling >= 0)[:, None] & (index == accepted[:, None]), sibling[:, None], tokens)
    length, extra = (accepted + 1).astype(np.int32), (sibling >= 0).astype(np.int32)

    def following_nodes(index: np.ndarray, chance: np.ndarray) -> Nodes:
        result = TreeResult(*map(host, (tokens[index], length[index], extra[index])))
        learnt = take_rows((*arguments[1:], state), branch[index])
        emitted = VerificationResult(result.tokens, result.emitted)
        return advance(setting, nodes, branches, branch[index], chance, learnt, result, emitted)

    setting.siblings[:] += np.bincount(accepted, chance * extra, setting.longest + 1)
    return branches, Ends(branch, tokens, length + extra, chance, following_nodes)


def prove_siblings(
    policy: StoppingPolicy, verifier: Verifier, drawing: Drawing, monitor: Monitor | None
) -> tuple[Result, np.ndarray]:
    """(the results of drawn rounds with siblings, by draft the sum of the probabilities that a sibling is accepted)."""
    rng, results, accepted = drawing.rng, [], np.zeros(DRAFTS + 1)
    shapes = [np.eye(DRAFTS, dtype=int)[draft] * SIBLINGS for draft in rng.permutation(DRAFTS)] + [np.ones(DRAFTS, int)]
    combs = [comb(links=DRAFTS, siblings=tuple(shape.tolist()), most=SIBLINGS) for shape in shapes]
    batch = int(rng.integers(2, 6))
    cases = [(each, DRAFTS, 3.2) for each in combs] + ([(policy, 2, 3.0)] * 2 if isinstance(policy, TreePolicy) else [])
    for index, (rule, longest, choices) in enumerate(cases):
        vocab = max(SIBLINGS + 3, rule.siblings + 2)
        for greedy in (True, False) if index == 0 and not verifier.greedy_only else (verifier.greedy_only,):
            requests = drawing.requests(REQUESTS, Shape(vocab, longest, batch, False, False), greedy, ROUNDS)
            warmer = np.maximum(requests.warp.temperature, np.float32(0.0 if greedy else 0.3))
            kind = np.where((requests.kind == CHOSEN) & (np.arange(REQUESTS) < 2), CHOSEN, DRAWN).astype(np.int8)
            requests = requests._replace(warp=requests.warp._replace(temperature=warmer), kind=kind)
            toys = [drawn_pair(rng, vocab, float(choices + rng.uniform(-0.8, 0.8))) for _ in range(REQUESTS)]
            size = {"tokens": ROUNDS * (longest + 1), "batch": batch, "seed": int(rng.integers(2**31))}
            setting = setting_of(rule, verifier, monitor, longest, requests, toys, **size)
            prompts = rng.integers(0, vocab, (REQUESTS, 2)).astype(np.int32)
            results.append(enumerate_rounds(setting, ROUNDS, prompts, np.arange(REQUESTS)))
            accepted[: longest + 1] += setting.siblings
    counts = {unit: sum(each.counts[unit] for each in results) for unit in ("rounds", "drafts")}
    error, wrong = max(each.measure for each in results), next(filter(None, [each.wrong for each in results]), "")
    return Result(error, counts, wrong, shortest([each.counterexample for each in results])), accepted[:DRAFTS]
