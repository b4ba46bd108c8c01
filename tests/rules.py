"""Policies for tests: livelier than the published ones, so that states matter within a few rounds."""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import per_row
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, StoppingPolicy

# AdaEDL's lambda moves by 0.001 a round at the paper's constants; with these it crosses whole toy distributions.
FAST = {"step": 0.5, "threshold_decay": 0.2, "threshold": 0.6}


class RestlessState(NamedTuple):
    active: Array  # [B] bool


@strategy
def restless(most=2):
    """Drafts its last token only after token 0, and sits out the round after one that lacked it.

    Its state so depends on tokens that may be drawn and rejected. That is lossless; but a decoder that reads a uniform
    twice (keyed on the position alone) shows under it.
    """

    def init(batch):
        return RestlessState(per_row(batch, True, "active", dtype=bool))

    def begin(state, context):
        return state.active, state

    def check(state, distribution, drafted, context):
        return jnp.ones_like(context.alive), state

    def proceed(state, distribution, token, drafted, context):
        return (drafted < most - 1) | (token == 0), state

    def update(state, draft, result):
        return RestlessState(draft.length != most - 1)

    return StoppingPolicy(init, begin, check, proceed, update, lambda state: state.active.astype(jnp.float32))


class CountingState(NamedTuple):
    length: Array  # [B] int32, drafts wanted
    begins: Array  # [B] int32, calls so far
    checks: Array  # [B] int32
    proceeds: Array  # [B] int32
    updates: Array  # [B] int32


def counting():
    """A static length that is stopped by `check` in odd rows, and counts what it was asked about its own row."""

    def init(batch, length=2):
        zero = per_row(batch, 0, "zero", dtype=jnp.int32)
        return CountingState(per_row(batch, length, "length", dtype=jnp.int32), zero, zero, zero, zero)

    def begin(state, context):
        return state.length > 0, state._replace(begins=state.begins + 1)

    def check(state, distribution, drafted, context):
        return (drafted < state.length) | (state.length % 2 == 0), state._replace(checks=state.checks + 1)

    def proceed(state, distribution, token, drafted, context):
        return (drafted < state.length) | (state.length % 2 == 1), state._replace(proceeds=state.proceeds + 1)

    def update(state, draft, result):
        return state._replace(updates=state.updates + 1)

    return StoppingPolicy(init, begin, check, proceed, update, lambda state: state.length.astype(jnp.float32))
