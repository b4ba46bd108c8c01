"""What replays predict of rules, against sums and against the costs at which nothing is gained."""

import numpy as np
import pytest

from experiments.lib.smoke import made_up_trace, tiny_pair
from specdec_jax.costs.cost_model import cost_model
from specdec_jax.metrics.intervals import ratio_of_totals
from specdec_jax.metrics.predicted import as_fast, costs_counted, faster, predicted
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import select
from specdec_jax.stopping import phase_length, static, survival
from specdec_jax.text.generation import build_pair

DRAFTS = 4
TIMES = {1: 1.0, 3: 1.1, 5: 1.3}


def pair_with(c, times=TIMES):
    costs = cost_model(c, times)
    return build_pair(*tiny_pair(), costs=costs, max_draft_length=DRAFTS, verification_widths=(1, 3, 5))


@pytest.fixture(scope="module")
def trace():
    return made_up_trace(texts=6, tokens=24)


def test_a_static_length_breaks_even_at_its_c(trace):
    rule = static(draft_length=2)
    c = predicted(pair_with(0.1), trace, rule, 64).break_even
    assert 0.1 < c < 2
    assert predicted(pair_with(c), trace, rule, 64).speedup.estimate == pytest.approx(1.0)
    assert predicted(pair_with(0.9 * c), trace, rule, 64).speedup.estimate > 1
    never = predicted(pair_with(0.1), trace, static(draft_length=0), 64)
    assert np.isnan([never.break_even, never.acceptance_rate]).all() and never.speedup.estimate == 1


def test_rules_that_weigh_costs_are_told_the_pairs_and_phases_are_those_of_the_monitor(trace):
    pair = pair_with(0.02, {1: 1.0, 3: 1.4, 5: 2.0})
    costs = costs_counted(pair)
    told = {"drafter_cost": 0.02, "verification_times": costs.verification_times(DRAFTS)[None]}
    found = replay(trace, survival(), told, max_draft_length=DRAFTS).seconds(costs)[0]
    np.testing.assert_allclose(predicted(pair, trace, survival(), 64).seconds, found)
    assert not np.allclose(replay(trace, survival(), max_draft_length=DRAFTS).seconds(costs)[0], found)
    rule = phase_length(routine_length=3, reasoning_length=1)
    calm = trace._replace(raw_target_entropy=trace.raw_target_entropy * 0)
    assert predicted(pair_with(0.1), calm, rule, 64).seconds == pytest.approx(
        predicted(pair_with(0.1), trace, static(draft_length=3), 64).seconds
    )


def test_two_rules_are_compared_text_by_text(trace):
    pair = pair_with(0.1)
    found = [predicted(pair, trace, static(draft_length=length), 64) for length in (0, 1, 2)]
    best = max(found, key=lambda one: one.speedup.estimate)
    plain, marks = found[0], as_fast(found)
    assert faster(best, plain).estimate == pytest.approx(best.speedup.estimate)
    assert marks[found.index(best) if best is not plain else 0] and not marks[0]
    assert faster(plain, best).high < 1
    alone = [predicted(pair, select(trace, [0]), one.policy, 64) for one in found]
    assert all(as_fast(alone)), "one text tells nothing apart"


def test_texts_that_differ_more_than_rules_do_tell_them_apart(trace):
    one = predicted(pair_with(0.1), trace, static(draft_length=1), 64)
    plain = trace.length * 1.0

    def taking(seconds):
        return one._replace(seconds=seconds, speedup=ratio_of_totals(plain, seconds))

    easy = plain / np.linspace(1, 4, trace.num_texts)
    found = [taking(easy * 1.02), taking(easy), taking(easy * np.tile([0.9, 1.2], trace.num_texts // 2))]
    assert found[0].speedup.high > found[1].speedup.low, "their own intervals overlap"
    assert as_fast(found) == [False, True, True]


def test_every_number_is_total_over_total(trace):
    pair, rule = pair_with(0.2), static(draft_length=3)
    one, found = predicted(pair, trace, rule, 64), replay(trace, static(), {"draft_length": 3}, max_draft_length=DRAFTS)
    assert one.speedup.estimate == pytest.approx(float(found.total_speedup(costs_counted(pair))[0]))
    assert one.tokens == pytest.approx(trace.num_positions / found.rounds.sum())
    assert one.drafted == pytest.approx(found.drafted.sum() / found.rounds.sum())


def test_costs_that_are_estimated_are_c_by_bytes_and_verification_for_nothing():
    pair = build_pair(*tiny_pair(), costs="estimated", max_draft_length=DRAFTS)
    costs = costs_counted(pair)
    assert costs.ratio == pair.drafter_cost and costs.verification_times(DRAFTS).tolist() == [1.0] * (DRAFTS + 1)
