"""What most rules do not decide."""

import jax.numpy as jnp

from specdec_jax.types import Array, Draft, Law, PolicyState, RoundContext, Verdict


def always_begin(state: PolicyState, context: RoundContext) -> tuple[Array, PolicyState]:
    """Every round pays for its first drafter pass."""
    return jnp.ones_like(context.alive), state


def always_draw(state: PolicyState, law: Law, drafted: Array, context: RoundContext) -> tuple[Array, PolicyState]:
    """Every law that was paid for gives its token."""
    del law, drafted
    return jnp.ones_like(context.alive), state


def always_proceed(
    state: PolicyState, law: Law, token: Array, drafted: Array, context: RoundContext
) -> tuple[Array, PolicyState]:
    """Every drawn token is followed by another pass, as far as the budget goes."""
    del law, token, drafted
    return jnp.ones_like(context.alive), state


def no_update(state: PolicyState, draft: Draft, verdict: Verdict) -> PolicyState:
    """The verdict teaches nothing."""
    del draft, verdict
    return state
