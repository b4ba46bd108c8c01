"""Which candidate is right: recovered afterwards, each is as often as when candidates are drawn and tried."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_oracles as oracles
import pytest
import replayed
from scipy import stats

from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import ACCEPT, draw
from specdec_jax.lossless import toys
from specdec_jax.replay import chains
from specdec_jax.replay.chains import CANDIDATES, Rejected, right_candidate

VOCAB, DRAWS = 5, 120_000
P = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
Q = np.array([0.2, 0.05, 0.45, 0.1, 0.2])


def by_enumeration(p, q, left=CANDIDATES, reached=1.0):
    """[C+1, V]: drawn forwards, the chance that candidate i is accepted as token v; the last row: none of them is."""
    found = np.zeros((left + 1, VOCAB))
    if left == 0 or not q.sum():
        found[-1] = reached * p
        return found
    q = q / q.sum()
    found[0] = reached * np.minimum(p, q)
    rejected = np.maximum(q - p, 0)
    rest = np.maximum(p - q, 0)
    for token in np.flatnonzero(rejected):
        without = np.where(np.arange(VOCAB) == token, 0.0, q)
        below = by_enumeration(rest / rest.sum(), without, left - 1, reached * rejected[token])
        found[1:] += below
    return found


def log(values):
    return jnp.log(jnp.asarray(np.broadcast_to(values, (DRAWS, VOCAB))))


def observed(p, q, seed):
    """[C+1, V]: tokens of the target, whose candidate is recovered afterwards."""
    rng = np.random.default_rng(seed)
    uniform = lambda *named: jnp.asarray(rng.random(DRAWS, np.float32))  # noqa: E731
    token = draw(jnp.exp(log(p)), uniform())
    p_token, q_token = jnp.asarray(p)[token], jnp.asarray(q)[token]
    first = draw(jnp.exp(log(np.maximum(q - p, 0))), uniform())
    found = right_candidate(Rejected(log(p), log(q), log(q), first, token), jnp.ones((DRAWS,), bool), uniform)
    accepted = uniform(0, ACCEPT) * p_token < q_token
    place = np.where(accepted, 0, np.where(np.asarray(found) == 0, CANDIDATES, found))
    counts = np.zeros((CANDIDATES + 1, VOCAB))
    np.add.at(counts, (place, np.asarray(token)), 1)
    return counts


def p_value(counts, expected):
    some = expected > 1e-9
    if counts[~some].any():
        return 0.0
    return stats.chisquare(counts[some], expected[some] * counts.sum()).pvalue


@pytest.mark.often(1)
@pytest.mark.parametrize(("p", "q"), [(P, Q), (Q, P), (P, np.array([0.0, 0.0, 0.0, 0.4, 0.6]))])
def test_candidates_reconstructed_from_texts_have_the_law_of_drawn_ones(p, q):
    expected = by_enumeration(p, q)
    np.testing.assert_allclose(expected.sum(axis=0), p, atol=1e-12)  # recursive rejection is lossless
    assert p_value(observed(p, q, 3), expected) > 1e-3


def test_candidates_drawn_with_replacement_are_detected(monkeypatch):
    """The negative control: a drafter that keeps the rejected token among those it draws from."""
    monkeypatch.setattr(chains.sampling, "without", lambda q, token, instead: q)
    counts, expected = observed(P, Q, 3), by_enumeration(P, Q)
    assert p_value(counts, expected) < 1e-12


def test_greedy_candidates_are_ranks():
    raw = jnp.log(jnp.asarray([[0.1, 0.2, 0.2, 0.5, 0.0]] * VOCAB))
    token = jnp.arange(VOCAB, dtype=jnp.int32)
    hot = jnp.log(jnp.asarray([[0.0, 0.0, 0.0, 1.0, 0.0]] * VOCAB))
    found = Rejected(hot, hot, raw, jnp.full((VOCAB,), 3, jnp.int32), token)
    right = jax.jit(lambda found: right_candidate(found, jnp.zeros((VOCAB,), bool), lambda *named: jnp.zeros((VOCAB,))))
    np.testing.assert_array_equal(right(found), [3, 1, 2, 0, 0])  # of two alike the first; token 4 is the fifth


MOST, LIMIT = 4, 24
TABLE, READER = toys.table_model(VOCAB), toys.reading_table_model(VOCAB)
PAIR = toys.toy_pair(VOCAB, 3, distance=0.8)
TARGET, DRAFTER = jnp.asarray(PAIR.target), jnp.asarray(PAIR.drafter)
DEAF = toys.ReadingTable(DRAFTER, jnp.zeros((VOCAB, VOCAB)))  # reads its target, and makes nothing of it
PROMPTS = [[a, b] for a in range(5) for b in range(5)]


def trace_of(prompts, drafter=TABLE, params=DRAFTER, **warp):
    both = ModelParams(TARGET, params)
    return replayed.trace_of((TABLE, drafter), both, prompts, most=MOST, limit=LIMIT, seed=0, **warp)


def contexts(trace, prompts):
    """The two tokens before every token of the answers, [N, T, 2]."""
    whole = np.concatenate([np.asarray(prompts), trace.tokens], axis=1)
    return np.stack([whole[:, :-2], whole[:, 1:-1]], axis=-1)


@pytest.fixture(scope="module")
def greedy():
    return trace_of(PROMPTS, temperature=0.0)


def test_greedy_candidates_are_the_ranks_in_the_drafters_table(greedy):
    ranks = np.argsort(np.argsort(-PAIR.drafter, axis=-1), axis=-1)
    before = contexts(greedy, PROMPTS)
    rank = np.take_along_axis(ranks[before[..., 0], before[..., 1]], greedy.tokens[..., None], axis=2)[..., 0]
    np.testing.assert_array_equal(greedy.accepted[:, :LIMIT], rank == 0)
    np.testing.assert_array_equal(greedy.candidate[:, :LIMIT], np.where(rank < 4, rank, 0))
    assert not greedy.candidate[:, LIMIT].any() and set(rank.flat) >= {0, 1, 2, 3}


@pytest.mark.seldom
def test_chains_of_a_drafter_that_makes_nothing_of_what_it_reads_have_the_texts_candidates(greedy):
    chains = trace_of(PROMPTS, READER, DEAF, temperature=0.0)
    run, read = (np.minimum(trace.accepted_runs(), MOST) for trace in (greedy, chains))
    right = np.take_along_axis(greedy.candidate, np.arange(LIMIT + 1)[None, :] + run, axis=1)  # after a round's run
    np.testing.assert_array_equal(read[:, :LIMIT], run[:, :LIMIT])
    np.testing.assert_array_equal(chains.candidate[:, :LIMIT], right[:, :LIMIT])


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize(("drafter", "params"), [(TABLE, DRAFTER), (READER, DEAF)])
def test_sampled_candidates_are_right_as_often_as_they_ought_to_be(drafter, params):
    """Of every context and token, the chance by enumeration that the second, third, fourth candidate is that token."""
    temperature, prompts = 0.8, [[1, 2]] * 400
    trace = trace_of(prompts, drafter, params, temperature=temperature)
    before, expected, spread, seen = contexts(trace, prompts), np.zeros(4), np.zeros(4), np.zeros(4)
    first = ~trace.accepted[:, :LIMIT]
    assert first.sum() > 2000
    for text, at in zip(*np.nonzero(first), strict=True):
        p, q = (oracles.warp(table[tuple(before[text, at])], temperature) for table in (PAIR.target, PAIR.drafter))
        chance = by_enumeration(p, q)[1:, trace.tokens[text, at]]
        chance = np.roll(chance / chance.sum(), 1)  # none of them first
        expected, spread = expected + chance, spread + chance * (1 - chance)
        seen[trace.candidate[text, at]] += 1
    assert np.all(np.abs(seen - expected) < 4 * np.sqrt(spread)), (seen, expected)
