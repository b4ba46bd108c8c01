"""What a stopping policy does where it decides nothing."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.types.values import Array, Distribution, Draft, PolicyState, RoundContext, VerificationResult


def always_begin(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
    """Every round pays for its first drafter pass."""
    return jnp.ones_like(context.alive), state


def always_draw(
    state: PolicyState, distribution: Distribution, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Every distribution that was paid for gives its token."""
    del distribution, drafted
    return jnp.ones_like(context.alive), state


def always_proceed(
    state: PolicyState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Every drawn token is followed by another pass, as far as the budget goes."""
    del distribution, token, drafted
    return jnp.ones_like(context.alive), state


def no_update(state: PolicyState, draft: Draft, result: VerificationResult) -> PolicyState:
    """The result of the verification teaches nothing."""
    del draft, result
    return state


def no_threshold(state: Any) -> Array:
    """[B] float32 NaN: a plot of this rule shows nothing. A state without leaves gives one NaN for all rows."""
    leaves = jax.tree.leaves(state)
    return jnp.full(leaves[0].shape[:1] if leaves else (), jnp.nan, jnp.float32)
