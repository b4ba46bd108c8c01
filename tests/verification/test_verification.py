"""Verifiers against plain twins of their papers, row by row, ragged and with garbage beyond the drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest

from specdec_jax.decoding.sampling import distributions, make_warp
from specdec_jax.types import Draft, RoundContext
from specdec_jax.verification import block, greedy, rejection

FACTORIES = {"rejection": rejection, "block": block, "greedy": greedy}
K, VOCAB = 4, 6
MIXED = np.resize([1.0, 0.0, 0.7], 200)


def log(prob):
    with np.errstate(divide="ignore"):
        return np.log(prob)


def case(rows, seed=0, temperature=1.0, dtype=np.float32, same=False, chosen=False):
    """Random drafts of all lengths and their distributions; every fourth row's are truncated: supports differ."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, K + 1, VOCAB)) * 2
    q = np.apply_along_axis(oracles.softmax, -1, logits[:, :K] if same else rng.normal(size=(rows, K, VOCAB)) * 2)
    if not same:
        q[::4] *= q[::4] > np.median(q[::4], axis=-1, keepdims=True)
        q /= q.sum(-1, keepdims=True)
        logits[::4][:, :, 0] = -np.inf
    drafts = np.array([[rng.choice(VOCAB, p=distribution) for distribution in row] for row in q], np.int32)
    length = rng.integers(0, K + 1, rows).astype(np.int32)
    log_q = log(q)
    for row in range(rows):  # what the loop leaves beyond a draft
        log_q[row, length[row] :] = -np.inf if row % 2 else np.log(1 / VOCAB)
        drafts[row, length[row] :] = VOCAB - 1
    target = distributions(jnp.asarray(logits, dtype), make_warp(rows, temperature))
    one_hot = np.full((rows, K), chosen)
    draft = Draft(jnp.asarray(drafts), None if chosen else jnp.asarray(log_q, dtype), jnp.asarray(one_hot), length)
    return draft, target, (drafts, length, np.eye(VOCAB)[drafts] if chosen else q)


def context(rows):
    zeros = jnp.zeros(rows, jnp.int32)
    return RoundContext(zeros, zeros, zeros, zeros == 0, zeros.astype(jnp.uint32), make_warp(rows), ())


def verified(verifier, draft, target):
    rows = len(draft.length)

    @jax.jit
    def verify(draft, target):
        log_prob_accepted, next_distribution, _ = verifier.verify(verifier.init(rows), draft, target, context(rows))
        return log_prob_accepted, jnp.stack(
            [next_distribution(jnp.full(rows, k, jnp.int32)) for k in range(K + 1)], axis=1
        )

    return [np.asarray(result) for result in verify(draft, target)]


def compare(name, rows, tolerance, **options):
    draft, target, (drafts, length, q) = case(rows, **options)
    log_prob_accepted, weights = verified(FACTORIES[name](), draft, target)
    prob = np.exp(np.asarray(target.log_prob, np.float64))
    length_distribution, next_distribution = oracles.VERIFIERS[name]
    for row in range(rows):
        n = length[row]
        arguments = (drafts[row, :n].tolist(), q[row, :n], prob[row, : n + 1])
        expected = length_distribution(*arguments)
        np.testing.assert_allclose(np.exp(log_prob_accepted[row, : n + 1]), expected, atol=tolerance)
        assert (log_prob_accepted[row, n + 1 :] == -np.inf).all(), "more accepted than drafted"
        for k in np.flatnonzero(expected > tolerance):
            distribution = weights[row, k] / weights[row, k].sum()
            np.testing.assert_allclose(
                distribution, next_distribution(*arguments, k), atol=100 * tolerance / expected[k]
            )


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": MIXED}, {"same": True}, {"chosen": True, "temperature": MIXED}],
    ids=["drawn", "p_is_q", "chosen"],
)
def test_verifiers_are_their_papers(name, options):
    compare(name, 200, 3e-6, **options)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_chosen_draft_has_its_own_distribution_whatever_log_q_holds(name):
    """Several drafters share one log_q: in rows whose drafts were looked up it holds nothing, or what another left."""
    draft, target, _ = case(200, seed=5, chosen=True)
    expected = verified(FACTORIES[name](), draft, target)
    left = case(200, seed=6)[0].log_q
    for log_q in (left, jnp.full_like(left, -jnp.inf)):
        for mine, plain in zip(verified(FACTORIES[name](), draft._replace(log_q=log_q), target), expected, strict=True):
            np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_verifiers_are_their_papers_in_float64(name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        compare(name, 100, 1e-12, seed=1, dtype=np.float64)


@pytest.mark.parametrize("name", FACTORIES)
def test_all_verifiers_agree_at_temperature_0(name):
    compare(name, 200, 1e-6, seed=2, temperature=0.0, chosen=name == "greedy")


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("same", [False, True])
def test_the_number_of_accepted_drafts_always_has_a_distribution(name, same):
    """Block verification once gave NaN where a prefix is certain: 1 - h rounded below zero."""
    draft, target, _ = case(3000, seed=3, same=same)
    log_prob_accepted, weights = verified(FACTORIES[name](), draft, target)
    np.testing.assert_allclose(np.exp(log_prob_accepted).sum(axis=1), 1.0, atol=2e-5)
    assert np.isfinite(weights).all() and (weights >= 0).all()


def test_block_verification_accepts_more():
    draft, target, _ = case(500, seed=4)
    accepted = [np.exp(verified(v(), draft, target)[0]) @ np.arange(K + 1) for v in (rejection, block)]
    assert accepted[1].mean() > accepted[0].mean() + 0.01


def test_sun_et_al_s_example():
    """P = (1/3, 2/3), Q = (2/3, 1/3), two drafts: 10/9 tokens against 11/9 (arXiv 2403.10444, section 2)."""
    p, q, expected = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3]), {}
    target = distributions(jnp.tile(jnp.asarray(np.log(p), jnp.float32), (1, 3, 1)), make_warp(1, 1.0))
    for name in ("rejection", "block"):
        verifier, total = FACTORIES[name](), 0.0
        for drafts in np.ndindex(2, 2):
            log_q = jnp.tile(jnp.asarray(np.log(q), jnp.float32), (1, 2, 1))
            draft = Draft(jnp.array([drafts], jnp.int32), log_q, jnp.zeros((1, 2), bool), jnp.array([2], jnp.int32))
            log_prob_accepted, *_ = verifier.verify((), draft, target, context(1))
            total += q[list(drafts)].prod() * float((np.exp(log_prob_accepted) @ np.arange(3))[0])
        expected[name] = total
    np.testing.assert_allclose([expected["rejection"], expected["block"]], [10 / 9, 11 / 9], rtol=1e-5)


@pytest.mark.parametrize("name", FACTORIES)
def test_without_drafts_the_next_token_is_the_targets(name):
    prob = np.array([[0.2, 0.3, 0.5]])
    warp = make_warp(1, 0.0 if name == "greedy" else 1.0)
    target = distributions(jnp.asarray(np.log(prob)[:, None], jnp.float32), warp)
    empty = jnp.zeros((1, 0), jnp.int32)
    draft = Draft(empty, None, empty.astype(bool), jnp.zeros(1, jnp.int32))
    log_prob_accepted, next_distribution, _ = FACTORIES[name]().verify((), draft, target, context(1))
    np.testing.assert_array_equal(np.exp(log_prob_accepted), [[1.0]])
    expected = [[0, 0, 1]] if name == "greedy" else prob
    np.testing.assert_allclose(next_distribution(jnp.zeros(1, jnp.int32)), expected, rtol=1e-5)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_row_is_verified_as_if_alone(name):
    draft, target, _ = case(12, seed=5, temperature=0.0 if name == "greedy" else 1.0)
    take = functools.partial(jax.tree.map, lambda leaf: leaf[3:4])
    together, alone = verified(FACTORIES[name](), draft, target), verified(FACTORIES[name](), take(draft), take(target))
    for many, one in zip(together, alone, strict=True):
        np.testing.assert_array_equal(many[3:4], one)
