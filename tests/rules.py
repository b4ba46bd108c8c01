"""Policies for tests: livelier than the published ones, so that states matter within a few rounds."""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.numbers import per_row
from specdec_jax.types import Array, StoppingPolicy

# AdaEDL's lambda moves by 0.001 a round at the paper's constants; with these it crosses whole toy laws.
FAST = {"step": 0.5, "threshold_decay": 0.2, "threshold": 0.6}


class RestlessState(NamedTuple):
    active: Array  # [B] bool


def restless(most=2):
    """Drafts its last token only after token 0, and sits out the round after one that lacked it.

    Its state so depends on tokens that may be drawn and refused. That is lossless; but a decoder that reads a uniform
    twice (keyed on the position alone) shows under it.
    """

    def init(batch):
        return RestlessState(per_row(batch, True, "active", dtype=bool))

    def begin(state, context):
        return state.active, state

    def check(state, law, drafted, context):
        return jnp.ones_like(context.alive), state

    def proceed(state, law, token, drafted, context):
        return (drafted < most - 1) | (token == 0), state

    def update(state, draft, verdict):
        return RestlessState(draft.length != most - 1)

    return StoppingPolicy(init, begin, check, proceed, update, lambda state: state.active.astype(jnp.float32))
