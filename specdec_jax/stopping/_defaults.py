"""Functions shared by several policies."""

import jax.numpy as jnp

from specdec_jax.types import Array, Distribution, PolicyState, RoundContext


def proceed_unless_failed(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Stop after a token whose distribution failed its check (`state.failed` [B] bool)."""
    del distribution, token, drafted, context
    return ~state.failed, state


def begin_with_length(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
    """Draft in this round if `state.draft_length` [B] int32 is above 0."""
    del context
    return state.draft_length > 0, state


def proceed_to_length(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Draft up to `state.draft_length` tokens; stops before the next drafter pass."""
    del distribution, token, context
    return drafted < state.draft_length, state


def show_length(state: PolicyState) -> Array:
    """The `threshold` of policies for draft lengths, for plots: `state.draft_length`."""
    return state.draft_length.astype(jnp.float32)
