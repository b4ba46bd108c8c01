"""transformers' heuristic draft lengths (arXiv 1910.03771): two more after full acceptance, one fewer otherwise.

As `num_assistant_tokens_schedule="heuristic"` of `generation/candidate_generator.py`: the length starts at 5; if all
drafts were accepted it grows by 2, else it becomes max(1, length - 1). Choices: the length is clamped to the drafter's
`max_draft_length` (K), so that a rejection at K has an effect at once; 'all accepted' means a draft of the full current
length, not one cut by the token budget; a round without drafts is ignored (transformers would count 0 of 0 as a
success). The length starts anew with every request ("heuristic_transient").
"""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.ranges import Count, Length
from specdec_jax.stopping.static import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, StoppingPolicy, VerificationResult


class HFHeuristicState(NamedTuple):
    draft_length: Array  # [B] int32
    increase: Array  # [B] int32
    decrease: Array  # [B] int32


@strategy
def hf_heuristic() -> StoppingPolicy:
    """A draft length that grows after full acceptance and shrinks otherwise.

    Hyperparameters (`init`), all integers: draft_length 5 (>= 1), increase 2 (>= 0), decrease 1 (>= 0).
    """

    def init(batch: int, draft_length: Length = 5, increase: Count = 2, decrease: Count = 1) -> HFHeuristicState:
        return HFHeuristicState(draft_length, increase, decrease)

    def update(state: HFHeuristicState, draft: Draft, result: VerificationResult) -> HFHeuristicState:
        longest = draft.tokens.shape[1]
        wanted = jnp.minimum(state.draft_length, longest)
        success = result.length - 1 == wanted
        longer = jnp.minimum(wanted + jnp.minimum(state.increase, longest), longest)
        new = jnp.where(success, longer, jnp.maximum(wanted - state.decrease, 1))
        return state._replace(draft_length=jnp.where(draft.length > 0, new, state.draft_length))

    return StoppingPolicy(init, begin_with_length, proceed=proceed_to_length, update=update, threshold=show_length)
