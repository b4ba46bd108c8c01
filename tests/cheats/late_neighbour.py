"""A cheat on the same promise: from the sixth round on a row stops where the row before it has the longer text."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.stopping import static
from specdec_jax.types import Array


class Rounds(NamedTuple):
    played: Array  # [B] int32


def late_neighbour(first: int = 6):
    """From round `first` on."""

    def init(batch):
        return Rounds(np.zeros(batch, np.int32))

    def begin(state, context):
        return jnp.ones_like(context.alive), Rounds(state.played + 1)

    def check(state, distribution, drafted, context):
        return distribution.max_prob > 0.5, state

    def proceed(state, distribution, token, drafted, context):
        return ~((state.played >= first) & (jnp.roll(context.length, 1) > context.length)), state

    return static().replace(
        init=init,
        begin=begin,
        check=check,
        proceed=proceed,
        threshold=lambda state: state.played.astype(jnp.float32),
        hyperparameters={},
    )
