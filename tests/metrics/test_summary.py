"""From rows to the table: every figure recomputed by hand, intervals against what theory says of them."""

import numpy as np
import pytest
from refusals import refusals

from experiments.compare import picture
from experiments.lib.tables import NONE, doubts_of_rows, methods_tables, speedup, speedups, summarise
from specdec_jax.metrics.intervals import mean_interval, ratio_of_totals, total_speedup


def row(prompt, method, seconds, tokens=60, temperature=0.0, repeated=0.0, equal=None, **counts):
    names = (
        "num_rounds",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "drafter_passes",
        "discarded_passes",
    )
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


def shown(rows):
    """The cells of each line of the tables, by their heads."""
    lines = [line[2:-2].split(" | ") for line in "\n".join(methods_tables(rows)).splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines if line[0] not in ("method", "---")]


def test_every_figure():
    plain, fast = summarise(ROWS)
    assert (plain["what"], fast["what"], len(fast["emitted"])) == ("plain", "fast", 2)
    assert speedups(fast) == pytest.approx([2.0, 4.0]) and speedups(fast, clean=True) == pytest.approx([2.0])
    assert speedup(fast).estimate == pytest.approx(8 / 2.5)
    first, other = shown([plain, fast])
    assert other["method"] == "**fast**" and other["tokens/s, mean of prompts"] == "50.0"
    assert other["tokens/s, total"] == "48.0" and other["speed-up, total"] == "3.20"
    assert other["speed-up, mean [95 %]"].startswith("3.00 [") and other["median (quartiles)"] == "3.00 (2.50–3.50)"
    assert other["without repeats"] == "2.00 (1)" and other["repeated"] == "25%"
    assert other["acceptance rate"] == f"{30 / 80:.2f}" and other["draft length"] == "4.00"
    assert other["acceptance length"] == "2.50" and other["discarded passes"] == "10%"
    assert (first["equal"], other["equal"]) == ("2/2", "1/2")
    assert {first[name] for name in ("acceptance rate", "draft length", "discarded passes")} == {NONE}


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


test_what_is_refused = refusals(
    (lambda: summarise([*ROWS, row("c", "fast", 1.0)]), "no result of 'plain' for prompt 'c' at temperature 0"),
    (lambda: summarise([INCOMPLETE]), "prompt 'a' has no 'drafter_passes'"),
    (lambda: summarise([]), "no results"),
    *((lambda values=values: mean_interval(values), "values must be") for values in ([], [1.0, np.nan], [[1.0]])),
    (lambda: ratio_of_totals([1.0], [0.0]), "positive, got 0"),
    (lambda: ratio_of_totals([1.0, 2.0], [1.0]), "2 numerators, 1"),
)
