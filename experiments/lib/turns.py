"""Decoders that are timed by turns, so that what else the machine does falls on all of them alike."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specdec_jax.text.pair import Pair
from specdec_jax.types import DecodeState


def in_turns(
    runs: Mapping[Any, tuple[Pair, DecodeState, int]], leave: int | None = None
) -> dict[Any, tuple[DecodeState, float]]:
    """The final state of each run (a pair, a prefilled state, rounds of a turn) and its seconds of decoding.

    Every time another one begins. A run ends when `leave` of its rows are done (None: all). On an accelerator, whose
    dispatches take up to a millisecond, all rounds are one turn.
    """
    states, seconds = {name: state for name, (_, state, _) in runs.items()}, dict.fromkeys(runs, 0.0)
    left = deque(runs)
    while left:
        for name in list(left):
            pair, _, rounds = runs[name]
            rounds = rounds if jax.default_backend() == "cpu" else None
            watch = time.perf_counter()
            state = jax.block_until_ready(pair.decoder.run(pair.params, states[name], rounds=rounds, leave=leave))
            seconds[name] += time.perf_counter() - watch
            states[name] = state
            if np.sum(state.done) >= (leave or len(state.done)):
                left.remove(name)
        left.rotate(-1)
    return {name: (states[name], seconds[name]) for name in runs}
