"""Traversal verification against a plain twin that walks the tree, and against block verification."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest
from test_verification import VOCAB, K, case, context

from specdec_jax.contrib.trees import TreeDraft, traversal
from specdec_jax.contrib.trees.siblings import outcomes
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.verification import block, by_phase

MOST = 2


def with_siblings(draft, drafts, q, seed=0, none=False):
    """Siblings drawn without replacement, none to two beside a draft; beyond them and the draft stands garbage."""
    rng, rows = np.random.default_rng(seed), len(drafts)
    siblings = np.full((rows, K, MOST), VOCAB - 1, np.int32)
    beside = rng.integers(0, MOST + 1, (rows, K)).astype(np.int32) * (0 if none else 1)
    for row in range(rows):
        for depth in range(draft.length[row]):
            left = q[row, depth].copy()
            left[drafts[row, depth]] = 0
            beside[row, depth] = min(beside[row, depth], np.count_nonzero(left))
            for index in range(beside[row, depth]):
                siblings[row, depth, index] = rng.choice(VOCAB, p=left / left.sum())
                left[siblings[row, depth, index]] = 0
    return TreeDraft(*draft)._replace(siblings=jnp.asarray(siblings), sibling_counts=jnp.asarray(beside))


def decided(verifier, draft, target, temperature=1.0):
    """Chances of every number of accepted drafts [B, K+1], then of each sibling [B, K+1, M+1], the rest [B, K+1, V]."""
    rows = len(draft.length)
    told = context(rows)._replace(warp=make_warp(rows, temperature))

    @jax.jit
    def decide(draft, target):
        log_prob_accepted, next_distribution, _ = verifier.verify(verifier.init(rows), draft, target, told)
        found = []
        for accepted in (jnp.full(rows, k, jnp.int32) for k in range(K + 1)):
            found.append(outcomes(verifier, next_distribution, draft, target, accepted, told))
        several, rest = (jnp.stack(leaves, 1) for leaves in ([o.chance for o in found], [o.rest for o in found]))
        return jnp.exp(log_prob_accepted), several, rest

    return [np.asarray(result) for result in decide(draft, target)]


def sampled_case(rows, **options):
    draft, target, (drafts, _, q) = case(rows, **options)
    draft = with_siblings(draft, drafts, q)
    return draft, target, q


@pytest.mark.parametrize("same", [False, True])
def test_it_is_its_paper(same):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        draft, target, q = sampled_case(150, seed=6, dtype=np.float64, same=same)
        lengths, several, rest = decided(traversal(), draft, target)
    prob, siblings = np.exp(np.asarray(target.log_prob, np.float64)), np.asarray(draft.siblings)
    for row in range(150):
        n, beside = int(draft.length[row]), np.asarray(draft.sibling_counts)[row]
        drafts = np.asarray(draft.tokens)[row, :n].tolist()
        tried = [siblings[row, depth, : beside[depth]].tolist() for depth in range(n)]
        expected = oracles.traversal_outcomes(drafts, tried, q[row, :n], prob[row, : n + 1])
        np.testing.assert_allclose(lengths[row].sum(), 1.0, atol=1e-12)
        for (accepted, sibling), (chance, following) in expected.items():
            index = 0 if sibling is None else 1 + tried[accepted].index(sibling)
            np.testing.assert_allclose(lengths[row, accepted] * several[row, accepted, index], chance, atol=1e-12)
            if sibling is None and chance > 1e-9:
                found = rest[row, accepted] / rest[row, accepted].sum()
                np.testing.assert_allclose(found, following, atol=1e-12 / chance)


def test_without_siblings_it_is_block():
    draft, target, (drafts, _, q) = case(200, seed=7)
    bare = with_siblings(draft, drafts, q, none=True)
    block_lengths, _, block_rest = decided(block(), bare, target)
    lengths, several, rest = decided(traversal(), bare, target)
    np.testing.assert_allclose(lengths, block_lengths, atol=3e-6)
    np.testing.assert_allclose(several[:, :, 0], 1.0, atol=1e-6)
    reached = block_lengths > 1e-3
    normal = [weights[reached] / weights[reached].sum(-1, keepdims=True) for weights in (rest, block_rest)]
    np.testing.assert_allclose(*normal, atol=1e-3)
    assert (
        traversal().verify((), draft, target, context(200))[0].tolist()
        == block().verify((), draft, target, context(200))[0].tolist()
    )


def emitted(found):
    lengths, several, _ = found
    by_sibling = 1.0 - several[:, :, 0]
    return (lengths * (np.arange(K + 1) + by_sibling)).sum(axis=1)


def test_it_accepts_more_than_block_with_siblings_after_it():
    draft, target, _ = sampled_case(600, seed=8)
    assert emitted(decided(traversal(), draft, target)).mean() > emitted(decided(block(), draft, target)).mean() + 0.01


def test_at_temperature_0_the_targets_sibling_is_taken():
    draft, target, (drafts, _, q) = case(200, seed=9, temperature=0.0, chosen=True)
    draft = with_siblings(draft, drafts, np.where(q > 0, 1.0, 1e-9))
    both = [decided(verifier, draft, target, 0.0) for verifier in (traversal(), block())]
    ends = [lengths[:, :, None] * several for lengths, several, _ in both]
    np.testing.assert_allclose(*ends, atol=1e-6)
    assert (ends[0][:, :, 1:] == 1.0).any() and (ends[0][:, :, 0] == 1.0).any()


def test_it_is_refused_where_another_verifier_would_decide_about_siblings():
    with pytest.raises(ValueError, match="by_phase takes no traversal, which decides about trees itself: use block"):
        by_phase(reasoning=traversal())
