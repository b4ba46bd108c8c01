"""Rows of states: what two have in common, one repeated, one put in another's place."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.sharding import by_rows
from specdec_jax.types import Array, DecodeState


def common_prefix(state: DecodeState, fresh: DecodeState) -> Array:
    """Tokens [B] that both begin with."""
    slot = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
    both = slot < jnp.minimum(state.length, fresh.length)[:, None]
    return jnp.sum(jnp.cumprod(((state.tokens == fresh.tokens) & both).astype(jnp.int32), axis=1), axis=1)


def repeat_row(state: DecodeState, rows: int) -> DecodeState:
    """So many rows like the one of the state."""
    return by_rows(jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), state))


def place_row(state: DecodeState, fresh: DecodeState, row: Array) -> DecodeState:
    """The state with the one row of `fresh` as its row `row` []."""
    return by_rows(jax.tree.map(lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, row, 0), state, fresh))


def check_same_shapes(state: DecodeState, fresh: DecodeState) -> None:
    """Raises ValueError where a row of `fresh` cannot be one of the state: caches of sources of another bucket."""
    if _row_shapes(state) != _row_shapes(fresh):
        raise ValueError("caches of this prompt have other shapes than the state's: give it the state's source_slots")


def _row_shapes(state: DecodeState) -> list[Any]:
    return [leaf.shape[1:] for leaf in jax.tree.leaves((state.target_cache, state.drafter))]
