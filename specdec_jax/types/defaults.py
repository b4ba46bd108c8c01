"""Default functions of a stopping policy: draft to the budget, keep the state, plot nothing."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.types.values import Array, Distribution, Draft, PolicyState, RoundContext, VerificationResult


def always_begin(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
    """Begin every round with a drafter pass."""
    return jnp.ones_like(context.alive), state


def always_draw(
    state: PolicyState, distribution: Distribution, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Draft a token from every predicted distribution."""
    del distribution, drafted
    return jnp.ones_like(context.alive), state


def always_proceed(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Continue after every drafted token, up to the budget."""
    del distribution, token, drafted
    return jnp.ones_like(context.alive), state


def no_update(state: PolicyState, draft: Draft, result: VerificationResult) -> PolicyState:
    """Return the state unchanged."""
    del draft, result
    return state


def no_threshold(state: Any) -> Array:
    """[B] float32 NaN, which plots omit. A state without leaves gives one NaN for all rows."""
    leaves = jax.tree.leaves(state)
    return jnp.full(leaves[0].shape[:1] if leaves else (), jnp.nan, jnp.float32)
