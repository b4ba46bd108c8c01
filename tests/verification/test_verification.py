"""Verifiers against plain twins of their papers, row by row, ragged, with garbage beyond the drafts; also of trees."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest
from stopping_cases import context
from verifier_cases import VOCAB, K, case, verified

from specdec_jax.contrib.trees import TreeDraft, traversal
from specdec_jax.contrib.trees.siblings import outcomes
from specdec_jax.decoding.sampling import distributions, make_warp
from specdec_jax.types import Draft
from specdec_jax.verification import block, by_phase, greedy, rejection

FACTORIES = {"rejection": rejection, "block": block, "greedy": greedy}
MIXED = np.resize([1.0, 0.0, 0.7], 200)


DRAFTS = {
    "drawn": {"temperature": MIXED},
    "p_is_q": {"same": True},
    "chosen": {"chosen": True, "temperature": MIXED},
    "temperature 0": {"seed": 2, "temperature": 0.0},
    "temperature 0, chosen": {"seed": 2, "temperature": 0.0, "chosen": True},
}


PAPERS = [(name, drafted) for name in ("rejection", "block") for drafted in DRAFTS]


@pytest.mark.parametrize(("name", "drafted"), [*PAPERS, ("greedy", "temperature 0, chosen")])
def test_verifiers_are_their_papers(name, drafted):
    draft, target, (drafts, length, q) = case(200, **DRAFTS[drafted])
    log_prob_accepted, weights = verified(FACTORIES[name](), draft, target)
    prob = np.exp(np.asarray(target.log_prob, np.float64))
    length_distribution, next_distribution = oracles.VERIFIERS[name]
    for row in range(200):
        n = length[row]
        arguments = (drafts[row, :n].tolist(), q[row, :n], prob[row, : n + 1])
        expected = length_distribution(*arguments)
        np.testing.assert_allclose(np.exp(log_prob_accepted[row, : n + 1]), expected, atol=3e-6)
        assert (log_prob_accepted[row, n + 1 :] == -np.inf).all(), "more accepted than drafted"
        for k in np.flatnonzero(expected > 3e-6):
            distribution = weights[row, k] / weights[row, k].sum()
            np.testing.assert_allclose(distribution, next_distribution(*arguments, k), atol=3e-4 / expected[k])


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_chosen_draft_has_its_own_distribution_whatever_log_q_holds(name):
    """Several drafters share one log_q: in rows whose drafts were looked up it holds nothing, or what another left."""
    draft, target, _ = case(200, seed=5, chosen=True)
    expected = verified(FACTORIES[name](), draft, target)
    left = case(200, seed=6)[0].log_q
    for log_q in (left, np.full_like(left, -np.inf)):
        for mine, plain in zip(verified(FACTORIES[name](), draft._replace(log_q=log_q), target), expected, strict=True):
            np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("same", [False, True])
def test_the_number_of_accepted_drafts_always_has_a_distribution(name, same):
    """Block verification once gave NaN where a prefix is certain: 1 - h rounded below zero."""
    draft, target, _ = case(3000, seed=3, same=same)
    log_prob_accepted, weights = verified(FACTORIES[name](), draft, target)
    np.testing.assert_allclose(np.exp(log_prob_accepted).sum(axis=1), 1.0, atol=2e-5)
    assert np.isfinite(weights).all() and (weights >= 0).all()


def test_sun_et_al_s_example():
    """P = (1/3, 2/3), Q = (2/3, 1/3), two drafts: 10/9 tokens against 11/9 (arXiv 2403.10444, section 2)."""
    p, q, expected = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3]), {}
    target = jax.jit(distributions)(np.tile(np.log(p).astype(np.float32), (1, 3, 1)), make_warp(1, 1.0))
    for name in ("rejection", "block"):
        verifier, total = FACTORIES[name](), 0.0
        verify = jax.jit(lambda draft, verifier=verifier: verifier.verify((), draft, target, context(1))[0])
        for drafts in np.ndindex(2, 2):
            log_q = np.tile(np.log(q).astype(np.float32), (1, 2, 1))
            draft = Draft(np.array([drafts], np.int32), log_q, np.zeros((1, 2), bool), np.array([2], np.int32))
            total += q[list(drafts)].prod() * float((np.exp(verify(draft)) @ np.arange(3))[0])
        expected[name] = total
    np.testing.assert_allclose([expected["rejection"], expected["block"]], [10 / 9, 11 / 9], rtol=1e-5)


MOST = 2


def with_siblings(draft, drafts, q, seed=0):
    """Siblings drawn without replacement, none to two beside a draft; beyond them and the draft stands garbage."""
    rng, rows = np.random.default_rng(seed), len(drafts)
    siblings = np.full((rows, K, MOST), VOCAB - 1, np.int32)
    counts = rng.integers(0, MOST + 1, (rows, K)).astype(np.int32)
    for row in range(rows):
        for depth in range(draft.length[row]):
            left = q[row, depth].copy()
            left[drafts[row, depth]] = 0
            counts[row, depth] = min(counts[row, depth], np.count_nonzero(left))
            for index in range(counts[row, depth]):
                siblings[row, depth, index] = rng.choice(VOCAB, p=left / left.sum())
                left[siblings[row, depth, index]] = 0
    return TreeDraft(*draft, siblings=siblings, sibling_counts=counts)


@jax.jit
def decided(draft, target):
    """Chances of every number of accepted drafts [B, K+1], then of each sibling [B, K+1, M+1], the rest [B, K+1, V]."""
    verifier, now = traversal(), context(len(draft.length), 1.0)
    log_prob_accepted, next_distribution, _ = verifier.verify((), draft, target, now)
    found = []
    for accepted in (jnp.full_like(draft.length, k) for k in range(K + 1)):
        found.append(outcomes(verifier, next_distribution, draft, target, accepted, now))
    several, rest = (jnp.stack(leaves, 1) for leaves in ([o.chance for o in found], [o.rest for o in found]))
    return jnp.exp(log_prob_accepted), several, rest


@pytest.mark.parametrize("same", [False, True])
def test_it_is_its_paper(same):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        draft, target, (drafted, _, q) = case(150, seed=6, dtype=np.float64, same=same)
        draft = with_siblings(draft, drafted, q)
        lengths, several, rest = map(np.asarray, decided(draft, target))
    prob, siblings = np.exp(np.asarray(target.log_prob, np.float64)), np.asarray(draft.siblings)
    for row in range(150):
        n, counts = int(draft.length[row]), np.asarray(draft.sibling_counts)[row]
        drafts = np.asarray(draft.tokens)[row, :n].tolist()
        tried = [siblings[row, depth, : counts[depth]].tolist() for depth in range(n)]
        expected = oracles.traversal_outcomes(drafts, tried, q[row, :n], prob[row, : n + 1])
        np.testing.assert_allclose(lengths[row].sum(), 1.0, atol=1e-12)
        for (accepted, sibling), (chance, following) in expected.items():
            index = 0 if sibling is None else 1 + tried[accepted].index(sibling)
            np.testing.assert_allclose(lengths[row, accepted] * several[row, accepted, index], chance, atol=1e-12)
            if sibling is None and chance > 1e-9:
                found = rest[row, accepted] / rest[row, accepted].sum()
                np.testing.assert_allclose(found, following, atol=1e-12 / chance)


def test_it_is_refused_where_another_verifier_would_decide_about_siblings():
    with pytest.raises(ValueError, match="by_phase takes no traversal, which decides about trees itself: use block"):
        by_phase(reasoning=traversal())
