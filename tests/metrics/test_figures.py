"""Figures by task, tables, intervals and repeated text, each recomputed by hand or in a simulation."""

import io

import numpy as np
import pytest
from refusals import refusals
from rich.console import Console

from experiments.compare import picture
from experiments.lib.smoke import made_up_trace
from experiments.lib.tables import Whole, doubts_of_rows, methods_tables, predictions_table, speedups, summarise
from specdec_jax.metrics import acceptance as figures_of
from specdec_jax.metrics.acceptance import best_draft_length, by_draft, by_task, expected_speedup, expected_tokens
from specdec_jax.metrics.intervals import RESAMPLES, mean_interval, ratio_of_totals, total_speedup
from specdec_jax.metrics.judging import Judgement
from specdec_jax.metrics.repetition import repeated_mask, repeated_share
from specdec_jax.metrics.separation import entropy_factor_interval, fitted_entropy_factor

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


def row(prompt, method, seconds, tokens=60, temperature=0.0, repeated=0.0, equal=None, **counts):
    names = ["num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens"]
    names += ["drafter_passes", "discarded_passes"]
    entry = {"prompt_id": prompt, "method": method, "temperature": temperature, "seconds": seconds}
    entry |= {"num_emitted_tokens": tokens, "repeated_share": repeated, "equals_plain": equal}
    return dict.fromkeys(names, 0) | entry | counts


DRAFTED = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 15}
DRAFTED |= {"drafter_passes": 50, "discarded_passes": 5}
ROWS = [
    row("a", "plain", 2.0, equal=True),
    row("b", "plain", 6.0, repeated=0.5, equal=True),
    row("a", "fast", 1.0, equal=True, **DRAFTED),
    row("b", "fast", 1.5, repeated=0.5, equal=False, **DRAFTED),
]


def test_every_figure(stored):
    tables = methods_tables(summarise(ROWS))
    stored("methods.md", tables[1])
    for width in (60, 80, 81, 200):  # words are never cut
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(Whole(tables[1]))
        assert {"acceptance", "prompts", "discarded", "repeats"} <= set(console.export_text().split())


def test_repeats_loops_and_temperatures():
    """Repeats of a prompt are added up, loops are not clean, and a temperature has its own baseline."""
    again = [row("a", "plain", 1.0, equal=True), row("a", "fast", 2.0, equal=False, **DRAFTED)]
    for rows in ([*ROWS, *again], [*again, *ROWS]):
        fast = summarise(rows)[1]
        assert fast["equal"] == [False, False]
    assert speedups(fast) == pytest.approx([(120 / 3) / (120 / 3), 4.0])
    for share, rival, clean in ((0.2, 0.0, 0), (0.0, 0.2, 0), (0.05, 0.0, 1), (0.0, 0.05, 1)):
        found = summarise([row("a", "plain", 2.0, repeated=rival), row("a", "fast", 1.0, repeated=share)])[1]
        assert len(speedups(found, clean=True)) == clean
    rows = [*ROWS, row("a", "plain", 4.0, temperature=0.8), row("a", "fast", 1.0, temperature=0.8)]
    assert speedups(summarise(rows)[3]) == pytest.approx([4.0])
    assert [s["temperature"] for s in summarise(rows[::-1], baseline="plain")] == [0.0, 0.0, 0.8, 0.8]


def test_rows_that_took_another_time_than_costs_predict_are_doubtful():
    """All rows of a method together; those without a prediction say nothing."""
    took = lambda name, seconds, said: row("a", name, seconds) | {"predicted_seconds": said}  # noqa: E731
    agree = [took("plain", 1.3, 1.0), took("fast", 3.0, 1.0), took("fast", 1.0, 3.0), took("other", 9.0, None)]
    assert doubts_of_rows([*agree, row("a", "old", 1.0)]) == []
    clause = ["decoding took 1.40 (plain), 0.50 (fast) times what the costs predict"]
    assert doubts_of_rows([*agree, took("plain", 1.5, 1.0), took("fast", 1.0, 6.0)]) == clause


def test_predicted_seconds_are_compared_by_method_and_temperature():
    """Of methods after the first at the speed of its prompt; it does not say how far rules are apart, and a method
    without predictions has no line."""
    took = lambda prompt, name, t, said: row(prompt, name, 2.0, temperature=t) | {"predicted_seconds": said}  # noqa: E731
    rows = [took(prompt, "plain", t, said) for t in (0.0, 0.8) for prompt, said in (("a", 4.0), ("b", 1.0))]
    rows += [took("a", "fast", 0.0, 2.0), took("b", "fast", 0.0, 2.2), took("a", "lookup", 0.0, None)]
    rows += [took("a", "slow", 0.0, 2.0), took("a", "slow", 0.8, 1.9)]
    table, note = predictions_table(summarise(rows))
    assert table.splitlines()[0] == "| predicted over measured | greedy | temperature 0.8 |"
    lines = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}
    assert lines == {
        "plain": ["1.250 [0.500–2.000]", "1.250 [0.500–2.000]"],
        "fast": ["1.350 [0.500–2.200]", "–"],
        "slow": ["0.500", "0.475"],
        "apart": ["0.850", "0.000"],
    }
    assert "Apart" in note and predictions_table(summarise([row("a", "plain", 2.0)])) == []


def test_the_picture_has_a_panel_a_temperature_and_the_numbers():
    rows = [*ROWS, row("a", "plain", 4.0, temperature=0.8), row("a", "fast", 1.0, temperature=0.8)]
    figure = picture(summarise(rows), "title")
    greedy, sampled = figure.axes
    assert [text.get_text() for text in greedy.texts] == ["1.00", "3.00"]
    assert [text.get_text() for text in sampled.texts] == ["1.00", "4.00"]
    assert [label.get_text() for label in greedy.get_yticklabels()] == ["plain", "fast"]
    assert [greedy.get_title(), sampled.get_title()] == ["greedy", "temperature 0.8"]
    assert greedy.lines[2].get_xdata() == pytest.approx([2.0, 4.0])  # the interval
    assert [line.get_xdata()[0] for line in sampled.lines[1::2]] == pytest.approx([1.0, 4.0])
    assert [text.xy[0] for text in sampled.texts] == pytest.approx([1.0, 4.0])  # of one prompt, which has no interval


def test_intervals_of_means_and_totals_by_prompt():
    """A mean has the width theory says; long prompts take long, so that totals resampled apart would not be exact."""
    values = np.random.default_rng(0).normal(3.0, 0.5, size=400)
    interval = mean_interval(values)
    assert interval.estimate == pytest.approx(values.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    tokens = np.array([10.0, 500.0, 30.0, 90.0])
    exact = ratio_of_totals(tokens, tokens / 25.0)
    assert exact == pytest.approx((25.0, 25.0, 25.0))
    doubled = total_speedup(tokens, tokens / 50.0, tokens, tokens / 25.0)
    assert doubled == pytest.approx((2.0, 2.0, 2.0))
    assert np.isnan(mean_interval([2.0]).low) and mean_interval([2.0]).estimate == 2.0


INCOMPLETE = {key: value for key, value in ROWS[0].items() if key != "drafter_passes"}
FACTOR = 0.3


def tokens(texts, each=60, seed=0):
    """Entropies, what was accepted as AdaEDL's bound says, and whose text it is; texts differ in how well."""
    rng = np.random.default_rng(seed)
    of_text = np.repeat(np.arange(texts), each)
    entropy = rng.gamma(1.0, 1.0, texts * each)
    factor = FACTOR * rng.lognormal(0.0, 0.5, texts)[of_text]
    accepted = rng.uniform(size=entropy.shape) < np.maximum(0.0, 1 - np.sqrt(factor * entropy))
    return entropy, accepted, of_text


def test_the_interval_holds_the_factor_and_its_estimate_is_that_of_all_texts():
    entropy, accepted, texts = tokens(8)
    found = entropy_factor_interval(entropy, accepted, texts)
    assert found.estimate == fitted_entropy_factor(entropy, accepted) and found.low < FACTOR < found.high
    assert np.isnan(entropy_factor_interval(*tokens(1))[1:]).all(), "one text has no interval"


def test_an_interval_leaves_out_a_fortieth_of_the_resamples_at_either_end():
    """Of three texts each is drawn alone in 1/27 of the resamples: the bounds are factors of a single text."""
    shares = [1 - np.sqrt(factor * 0.4) for factor in (0.1, 0.4, 1.6)]
    accepted = np.concatenate([np.arange(2000) < 2000 * share for share in shares])
    found = entropy_factor_interval(np.full(6000, 0.4), accepted, np.repeat(np.arange(3), 2000))
    assert found[1:] == pytest.approx((0.1, 1.6), rel=0.02)


@pytest.mark.parametrize(("accepted", "least", "most"), [(True, 0.0, 0.002), (False, 4.9, 5.0)])
def test_all_accepted_or_none_is_an_end_of_the_range(accepted, least, most):
    entropy, _, texts = tokens(4)
    found = entropy_factor_interval(entropy + 0.1, np.full(entropy.shape, accepted), texts)
    assert least < found.low <= found.high <= most + 1e-9


def test_equals_the_definition_on_random_texts():
    """Of any length of a phrase, which is eight tokens unless given."""
    rng = np.random.default_rng(5)
    seen = 0
    assert repeated_share([]) == 0.0 and not repeated_mask([*range(7), 50, *range(7), 51]).any()
    assert repeated_share([90, 91, 92, *[1, 2, 3, 4, 5] * 4]) == pytest.approx(15 / 23)  # from its second copy on
    for _ in range(200):
        tokens = rng.integers(0, rng.integers(1, 4), size=rng.integers(0, 50)).tolist()
        n = int(rng.integers(1, 9))
        expected = [False] * len(tokens)  # the definition, word for word
        for start in range(len(tokens) - n + 1):
            if any(tokens[start : start + n] == tokens[earlier : earlier + n] for earlier in range(start)):
                expected[start : start + n] = [True] * n
        assert repeated_mask(tokens, n).tolist() == expected
        seen += 0 < sum(expected) < len(expected)
    assert seen > 100  # texts that are neither all repeated nor free of it


test_bad_input_is_refused = refusals(
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
    (lambda: summarise([*ROWS, row("c", "fast", 1.0)]), "no result of 'plain' for prompt 'c' at temperature 0"),
    (lambda: summarise([INCOMPLETE]), "prompt 'a' has no 'drafter_passes'"),
    (lambda: summarise([]), "no results"),
    *((lambda values=values: mean_interval(values), "values must be") for values in ([], [1.0, np.nan], [[1.0]])),
    (lambda: ratio_of_totals([1.0], [0.0]), "positive, got 0"),
    (lambda: ratio_of_totals([1.0, 2.0], [1.0]), "2 numerators, 1"),
    (lambda: repeated_mask([1, 2], 0), "got 0"),
    (lambda: repeated_mask([[1, 2]], 8), r"\(1, 2\)"),
)
