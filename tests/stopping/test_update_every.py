"""update_every: the wrapped rule learns every n-th round that drafted, on that round's result; all else is its own."""

import jax
import numpy as np
import pytest
import stopping_oracles as twins
from stopping_cases import ROWS, outcome, play_rows, play_twin

from specdec_jax.decoding.prefill import counted, num_programs
from specdec_jax.stopping.adaedl import adaedl
from specdec_jax.stopping.hf_heuristic import hf_heuristic
from specdec_jax.stopping.update_every import update_every
from specdec_jax.text.strategies import choose

LIVELY = {"step": 0.3, "threshold_decay": 0.5, "target_acceptance": 0.6}


class Slow(twins.Rule):
    """Any twin, taught every n-th round that drafted."""

    def __init__(self, inner, rounds):
        self.inner, self.rounds, self.since = inner, rounds, 0
        self.begins, self.draws, self.goes_on, self.shown = inner.begins, inner.draws, inner.goes_on, inner.shown

    def learns(self, drafted, accepted, most):
        self.since += drafted > 0
        if self.since == self.rounds:
            self.inner.learns(drafted, accepted, most)
            self.since = 0


def lively_adaedl(keep):
    return twins.AdaEDL(keep=keep, epsilon=0.3, beta2=0.5, alpha=0.6)


@pytest.mark.parametrize("rounds, keep", [(1, False), (3, True), (4, False)])
def test_every_round_is_the_twins(rounds, keep):
    policy = update_every(adaedl(keep_checked_token=keep))
    played, _ = play_rows(policy, LIVELY | {"rounds": rounds})
    for row in range(ROWS):
        expected = play_twin(Slow(lively_adaedl(keep), rounds), row)
        for ours, his in zip(played, expected, strict=True):
            np.testing.assert_allclose(ours[:, row], his, rtol=1e-4, atol=1e-5)
    assert len(np.unique(played[3])) > 2


def test_the_number_of_rounds_is_a_rows_own():
    policy = update_every(hf_heuristic())
    state = policy.init(3, draft_length=5, rounds=[1, 2, 3])
    shown = []
    for _ in range(4):
        state = policy.update(state, *outcome([5] * 3, [0] * 3))
        shown.append(np.asarray(policy.threshold(state)).tolist())
    assert shown == [[4, 5, 5], [3, 4, 5], [2, 4, 4], [1, 3, 4]]


def test_a_round_without_drafts_is_not_counted():
    policy = update_every(adaedl())
    state = policy.init(1, rounds=2, **LIVELY)
    for drafted in (5, 0, 0):
        state = policy.update(state, *outcome([drafted], [0]))
    assert np.asarray(policy.threshold(state))[0] == np.float32(0.7)
    state = policy.update(state, *outcome([5], [0]))
    assert np.asarray(policy.threshold(state))[0] > 0.7


def test_its_hyperparameters_are_the_policys_and_one_more():
    hyperparameters = update_every(hf_heuristic()).hyperparameters
    assert hyperparameters == {**hf_heuristic().hyperparameters, "rounds": 4} and len(hyperparameters) > 1
    chosen = choose("policy", "update_every(policy=max_confidence, threshold=0.4, rounds=16)")
    assert chosen.given == {"threshold": 0.4, "rounds": 16}
    compiled = jax.jit(counted(lambda hyperparameters: chosen.init(2, **hyperparameters)))
    compiled({"threshold": 0.1, "rounds": 3})
    compiled({"threshold": 0.2, "rounds": 5})
    assert num_programs(compiled) == 1
