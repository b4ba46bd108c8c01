"""What a verification says of single positions, for rules that remember what they saw there while drafting.

A position is evaluated if its token was drafted and all before it were accepted; what lies beyond the first rejected
token was never evaluated. Buffers are [B, P], P a static number of positions; drafts beyond it are not remembered.
"""

import jax.numpy as jnp

from specdec_jax.types import Array, Draft, VerificationResult


def remember(buffer: Array, position: Array, value: Array) -> Array:
    """`buffer` [B, P] with `value` [B] at `position` [B] of this round's draft (0 is its first token)."""
    slot = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(slot == position[:, None], value.astype(buffer.dtype)[:, None], buffer)


def evaluated_positions(draft: Draft, result: VerificationResult, positions: int) -> tuple[Array, Array]:
    """Masks [B, P] bool: the positions that were evaluated, and those of them that were accepted."""
    slot = jnp.arange(positions, dtype=jnp.int32)[None, :]
    accepted = slot < (result.length - 1)[:, None]
    evaluated = (slot < result.length[:, None]) & (slot < draft.length[:, None])
    return evaluated, accepted
