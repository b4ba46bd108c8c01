"""experiments.batches: methods take turns, a run in slices is the run in one piece, rows that wait for one another."""

import jax
import numpy as np
import pytest
from tiny_pair import write_pair

from experiments import batches
from experiments.lib import waiting
from experiments.lib.waiting import Machine
from specdec_jax.costs.cost_model import cost_model
from specdec_jax.stopping import static
from specdec_jax.text.generation import build_pair, prepare, start
from specdec_jax.text.sampling_params import SamplingParams


class Counted:
    """A run that notes its slices."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def slice(self, index):
        self.seen.append((index, self.name))


def test_every_run_has_every_slice_once_and_another_one_begins_each_time():
    seen = []
    batches._take_turns([Counted(name, seen) for name in "abc"])
    assert seen[:7] == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c")]
    assert sorted(seen) == [(index, name) for index in range(batches.SLICES) for name in "abc"]


@pytest.mark.slow
def test_a_run_in_slices_is_the_run_in_one_piece(tmp_path):
    target, drafter = write_pair(tmp_path)
    pair = build_pair(target, drafter, policy=static(), max_draft_length=3, costs="estimated", dtype="float32")
    request = prepare(
        pair, ["abc", "hgfe"], SamplingParams(max_new_tokens=24, temperature=0.7, stop_ids=()), chat=False
    )
    whole = pair.decoder.run(pair.params, start(pair, request).state, leave=1)
    run = batches._Run(pair, request)
    batches._take_turns([run])
    found, counts = run.counts(), jax.device_get(whole.statistics)
    assert found.pop("seconds") > 0
    assert found == {name: int(np.sum(getattr(counts, name))) for name in found} and found["num_draft_tokens"] > 0
    np.testing.assert_array_equal(run._state.tokens, whole.tokens)


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
