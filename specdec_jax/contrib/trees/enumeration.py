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
from specdec_jax.lossless.enumeration import Ends, advance, emitted_tokens
from specdec_jax.lossless.nodes import (
    Branches,
    Nodes,
    Setting,
    context_of,
    draft_of,
    drafter_place,
    drawn_distribution,
    pair,
    verify_arguments,
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
    vocab, draft = setting.vocab_size, TreeDraft(*draft_of(setting, branches))
    temperature = setting.requests.warp.temperature
    is_greedy = float(temperature[0]) <= 0
    assert np.all((temperature <= 0) == is_greedy), "rounds with siblings are greedy for all requests or for none"
    seen = setting.drafter_distributions
    table = np.exp(np.float64(seen.raw_log_prob if is_greedy else seen.log_prob))

    def place(branch: np.ndarray, depth: Any, token: Any) -> np.ndarray:
        """The index of the drafter's distribution after `depth` drafts, the last one replaced by a token."""
        text, depth = branches.text[branch], np.broadcast_to(depth, len(branch))
        last_two = np.take_along_axis(text, depth[:, None] + np.arange(2), axis=1)
        last_two[:, 1] = last_two[:, 1] if token is None else token
        number = np.minimum(depth, setting.longest - 1)  # beyond it nothing is drawn
        return drafter_place(setting, take(branches, branch), number) + pair(last_two, vocab)

    siblings = host(np.zeros((*draft.tokens.shape, policy_of(setting).siblings), np.int32))
    draft = draft._replace(siblings=siblings, children=_no_children(setting, branches, draft))
    context = take(context_of(setting, nodes), branches.node)
    draft = beside_of(policy_of(setting).bare, setting.batch)(setting.neighbours, context, branches.policy, draft)
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
    answers = verify_arguments(setting, nodes, branches, draft)  # type: ignore[arg-type]
    decide = decided(setting.verifier.bare, setting.batch, setting.longest)
    log_prob_accepted, several, rest, state = decide(setting.neighbours, *answers)
    lengths = drawn_distribution(np.exp(log_prob_accepted.astype(np.float64)))
    setting.tally.accepts(branches.drafted, lengths)
    reached = branches.chance[:, None] * lengths
    return CombOutcomes(reached, drawn_distribution(several), drawn_distribution(rest), draft, answers[3], state)


def comb_leaves(
    setting: Setting, nodes: Nodes, branches: Branches, outcomes: CombOutcomes
) -> tuple[tuple[np.ndarray, ...], Leaf]:
    """All outcomes of drafts with siblings, as leaves."""
    vocab, draft = setting.vocab_size, outcomes.draft

    def target(branch: np.ndarray, accepted: np.ndarray, sibling: np.ndarray, child: np.ndarray | None) -> np.ndarray:
        last = np.take_along_axis(branches.text[branch], 1 + accepted[:, None], axis=1)[:, 0]
        last, token = (last, sibling) if child is None else (sibling, child)
        log_prob = setting.target_distributions.log_prob[(branches.request[branch] * vocab + last) * vocab + token]
        return drawn_distribution(np.exp(log_prob.astype(np.float64)))

    def decided_children(
        branch: np.ndarray, accepted: np.ndarray, index: int, following: np.ndarray
    ) -> SiblingOutcomes:
        assert draft.children is not None and draft.siblings is not None
        sibling = (accepted * draft.siblings.shape[2] + index).astype(np.int32)
        context = take(context_of(setting, nodes), branches.node[branch])
        arguments = following.astype(setting.target_distributions.log_prob.dtype), take(draft.children, branch), sibling
        outcome = children_decided(setting.batch)(setting.neighbours, context, *arguments)
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
        chosen = to_expand_of(policy_of(setting).bare, setting.batch)(setting.neighbours, *questions)
        branches.extra[:, (step - 1) * count : step * count] = chosen
    return branches


def ends_of_round(setting: Setting, nodes: Nodes, branches: Branches) -> tuple[Branches, Ends]:
    """All ways in which a round ends, for all orders of siblings and all outcomes of all drafts."""
    branches, draft = with_siblings(setting, nodes, branches)
    outcomes = verified_combs(setting, nodes, branches, draft)
    (branch, accepted, token), leaf = comb_leaves(setting, nodes, branches, outcomes)
    tokens, index = emitted_tokens(branches, branch, accepted, token), np.arange(setting.longest + 1)[None, :]
    for step, other in enumerate((leaf.sibling, leaf.child)):
        here = (other >= 0)[:, None] & (index == accepted[:, None] + step)
        tokens = np.where(here, other[:, None], tokens)
    length, extra = accepted + 1, np.add(leaf.sibling >= 0, leaf.child >= 0, dtype=np.int32)

    def following(index: np.ndarray, chance: np.ndarray) -> Nodes:
        columns = tokens[index], length[index].astype(np.int32), extra[index]
        result = TreeResult(*map(host, columns))
        learnt = take((outcomes.draft, outcomes.distributions, outcomes.verifier), branch[index])
        emitted = VerificationResult(result.tokens, result.emitted)
        return advance(setting, nodes, branches, branch[index], chance, learnt, result, emitted)

    setting.tally.siblings += np.bincount(accepted, leaf.chance * (leaf.sibling >= 0), setting.longest + 1)
    return branches, Ends(branch, tokens, (length + extra).astype(np.int32), leaf.chance, following)
