"""Multi-armed bandits over drafting strategies: one arm per round, with tokens per time as reward.

Time comes from a cost model, not from a clock, in units of a target pass of one token: a round costs
`1 + drafter_cost * passes + verification_cost * drafted`. A clock would need the host inside the generation, would
measure the whole batch although every row plays its own arm, and could not be replayed.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import full, host
from specdec_jax.types import Array


class Arms(NamedTuple):
    arm: Array  # [B] int32, this round's
    pulls: Array  # [B, A] int32, rounds that were counted
    rewards: Array  # [B, A] float32, sum over those rounds
    drafter_cost: Array  # [B] float32, a drafter pass, in target passes
    verification_cost: Array  # [B] float32, verifying one more token, in target passes
    exploration: Array  # [B] float32, in tokens per target pass


def begin_arms(batch: int, count: int, drafter_cost: Array, verification_cost: Array, exploration: Array) -> Arms:
    """The initial state of `count` arms."""
    return Arms(
        arm=full(batch, 0, dtype=np.int32),
        pulls=host(np.zeros((batch, count), np.int32)),
        rewards=host(np.zeros((batch, count), np.float32)),
        drafter_cost=drafter_cost,
        verification_cost=verification_cost,
        exploration=exploration,
    )


def rounds(arms: Arms) -> Array:
    """Number of counted rounds [B] int32."""
    return jnp.sum(arms.pulls, axis=1, dtype=jnp.int32)


def upper_bounds(arms: Arms, width: float) -> Array:
    """`mean + exploration * sqrt(width * ln(rounds) / pulls)` [B, A] float32; infinite for an arm never played."""
    pulls = jnp.maximum(arms.pulls, 1).astype(jnp.float32)
    logarithm = jnp.log(jnp.maximum(rounds(arms), 1).astype(jnp.float32))
    bonus = arms.exploration[:, None] * jnp.sqrt(width * logarithm[:, None] / pulls)
    return jnp.where(arms.pulls > 0, arms.rewards / pulls + bonus, jnp.inf)


def samples(arms: Arms, normal: Array) -> Array:
    """`mean + exploration / sqrt(pulls) * normal` [B, A] float32; infinite for an arm never played."""
    pulls = jnp.maximum(arms.pulls, 1).astype(jnp.float32)
    sample = arms.rewards / pulls + arms.exploration[:, None] * normal / jnp.sqrt(pulls)
    return jnp.where(arms.pulls > 0, sample, jnp.inf)


def best(values: Array) -> Array:
    """The arm with the largest value [B] int32, the first in case of ties."""
    return jnp.argmax(values, axis=1).astype(jnp.int32)


def learn(arms: Arms, emitted: Array, passes: Array, drafted: Array) -> Arms:
    """The arms after a round that emitted `emitted` tokens; a round without a drafter pass is not counted."""
    as_float = lambda count: count.astype(jnp.float32)  # noqa: E731
    time = 1.0 + arms.drafter_cost * as_float(passes) + arms.verification_cost * as_float(drafted)
    played = jnp.arange(arms.pulls.shape[1], dtype=jnp.int32)[None, :] == arms.arm[:, None]
    played = played & (passes > 0)[:, None]
    reward = jnp.where(played, (as_float(emitted) / time)[:, None], 0.0)
    return arms._replace(pulls=arms.pulls + played.astype(jnp.int32), rewards=arms.rewards + reward)
