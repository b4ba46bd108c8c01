"""`python -m experiments.batches waiting`: rows in step, by hand and from traces."""

import numpy as np
import pytest

from experiments import batches
from experiments.lib import waiting
from experiments.lib.waiting import Machine
from specdec_jax.costs.cost_model import cost_model


def played(*rounds):
    """One text's rounds, of (drafted, accepted, emitted, passes)."""
    return [*rounds, *[(-1,) * 4] * (4 - len(rounds))]


def test_a_round_lasts_as_long_as_its_longest_draft():
    machine = Machine("", 2, cost_model(0.25, {1: 1.0, 2: 1.5, 4: 2.0, 8: 4.0}))
    one = played((1, 1, 2, 1), (0, 0, 1, 1), (3, 1, 2, 3))
    other = played((3, 3, 4, 3), (0, 0, 1, 0))
    # two rounds, as many as both have: 2.0 + 3 passes, and 1.0 + the pass that one of them paid and did not use
    expected = ((2 + 1) + (4 + 1)) / 2 / (2.75 + 1.25)
    assert waiting.in_step(np.array([one, other]), machine, 0) == pytest.approx(expected)
    alone = waiting.in_step(np.array([one]), machine._replace(rows=1), 0)
    assert alone == pytest.approx(5 / (1.75 + 1.25 + 2.75))


def test_the_table_has_a_line_a_trace_and_machine(tmp_path, capsys):
    out = tmp_path / "run"
    assert batches.main(["waiting", "--smoke", "--factors", "1", "2", "--lengths", "0", "--out", str(out)]) == 0
    lines = (out / "table.md").read_text().splitlines()
    heads, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|"))
    assert heads[2:] == ["survival x 1", "survival x 2", "goodput x 1", "goodput x 2", "static 0"]
    rows = rows[1:]  # the line below the heads
    assert len(rows) % len(waiting.MACHINES) == 0 and {row[-1] for row in rows} == {"1.00"}


def test_factors_that_make_no_sense_are_refused(tmp_path, capsys):
    assert batches.main(["waiting", "--smoke", "--factors", "0", "--out", str(tmp_path / "run")]) == 2
    assert "factors must be above 0" in capsys.readouterr().err
