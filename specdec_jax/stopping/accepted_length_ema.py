"""SGLang's adaptive draft length (arXiv 2312.07104): one more than the moving average of the accepted length.

As `adaptive_spec_params.py` of SGLang: an exponential moving average of the accepted length (weight 0.2 on the newest);
after 10 warm-up rounds, every 5 rounds, `draft length = clamp(round(average) + 1)`, taken from a few lengths ('tiers')
for which CUDA graphs exist. The average starts at the first length - 1, as in SGLang, a fixed point of the rule.
Differences: each row has its own average instead of one per batch; there is no hysteresis; between tiers the smallest
one that holds the computed length is taken, or the largest; a round without drafts is not counted.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import full
from specdec_jax.ranges import Between, Count, Length, Share
from specdec_jax.stopping.static import begin_with_length, proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, StoppingPolicy, VerificationResult


class AcceptedLengthEMAState(NamedTuple):
    draft_length: Array  # [B] int32
    average: Array  # [B] float32, accepted tokens per round
    rounds: Array  # [B] int32
    weight: Array  # [B] float32, of the newest round
    interval: Array  # [B] int32
    warmup: Array  # [B] int32


@strategy
def accepted_length_ema(tiers: Annotated[Sequence[int], Between(1)] = ()) -> StoppingPolicy:
    """A draft length of one more than the average accepted length, updated every few rounds.

    Args:
        tiers: the allowed lengths, ascending, each at least 1; empty: any up to the drafter's `max_draft_length`.

    Hyperparameters (`init`): draft_length 3 (int >= 1, the first), weight 0.2 (SGLang's alpha, 0 to 1), interval 5
    (rounds, >= 1), warmup 10 (rounds, >= 0).

    Raises:
        ValueError: `tiers` are not ascending.
    """
    if not isinstance(tiers, Sequence) or list(tiers) != sorted(set(tiers)):
        raise ValueError(f"accepted_length_ema's tiers must be a rising sequence of lengths, got {tiers!r}")
    steps = np.asarray(tiers, np.int32)

    def init(
        batch: int, draft_length: Length = 3, weight: Share = 0.2, interval: Length = 5, warmup: Count = 10
    ) -> AcceptedLengthEMAState:
        average, rounds = draft_length.astype(np.float32) - np.float32(1), full(batch, 0, dtype=np.int32)
        return AcceptedLengthEMAState(draft_length, average, rounds, weight, interval, warmup)

    def update(state: AcceptedLengthEMAState, draft: Draft, result: VerificationResult) -> AcceptedLengthEMAState:
        drafted = draft.length > 0
        accepted = (result.length - 1).astype(jnp.float32)
        average = jnp.where(drafted, (1.0 - state.weight) * state.average + state.weight * accepted, state.average)
        rounds = state.rounds + drafted.astype(jnp.int32)
        since = rounds - state.warmup
        due = drafted & (since > 0) & (since % state.interval == 0)
        wanted = jnp.clip(jnp.round(average).astype(jnp.int32) + 1, 1, draft.tokens.shape[1])
        if len(steps):  # the smallest tier that is at least `wanted`, or the largest
            below = jnp.sum(jnp.asarray(steps)[None, :] < wanted[:, None], axis=1, dtype=jnp.int32)
            wanted = jnp.asarray(steps)[jnp.minimum(below, len(steps) - 1)]
        length = jnp.where(due, wanted, state.draft_length)
        return state._replace(draft_length=length, average=average, rounds=rounds)

    return StoppingPolicy(init, begin_with_length, proceed=proceed_to_length, update=update, threshold=show_length)
