"""A bandit over draft lengths: BanditSpec's UCB (arXiv 2505.15141, sections 4 and 6).

Every round plays one length. The first `warmup` rounds cycle through the lengths; then the one with the largest
`mean + exploration * sqrt(6 ln(rounds) / pulls)` is played, with the mean over the rewards of its rounds. The authors'
reward is measured tokens per second, about 100, and their bonus has no factor; here the reward is tokens per time of
the cost model in `_arms.py`, about 1 to 3, for which the same bonus would never stop exploring, so it is scaled by
`exploration`. A round without drafts is not counted; a draft cut by the token budget counts with its actual length.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import full
from specdec_jax.ranges import Between, Count, NotNegative
from specdec_jax.stopping._arms import Arms, begin_arms, best, learn, rounds, upper_bounds
from specdec_jax.stopping._defaults import proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, RoundContext, StoppingPolicy, VerificationResult

UCB_WIDTH = 6.0


class BanditState(NamedTuple):
    arms: Arms
    draft_length: Array  # [B] int32, of the current arm
    warmup: Array  # [B] int32


@strategy
def bandit(lengths: Annotated[Sequence[int], Between(1)] = (1, 2, 3, 4)) -> StoppingPolicy:
    """UCB over draft lengths.

    Args:
        lengths: the arms, each at least 1, because rounds without drafts are not counted.

    Hyperparameters (`init`), all >= 0: exploration 0.1 (tokens per target pass), warmup 8 (rounds), drafter_cost 0.1 (a
    drafter pass, in target passes), verification_cost 0.02 (one more token to verify, in target passes).

    Raises:
        ValueError: `lengths` is no sequence.
    """
    if not isinstance(lengths, Sequence):
        raise ValueError(f"bandit needs a sequence of draft lengths, got {lengths!r}")
    choices = np.asarray(lengths, np.int32)

    def init(
        batch: int,
        exploration: NotNegative = 0.1,
        warmup: Count = 8,
        drafter_cost: NotNegative = 0.1,
        verification_cost: NotNegative = 0.02,
    ) -> BanditState:
        arms = begin_arms(batch, len(choices), drafter_cost, verification_cost, exploration)
        return BanditState(arms, full(batch, choices[0], dtype=np.int32), warmup)

    def begin(state: BanditState, context: RoundContext) -> tuple[Array, BanditState]:
        played = rounds(state.arms)
        ranked = best(upper_bounds(state.arms, UCB_WIDTH))
        arm = jnp.where(played < state.warmup, played % len(choices), ranked)
        state = state._replace(arms=state.arms._replace(arm=arm), draft_length=jnp.asarray(choices)[arm])
        return jnp.ones_like(context.alive), state

    def update(state: BanditState, draft: Draft, result: VerificationResult) -> BanditState:
        return state._replace(arms=learn(state.arms, result.length, draft.length, draft.length))

    return StoppingPolicy(init, begin, proceed=proceed_to_length, update=update, threshold=show_length)
