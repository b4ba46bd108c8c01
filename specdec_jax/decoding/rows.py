"""Operations on the rows of states: common prefix, repetition and replacement."""

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.sharding import by_rows
from specdec_jax.types import Array, DecodeState


def common_prefix(state: DecodeState, fresh: DecodeState) -> Array:
    """Number of leading tokens [B] that both states share."""
    slot = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)[None, :]
    both = slot < jnp.minimum(state.length, fresh.length)[:, None]
    return jnp.sum(jnp.cumprod(((state.tokens == fresh.tokens) & both).astype(jnp.int32), axis=1), axis=1)


def repeat_row(state: DecodeState, rows: int) -> DecodeState:
    """A state of `rows` copies of the state's single row."""
    return by_rows(jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), state))


def place_row(state: DecodeState, fresh: DecodeState, row: Array) -> DecodeState:
    """The state with its row `row` [] replaced by the single row of `fresh`."""
    return by_rows(jax.tree.map(lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, row, 0), state, fresh))


def check_same_shapes(state: DecodeState, fresh: DecodeState) -> None:
    """Raises ValueError if `fresh` has other cache shapes than the state: its source was padded to another bucket."""
    shapes = [
        [leaf.shape[1:] for leaf in jax.tree.leaves((each.target_cache, each.drafter))] for each in (state, fresh)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError("caches of this prompt have other shapes than the state's: give it the state's source_slots")
