"""A common rule of thumb for manual tuning of the draft length, as a policy.

Demos of speculative decoding (such as Romsto's 'Speculative-Decoding'; gamma is the draft length) recommend: start at
4, draft one or two tokens more if the acceptance rate is above 0.8, one fewer if it is below 0.5. Choices left open:
the acceptance rate is a decayed mean of accepted / drafted per round that starts between the two bounds; the length
grows by 2 when the round accepted a draft of full length, else by 1; it stays between 1 and the drafter's
`max_draft_length`; a round without drafts is ignored.
"""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.ranges import Length, Share
from specdec_jax.stopping.static import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, StoppingPolicy, VerificationResult


class GammaTuningState(NamedTuple):
    draft_length: Array  # [B] int32
    acceptance: Array  # [B] float32, decayed mean of the acceptance rate
    decay: Array  # [B] float32
    high: Array  # [B] float32
    low: Array  # [B] float32


@strategy
def gamma_tuning() -> StoppingPolicy:
    """A draft length that grows by 1 or 2 above one acceptance rate and shrinks by 1 below another.

    Hyperparameters (`init`): draft_length 4 (int >= 1), high 0.8, low 0.5, decay 0.5 (weight of the old mean in each
    round), initial_acceptance 0.65; all but the length in [0, 1].
    """

    def init(
        batch: int,
        draft_length: Length = 4,
        high: Share = 0.8,
        low: Share = 0.5,
        decay: Share = 0.5,
        initial_acceptance: Share = 0.65,
    ) -> GammaTuningState:
        return GammaTuningState(draft_length, initial_acceptance, decay, high, low)

    def update(state: GammaTuningState, draft: Draft, result: VerificationResult) -> GammaTuningState:
        longest, accepted, drafted = draft.tokens.shape[1], result.length - 1, draft.length > 0
        rate = accepted.astype(jnp.float32) / jnp.maximum(draft.length, 1).astype(jnp.float32)
        acceptance = state.decay * state.acceptance + (1.0 - state.decay) * rate
        wanted = jnp.minimum(state.draft_length, longest)
        longer = jnp.where(accepted == wanted, wanted + 2, wanted + 1)
        shorter = jnp.where(acceptance < state.low, wanted - 1, wanted)
        length = jnp.clip(jnp.where(acceptance > state.high, longer, shorter), 1, longest)
        return state._replace(
            draft_length=jnp.where(drafted, length, state.draft_length),
            acceptance=jnp.where(drafted, acceptance, state.acceptance),
        )

    return StoppingPolicy(init, begin_with_length, proceed=proceed_to_length, update=update, threshold=show_length)
