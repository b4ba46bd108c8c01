"""What a verdict says of single positions, for rules that remember what they saw there while drafting.

A position is reached if its token was drafted and all before it were accepted; what lies beyond the first rejected
token was never judged. Buffers are [B, P], P a structural number of positions; drafts beyond it are not remembered.
"""

import jax.numpy as jnp

from specdec_jax.types import Array, Draft, Verdict


def remember(buffer: Array, position: Array, value: Array) -> Array:
    """`buffer` [B, P] with `value` [B] at `position` [B] of this round's draft (0 is its first token)."""
    slot = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(slot == position[:, None], value.astype(buffer.dtype)[:, None], buffer)


def reached(draft: Draft, verdict: Verdict, positions: int) -> tuple[Array, Array]:
    """Masks [B, P] bool: the positions that were reached, and those of them that were accepted."""
    slot = jnp.arange(positions, dtype=jnp.int32)[None, :]
    accepted = slot < (verdict.length - 1)[:, None]
    judged = (slot < verdict.length[:, None]) & (slot < draft.length[:, None])
    return judged, accepted
