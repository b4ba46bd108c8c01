"""Hyperparameters of policies, verifiers and warps: one value or one per row, checked while they are concrete."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from specdec_jax.ranges import Between, shortened


def in_rows(batch: int, value: Any, name: str, within: Between, dtype: Any = None) -> Array:
    """`value` as [B] on the host, or [B, N] if its range has `entries`; one for all rows, or one per row.

    A traced value is not checked. `dtype`: float32 unless given, or int32 for whole numbers.

    Raises:
        ValueError: the value is out of range, not a number, or has another shape.
    """
    dtype = dtype or (np.int32 if within.whole else np.float32)
    if traced := any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        numbers = (value if isinstance(value, Tracer) else jnp.stack(value)).astype(dtype)
    else:
        try:
            numbers = np.asarray(value).astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            raise within.error(name, value, is_number=False) from None
        if within.whole and np.any(numbers != np.round(numbers)):
            raise within.error(name, value, is_number=False)
        if within.whole:
            within = within._replace(high=min(within.high, np.iinfo(dtype).max))
        else:
            with np.errstate(over="ignore"):  # too large values become infinite and are refused below
                numbers = numbers.astype(dtype)  # compared in the final type: float32(0.99) is in [0, 0.99]
    row = () if within.entries is None else (within.entries or (*numbers.shape, 1)[numbers.ndim - 1],)
    if numbers.shape not in (row, (batch, *row)) or 0 in row:
        wanted = f"a list of {within.entries or 'one or more'} numbers" if row else "one number"
        raise ValueError(
            f"{name} must be {wanted}, or {batch} (one a row), got shape {numbers.shape}: {shortened(value)}"
        )
    if traced:
        return jnp.broadcast_to(numbers, (batch, *row))
    if not np.all(within.contains(numbers)):
        raise within.error(name, value)
    return host(np.broadcast_to(numbers.astype(dtype), (batch, *row)).copy())


def full(batch: int, value: Any, dtype: Any = np.float32) -> Array:
    """`value` in every row, [B] on the host."""
    return host(np.full(batch, value, dtype))


def host(values: np.ndarray) -> Array:
    """A numpy array typed as a jax array: states are built on the host and converted by jit."""
    return cast(Array, values)


def select_rows(chosen: Array, new: Any, old: Any) -> Any:
    """Row b of every leaf from `new` where chosen[b], else from `old`. Leaves are [B, ...]."""

    def pick(after: Array, before: Array) -> Array:
        mask = chosen.reshape(chosen.shape + (1,) * (after.ndim - 1))
        return jnp.where(mask, after, before)

    return jax.tree.map(pick, new, old)
