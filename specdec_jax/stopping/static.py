"""A fixed draft length: the standard of speculative decoding (Leviathan et al., arXiv 2211.17192, algorithm 1)."""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.ranges import Count
from specdec_jax.stopping._thresholded import in_unit
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, PolicyState, RoundContext, StoppingPolicy


class StaticState(NamedTuple):
    draft_length: Array  # [B] int32


@strategy
def static() -> StoppingPolicy:
    """Draft exactly `draft_length` tokens, within the drafter's `max_draft_length` and the token budget.

    Hyperparameters (`init`): draft_length (int >= 0, default 7; 0 is plain decoding). No drafter pass is discarded.
    """

    def init(batch: int, draft_length: Count = 7) -> StaticState:
        return StaticState(draft_length)

    return StoppingPolicy(init, begin_with_length, proceed=proceed_to_length, threshold=show_length)


# Functions of all policies that decide a draft length.
def begin_with_length(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
    """Draft in this round if `state.draft_length` [B] int32 is above 0."""
    return state.draft_length > 0, state


def proceed_to_length(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Draft up to `state.draft_length` tokens; stops before the next drafter pass."""
    return drafted < state.draft_length, state


show_length = in_unit("drafts per round", lambda state: state.draft_length.astype(jnp.float32))
