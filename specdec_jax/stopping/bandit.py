"""A bandit over draft lengths: BanditSpec's UCB (arXiv 2505.15141, sections 4 and 6).

Every round plays one length. The first `warmup` rounds cycle through the lengths; then the one with the largest
`mean + exploration * sqrt(6 ln(rounds) / pulls)` is played, with the mean over the rewards of its rounds. The authors'
reward is measured tokens per second, about 100, and their bonus has no factor; here the reward is tokens per time of a
cost model, about 1 to 3, for which the same bonus would never stop exploring, so it is scaled by `exploration`. A round
without drafts is not counted; a draft cut by the token budget counts with its actual length.

In units of a target pass of one token, a round costs `1 + drafter_cost * passes + verification_cost * drafted`. A clock
would need the host inside the generation, would measure the whole batch although every row plays its own arm, and could
not be replayed. `policy_bandit` has the same arms and cost model.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import full, host
from specdec_jax.ranges import Between, Count, NotNegative
from specdec_jax.stopping._readings import relative_drafter_cost
from specdec_jax.stopping.static import proceed_to_length, show_length
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Draft, RoundContext, StoppingPolicy, VerificationResult

UCB_WIDTH = 6.0


class Arms(NamedTuple):
    arm: Array  # [B] int32, this round's
    pulls: Array  # [B, A] int32, rounds that were counted
    rewards: Array  # [B, A] float32, sum over those rounds
    drafter_cost: Array  # [B] float32, a drafter pass, in target passes
    pass_cost: Array  # [B] float32, one of this round's drafter
    verification_cost: Array  # [B] float32, verifying one more token, in target passes
    exploration: Array  # [B] float32, in tokens per target pass


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
        num_rounds = rounds(state.arms)
        arm = jnp.where(num_rounds < state.warmup, num_rounds % len(choices), best(upper_bounds(state.arms, UCB_WIDTH)))
        cost = state.arms.drafter_cost * relative_drafter_cost(context)  # a lookup's passes cost nothing
        state = BanditState(state.arms._replace(arm=arm, pass_cost=cost), jnp.asarray(choices)[arm], state.warmup)
        return jnp.ones_like(context.alive), state

    def update(state: BanditState, draft: Draft, result: VerificationResult) -> BanditState:
        return state._replace(arms=learn(state.arms, result.length, draft.length, draft.length, draft.length > 0))

    return StoppingPolicy(init, begin, proceed=proceed_to_length, update=update, threshold=show_length)


def begin_arms(batch: int, count: int, drafter_cost: Array, verification_cost: Array, exploration: Array) -> Arms:
    """The initial state of `count` arms."""
    return Arms(
        arm=full(batch, 0, dtype=np.int32),
        pulls=host(np.zeros((batch, count), np.int32)),
        rewards=host(np.zeros((batch, count), np.float32)),
        drafter_cost=drafter_cost,
        pass_cost=drafter_cost,
        verification_cost=verification_cost,
        exploration=exploration,
    )


def rounds(arms: Arms) -> Array:
    """Number of counted rounds [B] int32."""
    return jnp.sum(arms.pulls, axis=1, dtype=jnp.int32)


def upper_bounds(arms: Arms, width: float) -> Array:
    """`mean + exploration * sqrt(width * ln(rounds) / pulls)` [B, A] float32; infinite for an arm never pulled."""
    pulls = jnp.maximum(arms.pulls, 1).astype(jnp.float32)
    logarithm = jnp.log(jnp.maximum(rounds(arms), 1).astype(jnp.float32))
    bonus = arms.exploration[:, None] * jnp.sqrt(width * logarithm[:, None] / pulls)
    return jnp.where(arms.pulls > 0, arms.rewards / pulls + bonus, jnp.inf)


def samples(arms: Arms, normal: Array) -> Array:
    """`mean + exploration / sqrt(pulls) * normal` [B, A] float32; infinite for an arm never pulled."""
    pulls = jnp.maximum(arms.pulls, 1).astype(jnp.float32)
    sample = arms.rewards / pulls + arms.exploration[:, None] * normal / jnp.sqrt(pulls)
    return jnp.where(arms.pulls > 0, sample, jnp.inf)


def best(values: Array) -> Array:
    """The arm with the largest value [B] int32, the first in case of ties."""
    return jnp.argmax(values, axis=1).astype(jnp.int32)


def learn(arms: Arms, emitted: Array, passes: Array, drafted: Array, counted: Array) -> Arms:
    """The arms after a round that emitted `emitted` tokens, for the rows in which it is counted."""
    as_float = lambda count: count.astype(jnp.float32)  # noqa: E731
    time = 1.0 + arms.pass_cost * as_float(passes) + arms.verification_cost * as_float(drafted)
    pulled = (jnp.arange(arms.pulls.shape[1], dtype=jnp.int32)[None, :] == arms.arm[:, None]) & counted[:, None]
    reward = jnp.where(pulled, (as_float(emitted) / time)[:, None], 0.0)
    return arms._replace(pulls=arms.pulls + pulled.astype(jnp.int32), rewards=arms.rewards + reward)
