"""Combs by enumeration: every draft, every order of siblings, every outcome; shapes that depend on the draft."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.contrib.trees import comb, enumeration, hooks, siblings, survival_tree, traversal
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.lossless import enumerate_distribution, toys
from specdec_jax.verification import block, rejection

EXACT = 1e-12
FREE = {"drafter_cost": 0.05, "verification_times": (1.0,) * 8}
TOYS = (toys.toy_pair(3, 0), toys.with_reading(toys.toy_pair(3, 1)), toys.toy_pair(3, 2, distance=0.0))
WARPS = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0.0},
)


def distance(policy, verifier=rejection, toys=TOYS, warps=WARPS):
    """The largest total variation of the first tokens' joint distribution from the target's."""
    worst = 0.0
    for toy, warp in itertools.product(toys, warps):
        joint, goal = enumerate_distribution(policy, verifier(), toy, make_warp(1, **warp))
        worst = max(worst, 0.5 * np.abs(joint - goal).sum())
    return worst


COMB, SURVIVAL = comb(links=2, siblings=(1, 2)), survival_tree(siblings=2, **FREE)


@pytest.mark.often(5)
@pytest.mark.parametrize(("policy", "verifier"), itertools.product((COMB, SURVIVAL), (rejection, block, traversal)))
def test_combs_are_exact(policy, verifier, monkeypatch):
    accepted, real = [], enumeration.ends_of_round

    def noted(setting, *round_of):
        ends = real(setting, *round_of)
        accepted.append(setting.tally.siblings.sum())
        return ends

    monkeypatch.setattr(hooks, "ends_of_round", noted)
    assert distance(policy, verifier) < EXACT
    assert max(accepted) > 0.1  # siblings are accepted, and not only allowed


def by_the_draft(state, length, free, context):
    """A shape that depends on all that the rule may know: how long the draft is, and how far the text."""
    del state, free
    return jnp.stack([1 + context.emitted % 2, length % 3], axis=1)


@pytest.mark.seldom
@pytest.mark.parametrize("verifier", [rejection, traversal])
def test_shapes_may_depend_on_the_draft(verifier):
    adaptive = dataclasses.replace(survival_tree(siblings=2, **FREE), beside=by_the_draft)
    assert distance(adaptive, verifier, toys=TOYS[:2]) < EXACT


def test_a_sibling_left_out_by_its_token_is_found_out(monkeypatch):
    """The negative control: siblings of the first draft are not verified where the first one is token 0."""
    real = enumeration.with_siblings

    def choosy(*asked):
        branches, draft = real(*asked)
        left_out = (np.asarray(draft.siblings)[:, :1, 0] == 0) & (np.arange(draft.sibling_counts.shape[1]) == 0)
        return branches, draft._replace(sibling_counts=np.where(left_out, 0, draft.sibling_counts))

    monkeypatch.setattr(enumeration, "with_siblings", choosy)
    assert distance(comb(1, links=2, siblings=(1, 1)), toys=TOYS[:1]) > 1e-5


def test_traversal_that_forgets_a_rejected_sibling_is_found_out(monkeypatch):
    """The negative control: the prefix keeps its weight and the target's distribution after a sibling is rejected."""
    enumeration.decided.cache_clear()
    monkeypatch.setattr(siblings, "after_rejection", lambda p, q, weight: (p, weight))  # the draft's own is traversal's
    found = distance(comb(links=2, siblings=(1, 1), most=1), traversal, toys=TOYS[:1])
    enumeration.decided.cache_clear()
    assert found > 1e-3


def test_siblings_verified_as_if_drawn_with_replacement_are_found_out(monkeypatch):
    """The negative control: the verifier forgets that a rejected candidate cannot come again."""
    real = siblings.without
    enumeration.decided.cache_clear()
    monkeypatch.setattr(siblings, "without", lambda v, token, instead: real(v, token, 1.0) if instead == 1.0 else v)
    assert distance(comb(links=2, siblings=(1, 2)), toys=TOYS[:1]) > 1e-3
    enumeration.decided.cache_clear()


def test_a_sibling_chosen_after_the_drafts_token_is_seen_is_found_out(monkeypatch):
    """The negative control: what comes beside token 0 is picked, what comes beside others is drawn."""
    real = enumeration._drawn_next

    def choosy(rows, is_greedy, depth, index):
        picked = rows.left**8 if index == 0 else rows.left
        sure = rows.left[:, :1] == 0  # the draft was token 0
        return real(rows._replace(left=np.where(sure, picked, rows.left)), is_greedy, depth, index)

    monkeypatch.setattr(enumeration, "_drawn_next", choosy)
    assert distance(comb(links=2, siblings=(1, 1)), toys=TOYS[:1]) > 1e-4
