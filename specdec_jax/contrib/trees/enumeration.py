"""Rounds with siblings in an enumeration: the draft loop's counterpart, all ways of drawing siblings, all outcomes."""

from typing import Any, NamedTuple

import numpy as np

from specdec_jax.contrib.trees.leaves import (
    Leaf,
    beside_of,
    children_decided,
    decided,
    every_order,
    leaves,
    to_expand_of,
)
from specdec_jax.contrib.trees.seams import Children, SiblingOutcomes, TreeDraft, TreePolicy, TreeResult
from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import take
from specdec_jax.lossless.enumeration import advance, tokens_of
from specdec_jax.lossless.nodes import (
    Branches,
    Nodes,
    Setting,
    context_of,
    draft_of,
    drawn_distribution,
    pair,
    rule_answers,
)
from specdec_jax.types import Distribution, RoundContext, VerificationResult


class CombOutcomes(NamedTuple):
    """All outcomes of M drafts with siblings."""

    reached: np.ndarray  # [M, K+1] float64, probability of node, draft, siblings and number of accepted drafts
    several: np.ndarray  # [M, K+1, S+1], then that of accepting no sibling, the first, the second ...
    rest: np.ndarray  # [M, K+1, V], the next token's distribution if none is accepted
    draft: TreeDraft
    distributions: Distribution
    verifier: Any


def policy_of(setting: Setting) -> TreePolicy:
    """The setting's policy, a TreePolicy."""
    assert isinstance(setting.policy, TreePolicy)
    return setting.policy


def with_siblings(setting: Setting, nodes: Nodes, branches: Branches) -> tuple[Branches, TreeDraft]:
    """One branch per way of drawing the siblings that the policy wants."""
    vocab, draft = setting.target_distributions.log_prob.shape[-1], TreeDraft(*draft_of(setting, branches))
    is_greedy = float(setting.warp["temperature"]) <= 0
    seen = setting.drafter_distributions
    table = np.exp(seen.raw_log_prob if is_greedy else seen.log_prob)

    def place(branch: np.ndarray, depth: Any, token: Any) -> np.ndarray:
        """The index of the drafter's distribution after `depth` drafts, the last one replaced by a token."""
        text, depth = branches.text[branch], np.broadcast_to(depth, len(branch))
        last_two = np.take_along_axis(text, depth[:, None] + np.arange(2), axis=1)
        last_two[:, 1] = last_two[:, 1] if token is None else token
        number = np.minimum(depth, setting.longest - 1)  # beyond it nothing is drawn
        read = ((branches.table[branch] // vocab**2 * setting.longest + number) * vocab + text[:, 0]) * vocab**2
        return read + pair(last_two, vocab)

    siblings = host(np.zeros((*draft.tokens.shape, policy_of(setting).siblings), np.int32))
    draft = draft._replace(siblings=siblings, children=_no_children(setting, branches, draft))
    context = take(context_of(setting, nodes), branches.node)
    draft = beside_of(policy_of(setting).bare, setting.batch)(context, branches.policy, draft)
    branch_of, drawn, chance = every_order(draft, is_greedy, lambda *at: table[place(*at)].copy())
    draft = take(draft, branch_of)._replace(siblings=host(drawn[:, : setting.longest]))
    if draft.children is not None:
        before, index = np.divmod(np.maximum(np.asarray(draft.children.parent), 0), siblings.shape[2])
        tokens = drawn[np.arange(len(drawn))[:, None], before, index]  # the expanded siblings, [N, E]
        each = [seen.log_prob[place(branch_of, before[:, e] + 1, tokens[:, e])] for e in range(tokens.shape[1])]
        log_q = None if draft.children.log_q is None else host(np.stack(each, axis=1))
        draft = draft._replace(children=draft.children._replace(tokens=host(drawn[:, setting.longest :]), log_q=log_q))
    branches = take(branches, branch_of)
    return branches._replace(chance=branches.chance * chance), draft


def _no_children(setting: Setting, branches: Branches, draft: TreeDraft) -> Children | None:
    """Empty children of expanded siblings, before they are drawn."""
    count, expansions = branches.extra.shape
    if not expansions:
        return None
    zeros, log_q = np.zeros((count, expansions), np.int32), draft.log_q
    log_q = None if log_q is None else host(np.zeros((*zeros.shape, log_q.shape[2])))
    tokens = np.zeros((*zeros.shape, policy_of(setting).siblings), np.int32)
    return Children(host(branches.extra), host(tokens), log_q, host(zeros))


def verified_combs(setting: Setting, nodes: Nodes, branches: Branches, draft: TreeDraft) -> CombOutcomes:
    """All outcomes of all drafts with their siblings."""
    answers = rule_answers(setting, nodes, branches, draft)  # type: ignore[arg-type]
    log_prob_accepted, several, rest, state = decided(setting.verifier.bare, setting.batch, setting.longest)(*answers)
    lengths = drawn_distribution(np.exp(log_prob_accepted))
    setting.tally.accepts(branches.drafted, lengths)
    reached = branches.chance[:, None] * lengths
    return CombOutcomes(reached, drawn_distribution(several), drawn_distribution(rest), draft, answers[3], state)


def comb_leaves(
    setting: Setting, nodes: Nodes, branches: Branches, outcomes: CombOutcomes
) -> tuple[tuple[np.ndarray, ...], Leaf]:
    """All outcomes of drafts with siblings, as leaves."""
    vocab, draft = setting.target_distributions.log_prob.shape[-1], outcomes.draft

    def target(branch: np.ndarray, accepted: np.ndarray, sibling: np.ndarray, child: np.ndarray | None) -> np.ndarray:
        last = np.take_along_axis(branches.text[branch], 1 + accepted[:, None], axis=1)[:, 0]
        last, token = (last, sibling) if child is None else (sibling, child)
        log_prob = setting.target_distributions.log_prob[branches.table[branch] + last * vocab + token]
        return drawn_distribution(np.exp(log_prob))

    def decided_children(
        branch: np.ndarray, accepted: np.ndarray, index: int, following: np.ndarray
    ) -> SiblingOutcomes:
        assert draft.children is not None and draft.siblings is not None
        sibling = (accepted * draft.siblings.shape[2] + index).astype(np.int32)
        context = take(context_of(setting, nodes), branches.node[branch])
        outcome = children_decided(setting.batch)(context, following, take(draft.children, branch), sibling)
        return outcome._replace(chance=drawn_distribution(outcome.chance), rest=drawn_distribution(outcome.rest))

    siblings = np.asarray(draft.siblings)
    trees = None if draft.children is None else decided_children
    return leaves(outcomes.reached, outcomes.several, outcomes.rest, siblings, target, trees)


def without_extras(setting: Setting, count: int) -> np.ndarray:
    """[N, E] int32, no expanded siblings for `count` (N) drafts, as `Children.parent`."""
    return np.full((count, policy_of(setting).expanded * (setting.longest - 1)), -1, np.int32)


def before_pass(setting: Setting, context: RoundContext, branches: Branches, step: int) -> Branches:
    """The branches with the siblings expanded in this step's pass; none in the first."""
    count = policy_of(setting).expanded
    if count and step:
        questions = take(context, branches.node), branches.policy, branches.drafted, branches.extra
        chosen = to_expand_of(policy_of(setting).bare, setting.batch)(*questions)
        branches.extra[:, (step - 1) * count : step * count] = chosen
    return branches


def enumerate_round(setting: Setting, nodes: Nodes, branches: Branches) -> Nodes:
    """The rows at the beginning of the next round, for all orders of siblings and all outcomes of all drafts."""
    branches, draft = with_siblings(setting, nodes, branches)
    outcomes = verified_combs(setting, nodes, branches, draft)
    chosen, leaf = comb_leaves(setting, nodes, branches, outcomes)
    branch, accepted, _ = chosen
    tokens, index = tokens_of(branches, chosen), np.arange(setting.longest + 1)[None, :]
    for step, other in enumerate((leaf.sibling, leaf.child)):
        here = (other >= 0)[:, None] & (index == accepted[:, None] + step)
        tokens = np.where(here, other[:, None], tokens)
    extra = host(np.add(leaf.sibling >= 0, leaf.child >= 0, dtype=np.int32))
    result = TreeResult(host(tokens), host((accepted + 1).astype(np.int32)), extra)
    emitted = VerificationResult(result.tokens, result.emitted)
    return advance(setting, nodes, branches, outcomes, branch, leaf.chance, result, emitted)
