"""The bound with foresight: the best length of every round, for known distributions and unknown coins."""

import numpy as np
import pytest

from experiments.lib.smoke import made_up_trace
from specdec_jax.costs.cost_model import cost_model, flat
from specdec_jax.metrics.foresight import drafts_from, with_foresight
from specdec_jax.metrics.prior import chances, fit_prior, learnt_by_text, positions
from specdec_jax.replay.replay import oracle, replay, rounds_of
from specdec_jax.replay.trace import FEATURES
from specdec_jax.stopping import static, survival
from specdec_jax.stopping.survival import GREEDY

MOST = 5


@pytest.fixture(scope="module", params=(0.0, 0.7))
def trace(request):
    return made_up_trace(request.param, texts=8, tokens=24, longest=MOST)


def test_the_draft_of_every_round_is_the_one_that_a_live_round_would_see(trace):
    features, run = drafts_from(trace, MOST), np.minimum(trace.accepted_runs(), MOST)
    for text in range(trace.num_texts):
        for begin in range(int(trace.length[text])):
            hits = 0
            for step in range(MOST):
                at = begin + hits
                hit = hits == step and trace.accepted[text, at]
                seen = trace.path[text, at] if hit else trace.tails[trace.tail_of[text, at], step - hits]
                np.testing.assert_array_equal(features[text, begin, step], seen)
                hits += int(hit)
            assert run[text, begin] == hits


@pytest.mark.parametrize("length", (0, 2, MOST))
def test_rounds_of_one_length_are_those_of_the_static_rule(trace, length):
    room = np.maximum(trace.limit[:, None] - np.arange(trace.accepted.shape[1]) - 1, 0)
    played = rounds_of(trace, np.minimum(length, room), MOST)
    expected = replay(trace, static(), {"draft_length": length}, max_draft_length=MOST)
    for name in ("rounds", "emitted", "drafted", "accepted", "passes", "by_length"):
        np.testing.assert_array_equal(getattr(played, name), getattr(expected, name))
    if length == MOST:  # free drafts are made up to the text's limit, and not beyond it
        np.testing.assert_array_equal(with_foresight(trace, flat(0.0, MOST)).by_length, expected.by_length)


def test_chances_are_those_that_the_prior_was_fitted_on(trace):
    """Along the text they sum to what was accepted, as a logistic regression's do."""
    prior, seen = fit_prior(trace), positions(trace)
    texts, at = np.nonzero(np.arange(trace.accepted.shape[1])[None] < trace.length[:, None])
    first = drafts_from(trace, 1)[texts, at, 0]
    predicted = chances(prior, first, trace.temperature[texts])
    assert abs(predicted.mean() - seen.accepted.mean()) < 0.01
    assert np.corrcoef(predicted, seen.accepted)[0, 1] > 0.3


def test_chances_learnt_by_text_are_the_shares_that_were_accepted():
    """Of two texts as confident as each other one is rejected throughout; the prior takes them for equal."""
    trace = made_up_trace(0.0, texts=2, tokens=64, longest=MOST)
    at = np.arange(trace.accepted.shape[1])[None] < trace.length[:, None]
    path = trace.path.copy()
    path[..., FEATURES.index("max_prob")] = 0.9999
    accepted = at & np.array([[True], [False]])
    trace = trace._replace(path=path, accepted=accepted, tail_of=np.zeros_like(trace.tail_of))
    learnt = learnt_by_text(GREEDY, trace)
    first, second = chances(GREEDY, path[:, 0], trace.temperature, learnt)
    assert first > 0.95 and second < 0.3
    assert abs(np.subtract(*chances(GREEDY, path[:, 0], trace.temperature))) < 1e-9


def test_it_lies_between_rules_and_the_oracle_and_does_not_draft_what_never_pays():
    trace, costs = made_up_trace(0.7, texts=48, tokens=96), cost_model(0.1, {1: 1.0, 4: 1.05, 8: 1.2, 17: 1.5})
    bound = with_foresight(trace, costs).total_speedup(costs)[0]
    hyperparameters = {"drafter_cost": costs.ratio, "verification_times": costs.verification_times(16)[None]}
    rules = [(survival(), hyperparameters), *((static(), {"draft_length": length}) for length in range(6))]
    fastest = max(replay(trace, rule, given).total_speedup(costs)[0] for rule, given in rules)
    assert fastest < bound < oracle(trace).total_speedup(costs)[0]
    costs = flat(5.0, 16)
    assert with_foresight(made_up_trace(0.7), costs).total_speedup(costs)[0] == 1.0
