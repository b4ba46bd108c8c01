"""experiments.batches: methods take turns, and a run in slices is the run in one piece."""

import jax
import numpy as np
import pytest
from tiny_pair import write_pair

from experiments import batches
from specdec_jax.stopping import static
from specdec_jax.text.generation import build_pair, prepare, start
from specdec_jax.text.sampling_params import SamplingParams


class Counted:
    """A run that notes its slices."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def slice(self, index, slices):
        self.seen.append((index, self.name))


def test_every_run_has_every_slice_once_and_another_one_begins_each_time():
    seen = []
    batches._take_turns([Counted(name, seen) for name in "abc"], 4)
    assert seen[:7] == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c")]
    assert sorted(seen) == [(index, name) for index in range(4) for name in "abc"]


@pytest.mark.slow
def test_a_run_in_slices_is_the_run_in_one_piece(tmp_path):
    target, drafter = write_pair(tmp_path)
    pair = build_pair(target, drafter, policy=static(), max_draft_length=3, costs="estimated", dtype="float32")
    request = prepare(
        pair, ["abc", "hgfe"], SamplingParams(max_new_tokens=24, temperature=0.7, stop_ids=()), chat=False
    )
    whole = pair.decoder.run(pair.params, start(pair, request).state, leave=1)
    run = batches._Run(pair, request)
    batches._take_turns([run], 4)
    found, counts = run.counts(), jax.device_get(whole.statistics)
    assert found.pop("seconds") > 0
    assert found == {name: int(np.sum(getattr(counts, name))) for name in found} and found["num_draft_tokens"] > 0
    np.testing.assert_array_equal(run._state.tokens, whole.tokens)
