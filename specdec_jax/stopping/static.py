"""A fixed draft length: the standard of speculative decoding (Leviathan et al., arXiv 2211.17192, algorithm 1)."""

from typing import NamedTuple

from specdec_jax.ranges import Count
from specdec_jax.stopping._defaults import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, StoppingPolicy


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
