"""Timed decoders take turns, and a run by turns is the run in one piece."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from experiments.lib.turns import in_turns
from specdec_jax.text.generation import prepare, start
from specdec_jax.text.sampling_params import SamplingParams


class Left(NamedTuple):
    """A state by the rounds that each row has left."""

    rounds: np.ndarray

    @property
    def done(self):
        return self.rounds <= 0


def test_another_run_begins_every_time_and_what_is_done_has_no_turn_more():
    """One row of two is enough with `leave`."""
    seen = []

    def pair(name):
        def run(params, state, rounds, leave):
            seen.append(name)
            return Left(state.rounds - rounds)

        return SimpleNamespace(decoder=SimpleNamespace(run=run), params=None)

    left = {"plain": ([48], 16), "fast": ([8], 4), "slow": ([20], 10)}
    runs = {name: (pair(name), Left(np.array(rounds)), pace) for name, (rounds, pace) in left.items()}
    ended = in_turns(runs)
    assert seen == ["plain", "fast", "slow", "fast", "slow", "plain", "plain"]
    assert [state.rounds.tolist() for state, _ in ended.values()] == [[0], [0], [0]] and list(ended) == list(left)
    assert all(seconds > 0 for _, seconds in ended.values())
    state, _ = in_turns({"two": (pair("two"), Left(np.array([4, 8])), 2)}, leave=1)["two"]
    assert state.rounds.tolist() == [0, 4]


@pytest.mark.slow
def test_a_run_by_turns_is_the_run_in_one_piece(tiny):
    sampling = SamplingParams(max_new_tokens=24, temperature=0.7, stop_ids=())
    request = prepare(tiny, ["abc", "hgfe"], sampling, chat=False)
    whole = tiny.decoder.run(tiny.params, start(tiny, request).state, leave=1)
    state, _ = in_turns({0: (tiny, start(tiny, request).state, 2)}, leave=1)[0]
    np.testing.assert_array_equal(state.statistics.num_rounds, whole.statistics.num_rounds)
    np.testing.assert_array_equal(state.tokens, whole.tokens)
