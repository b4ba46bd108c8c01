"""Hyperparameters of policies, verifiers and warps: one value or one per row, checked while they are concrete."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specdec_jax.types import Array


def per_row(
    batch: int,
    value: Any,
    name: str,
    *,
    low: float = -np.inf,
    high: float = np.inf,
    open_low: bool = False,
    dtype: Any = np.float32,
) -> Array:
    """`value` (a scalar or [B]) as [B] on the host.

    It must be finite and in [low, high], or (low, high] if `open_low`. A traced value is not checked: the caller is
    responsible for its range.

    Raises:
        ValueError: the value is out of range, not a number, or has another length than `batch`.
    """
    if isinstance(value, Tracer):
        return jnp.broadcast_to(value.astype(dtype), (batch,))
    try:
        numbers = np.asarray(value).astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if np.issubdtype(dtype, np.integer):
        if np.any(numbers != np.round(numbers)):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        high = min(high, np.iinfo(dtype).max)
    else:
        with np.errstate(over="ignore"):  # too large values become infinite and are refused below
            numbers = numbers.astype(dtype)  # compared in the final type: float32(0.99) is in [0, 0.99]
    if numbers.shape not in ((), (batch,)):
        raise ValueError(f"{name} must be one number or {batch} (one a row), got shape {numbers.shape}")
    above = numbers > low if open_low else numbers >= low
    if not np.all(above & (numbers <= high) & np.isfinite(numbers)):
        left = "(" if open_low or low == -np.inf else "["
        right = ")" if high == np.inf else "]"
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, got {value!r}")
    return host(np.broadcast_to(numbers.astype(dtype), (batch,)).copy())


def host(values: np.ndarray) -> Array:
    """A numpy array typed as a jax array: states are built on the host and converted by jit."""
    return cast(Array, values)


def select_rows(chosen: Array, new: Any, old: Any) -> Any:
    """Row b of every leaf from `new` where chosen[b], else from `old`. Leaves are [B, ...]."""

    def pick(after: Array, before: Array) -> Array:
        mask = chosen.reshape(chosen.shape + (1,) * (after.ndim - 1))
        return jnp.where(mask, after, before)

    return jax.tree.map(pick, new, old)


def vector_per_row(
    batch: int, value: Any, name: str, size: int, *, low: float = -np.inf, high: float = np.inf
) -> Array:
    """`value` ([size], or [B, size] for one per row) as [B, size] float32 on the host; checked as in `per_row`.

    Raises:
        ValueError: another shape, or an entry that is not finite or out of range.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        stacked = value if isinstance(value, Tracer) else jnp.stack(value)
        return jnp.broadcast_to(stacked.astype(np.float32), (batch, size))
    try:
        numbers = np.asarray(value).astype(np.float32)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be {size} numbers, got {value!r}") from None
    if numbers.shape not in ((size,), (batch, size)):
        raise ValueError(f"{name} must be {size} numbers, or that for each of {batch} rows, got shape {numbers.shape}")
    if not np.all(np.isfinite(numbers) & (numbers >= low) & (numbers <= high)):
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value!r}")
    return host(np.broadcast_to(numbers, (batch, size)).copy())
