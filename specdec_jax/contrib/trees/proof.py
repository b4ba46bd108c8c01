"""Rounds of long drafts with siblings: the exact distribution of what a round emits, continued by the target.

Policies do not see the tokens of siblings, so only their acceptance can be wrong: a verifier's `outcomes`, or its next
distribution, by which they are tested. The proof covers a verifier's rounds with SIBLINGS siblings at one draft, for
each draft, and with one sibling at every draft. The toy has more tokens than a draft and its siblings, so that tokens
remain if all are rejected. Rounds begin with the verifier's initial state.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.contrib.trees.enumeration import comb_leaves, verified_combs, with_siblings
from specdec_jax.contrib.trees.leaves import Leaf
from specdec_jax.contrib.trees.stopping.comb import comb
from specdec_jax.lossless import enumeration
from specdec_jax.lossless.exact import TOLERANCE, monitor_for, warps_for
from specdec_jax.lossless.long_drafts import RAREST
from specdec_jax.lossless.nodes import Branches, Nodes, Setting
from specdec_jax.lossless.toys import narrow_pair
from specdec_jax.types import Verifier

SIBLINGS = 3
DRAFTS = 4  # the third and fourth are not covered by the sum over all rounds
TOY = narrow_pair(SIBLINGS + 3, seed=1)
WARPS: tuple[Mapping[str, Any], ...] = ({"temperature": 0.7}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.0})
PROMPTS = np.array([[0, 1], [2, 3], [4, 5], [5, 0]], np.int32)


class CombRoundsReport(NamedTuple):
    """The worst of all shapes and warps."""

    error: float  # largest relative error of a sequence's probability, given the beginning of its round
    drafts: int
    siblings: int
    shapes: int  # number of shapes of drafts with siblings
    accepted: tuple[float, ...]  # largest probability that a sibling of the first, second ... draft is accepted
    lossless: bool  # error < TOLERANCE

    @property
    def sentence(self) -> str:
        """A sentence on the result."""
        return (
            f"Exact, rounds of {self.drafts} drafts with up to {self.siblings} siblings: the largest relative error is "
            f"{self.error:.1e} (must be under {TOLERANCE:.0e}); other rounds are of chains."
        )

    @property
    def gaps(self) -> list[str]:
        """Clauses about what was not tested."""
        missing = self.never_accepted
        drafts = f"draft{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return [f"no sibling of {drafts} was accepted"] if missing else []

    @property
    def never_accepted(self) -> tuple[int, ...]:
        """Draft positions of which no sibling was accepted."""
        return tuple(draft for draft, chance in enumerate(self.accepted, 1) if chance == 0)


def prove_comb_rounds(
    verifier: Verifier, *, drafts: int = DRAFTS, warps: Sequence[Mapping[str, Any]] = WARPS
) -> CombRoundsReport:
    """Rounds of `drafts` tokens with siblings for each warp, from some prompts of the toy, or all for temperature 0."""
    shapes = [np.eye(drafts, dtype=np.int32)[draft] * SIBLINGS for draft in range(drafts)] + [np.ones(drafts, np.int32)]
    worst, accepted = 0.0, np.zeros(drafts)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for warp in warps_for(verifier, warps):
            prompts = PROMPTS if warp["temperature"] else np.indices((SIBLINGS + 3,) * 2).reshape(2, -1).T
            for shape in shapes:
                policy = comb(links=drafts, siblings=tuple(shape.tolist()), most=SIBLINGS)
                strategies, size = (policy, verifier, monitor_for(policy, verifier)), drafts + 2
                setting = enumeration.setting_of(*strategies, drafts, warp, [TOY], tokens=size, limit=size)
                error, taken = _round(setting, prompts.astype(np.int32))
                worst, accepted = max(worst, error), np.maximum(accepted, taken)
    return CombRoundsReport(worst, drafts, SIBLINGS, len(shapes), tuple(accepted.tolist()), worst < TOLERANCE)


def _round(setting: Setting, prompts: np.ndarray) -> tuple[float, np.ndarray]:
    """The largest relative error, and the probability [K] that a sibling of each draft is accepted."""
    nodes = enumeration.first_nodes(setting, prompts)
    branches, draft = with_siblings(setting, nodes, enumeration.draft_tree(setting, nodes))
    chosen, leaf = comb_leaves(setting, nodes, branches, verified_combs(setting, nodes, branches, draft))
    taken = np.bincount(chosen[1], weights=leaf.chance * (leaf.sibling >= 0), minlength=setting.longest + 1)
    return _error(setting, nodes, branches, chosen, leaf), taken[: setting.longest] / len(prompts)


def _error(setting: Setting, nodes: Nodes, branches: Branches, chosen: tuple[np.ndarray, ...], leaf: Leaf) -> float:
    """As `long_drafts.round_error`; tables have all sequences, [N, V, V, ...] by the last two tokens before them."""
    branch, accepted, token = chosen
    target = np.exp(setting.target_distributions.log_prob)
    vocab, prompts, longest = target.shape[-1], nodes.tokens[:, :2], setting.longest + 1
    target = target.reshape(vocab, vocab, vocab)
    has_sibling, index = leaf.sibling >= 0, np.arange(longest)[None, :]
    text = np.pad(branches.text[branch, 2:], ((0, 0), (0, 1))).astype(np.int64)
    text = np.where(has_sibling[:, None] & (index == accepted[:, None]), leaf.sibling[:, None], text)
    length = accepted + has_sibling + 1
    text = np.where(index == length[:, None] - 1, token[:, None], text)
    distribution, goal = np.zeros(len(prompts)), np.ones(len(prompts))
    for size in range(1, longest + 1):
        shape = (len(prompts), *(vocab,) * size)
        following = _following(target, prompts, size)
        distribution, goal = (np.broadcast_to(p[..., None] * following, shape).copy() for p in (distribution, goal))
        here = length == size
        place = (branches.node[branch[here]], *text[here, :size].T)
        np.add.at(distribution, place, leaf.chance[here])
    error = np.max(np.abs(distribution - goal) / np.maximum(goal, RAREST))
    return float(error) if np.isfinite(error) else np.inf


def _following(target: np.ndarray, prompts: np.ndarray, size: int) -> np.ndarray:
    """The target's conditionals of the last token of sequences of `size` tokens, broadcastable to [N, V, ...]."""
    if size == 1:
        return target[prompts[:, 0], prompts[:, 1]]
    if size == 2:
        return target[prompts[:, 1]]
    return target
