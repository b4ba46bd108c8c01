"""Default functions of a stopping policy: draft to the budget, keep the state, plot nothing."""

from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.types.values import Array, Draft, PolicyState, VerificationResult


def always(state: PolicyState, *arguments: Any) -> tuple[Array, PolicyState]:
    """Begin, draft or proceed in every row; the last argument is the context."""
    return jnp.ones_like(arguments[-1].alive), state


def no_update(state: PolicyState, draft: Draft, result: VerificationResult) -> PolicyState:
    """Return the state unchanged."""
    del draft, result
    return state


def no_threshold(state: Any) -> Array:
    """[B] float32 NaN, which plots omit. A state without leaves gives one NaN for all rows."""
    leaves = jax.tree.leaves(state)
    return jnp.full(leaves[0].shape[:1] if leaves else (), jnp.nan, jnp.float32)
