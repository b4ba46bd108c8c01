"""Functions of policies that decide a draft length, and the `threshold` of those that compare a probability."""

import jax.numpy as jnp

from specdec_jax.stopping._thresholded import in_unit
from specdec_jax.types import Array, Distribution, PolicyState, RoundContext


def begin_with_length(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
    """Draft in this round if `state.draft_length` [B] int32 is above 0."""
    return state.draft_length > 0, state


def proceed_to_length(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Draft up to `state.draft_length` tokens; stops before the next drafter pass."""
    return drafted < state.draft_length, state


# The `threshold` of policies for draft lengths, and of those that compare a probability with `state.threshold`.
show_length = in_unit("drafts per round", lambda state: state.draft_length.astype(jnp.float32))
show_probability = in_unit("probability", lambda state: state.threshold)
