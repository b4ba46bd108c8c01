"""Rounds with siblings in an enumeration: the counterparts of the draft loop and the round."""

import numpy as np

from specdec_jax.contrib.trees.leaves import to_expand_of
from specdec_jax.contrib.trees.outcomes import comb_leaves, policy_of, verified_combs, with_siblings
from specdec_jax.contrib.trees.seams import TreeResult
from specdec_jax.hyperparameters import host
from specdec_jax.lossless.batched import take
from specdec_jax.lossless.enumeration import advance, tokens_of
from specdec_jax.lossless.nodes import Branches, Nodes, Setting
from specdec_jax.types import RoundContext, VerificationResult


def without_extras(setting: Setting, count: int) -> np.ndarray:
    """[N, E] int32, no expanded siblings for `count` (N) drafts, as `Children.parent`."""
    return np.full((count, policy_of(setting).expanded * (setting.longest - 1)), -1, np.int32)


def before_pass(setting: Setting, context: RoundContext, branches: Branches, step: int) -> Branches:
    """The branches with the siblings expanded in this step's pass; none in the first."""
    count = policy_of(setting).expanded
    if count and step:
        questions = take(context, branches.node), branches.policy, branches.drafted, branches.extra
        chosen = to_expand_of(policy_of(setting), setting.batch)(*questions)
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
