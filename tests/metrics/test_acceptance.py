"""Figures by task with their intervals, and what they predict, against sums and simulations."""

import numpy as np
import pytest
from refusals import refusals

from experiments.lib.smoke import made_up_trace
from specdec_jax.metrics import acceptance as figures_of
from specdec_jax.metrics.acceptance import best_draft_length, by_draft, by_task, expected_speedup, expected_tokens
from specdec_jax.metrics.intervals import RESAMPLES
from specdec_jax.metrics.judging import Judgement

TASKS = ["qa", "math", "qa", "math", "qa"]


def judgement(agreement, positions):
    """Acceptance at 0.7 is half the agreement, at 1.0 a quarter."""
    agreement = np.array(agreement, np.float64)
    mass = np.stack([agreement / 2, agreement / 4], axis=1)
    return Judgement(agreement, mass, np.array(positions), (0.7, 1.0))


def test_positions_weigh_the_same_in_a_task_and_tasks_in_their_mean():
    figures = by_task(judgement([0.2, 0.5, 0.8, 0.5, 0.0], [10, 5, 30, 7, 60]), TASKS)
    assert list(figures) == ["qa", "math", "macro"]
    qa, math, macro = figures.values()
    assert (qa.texts, qa.positions, math.texts, macro.texts, macro.positions) == (3, 100, 2, 5, 112)
    assert qa.agreement.estimate == pytest.approx((2 + 24) / 100)
    assert qa.acceptance[0.7].estimate == pytest.approx(0.13) and qa.acceptance[1.0].estimate == pytest.approx(0.065)
    assert math.agreement == pytest.approx((0.5, 0.5, 0.5))  # both texts say the same
    assert macro.agreement.estimate == pytest.approx((0.26 + 0.5) / 2)
    assert macro.acceptance[1.0].estimate == pytest.approx((0.065 + 0.125) / 2)
    single = by_task(judgement([0.2, 0.4, 0.6], [9, 9, 9]), ["qa", "math", "math"])  # one text has no interval
    assert [np.isnan(single[task].agreement.low) for task in ("qa", "macro", "math")] == [True, True, False]


def test_intervals_cover_what_was_drawn_from_and_the_mean_of_tasks_is_narrower():
    rng, covered, runs = np.random.default_rng(0), 0, 60
    truth = {"qa": 0.3, "math": 0.6}
    tasks = [task for task in truth for _ in range(30)]
    for _ in range(runs):
        drawn = np.clip([rng.normal(truth[task], 0.1) for task in tasks], 0, 1)
        figures = by_task(judgement(drawn, rng.integers(50, 128, len(tasks))), tasks)
        _, low, high = figures["macro"].agreement
        covered += low < 0.45 < high
        wide = max(figures[task].agreement.high - figures[task].agreement.low for task in truth)
        assert high - low < wide
    assert 0.85 <= covered / runs < 1


def test_the_interval_of_the_mean_resamples_within_each_task():
    """The figures of published model cards: the same draws, made by hand."""
    rng = np.random.default_rng(3)
    values, positions = rng.random(12), rng.integers(1, 99, 12)
    groups = [np.arange(12) < 5, np.arange(12) >= 5]
    rng, means = np.random.default_rng(0), []
    for group in groups:
        drawn = rng.integers(0, group.sum(), (RESAMPLES, group.sum()))
        size = positions[group][drawn]
        means.append((values[group][drawn] * size).sum(1) / size.sum(1))
    expected = np.quantile(np.mean(means, axis=0), (0.025, 0.975))
    assert figures_of.mean_of_tasks(values, positions, groups)[1:] == pytest.approx(tuple(expected), abs=1e-12)


@pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.9, 1.0])
def test_expected_tokens_is_the_mean_of_a_simulation(acceptance):
    hits = np.random.default_rng(0).random((100_000, 5)) < acceptance
    simulated = 1 + np.cumprod(hits, axis=1).sum(axis=1).mean()
    assert expected_tokens(acceptance, 5) == pytest.approx(simulated, abs=0.02)


def test_expected_tokens_speedup_and_the_best_draft_length():
    tokens = expected_tokens(np.array([[0.5], [1.0]]), np.array([0, 1, 2]))
    np.testing.assert_allclose(tokens, [[1, 1.5, 1.75], [1, 2, 3]])
    np.testing.assert_allclose(expected_speedup(0.5, np.array([0, 1, 2]), 0.25), [1, 1.5 / 1.25, 1.75 / 1.5])
    assert expected_speedup(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / 0.2 / 1.25)
    assert best_draft_length(0.5, 0.25) == 1  # 1.2 against 1.167 and 1
    assert best_draft_length(0.2, 0.25) == best_draft_length(0.25, 0.25) == 0  # a drafter that costs what it brings
    assert best_draft_length(1.0, 0.1, longest=9) == 9
    lengths = [best_draft_length(a, 0.05) for a in (0.3, 0.5, 0.7, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] < 32


def test_acceptance_by_draft_counts_every_position_a_round_could_begin_at():
    trace = made_up_trace(texts=6, tokens=24)
    found = by_draft(trace)
    for draft in range(1, trace.max_draft_length + 1):
        texts = [bits[:length] for bits, length in zip(trace.accepted, trace.length, strict=True)]
        begins = [bits[at : at + draft] for bits in texts for at in range(len(bits) - draft + 1)]
        reached = [bits[-1] for bits in begins if all(bits[:-1])]
        accepted, asked = sum(reached), len(reached)
        assert (draft <= len(found)) == (asked > 0)
        assert not asked or found[draft - 1].estimate == pytest.approx(accepted / asked)
    assert 3 < len(found) < trace.max_draft_length
    assert found[0].low < found[0].estimate < found[0].high
    chains = trace._replace(run=np.full(trace.accepted.shape, 2) * trace.accepted)
    assert [one.estimate for one in by_draft(chains)][1] == 1.0 and by_draft(chains)[2].estimate == 0.0
    assert len(by_draft(chains)) == 3  # nothing is known of a fourth


test_what_is_refused = refusals(
    (lambda: expected_tokens(1.1, 3), "acceptance .* 1.1"),
    (lambda: expected_tokens(float("nan"), 3), "acceptance .* nan"),
    (lambda: expected_tokens(0.5, 2.5), "draft_length .* 2.5"),
    (lambda: expected_tokens(0.5, -1), "draft_length .* -1"),
    (lambda: expected_speedup(0.5, 1, -0.1), "cost_ratio .* -0.1"),
    (lambda: best_draft_length(0.5, 0.1, longest=-1), "longest .* -1"),
    *(
        (lambda tasks=tasks: by_task(judgement([0.2, 0.4], [9, 9]), tasks), "task for each of 2 texts")
        for tasks in (["qa"], ["qa", "macro"], [])
    ),
)
