"""What several rules decide alike."""

import jax.numpy as jnp

from specdec_jax.types import Array, Distribution, PolicyState, RoundContext


def proceed_unless_failed(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Stop after the token of a distribution that failed its check: `state.failed` [B] bool says so."""
    del distribution, token, drafted, context
    return ~state.failed, state


def begin_with_length(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
    """A round drafts if `state.draft_length` [B] int32 is above 0."""
    del context
    return state.draft_length > 0, state


def proceed_to_length(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Draft up to `state.draft_length` tokens; it stops before the next pass is paid."""
    del distribution, token, context
    return drafted < state.draft_length, state


def show_length(state: PolicyState) -> Array:
    """What a plot of a rule for lengths shows: `state.draft_length`."""
    return state.draft_length.astype(jnp.float32)
