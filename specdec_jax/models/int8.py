"""Matrices in eight bits, each of their rows with a scale: for models that do not fit into memory in bfloat16.

Symmetric, by output channel (arXiv 1806.08342, section 2): the largest weight of a row is 127 of its scales. Made when
a model is loaded. A value is exact in bfloat16, so that a product with the values, summed in float32, times the scales
is the product with the rounded matrix: inputs, sums and what is no matrix are as without it. A row of an embedding or
a head is a token's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

LARGEST = 127
TOGETHER = 1 << 18  # weights that are float32 at a time while they are rounded: what stays in a processor's cache


class Int8(NamedTuple):
    """A matrix, or a stack of them. What picks rows, or matrices of a stack, picks the same of both arrays."""

    values: Any  # [..., F, D] int8
    scale: Any  # [..., F] float32, of each output channel

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.values.shape

    @property
    def size(self) -> int:
        """Weights."""
        return self.values.size


Contract = Callable[[Array, Array], Array]
Matrix = Any
"""An array [..., F, D], or Int8: what `layers.project` multiplies with."""


def is_matrix(node: Any) -> bool:
    """Whether Int8: what a walk over a tree of parameters takes as one leaf."""
    return isinstance(node, Int8)


def rounded(matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """A host matrix [F, D] as int8 values [F, D] and scales [F] float32.

    Raises ValueError for weights that are not finite: no scale holds them.
    """
    values, scale = np.empty(matrix.shape, np.int8), np.empty(matrix.shape[:1], np.float32)
    step = max(1, TOGETHER // matrix.shape[1])
    for first in range(0, len(matrix), step):
        rows = slice(first, first + step)
        weights = np.array(matrix[rows], np.float32)
        scale[rows] = np.maximum(np.abs(weights).max(axis=1) / np.float32(LARGEST), np.finfo(np.float32).tiny)
        if not np.isfinite(scale[rows]).all():
            raise ValueError("weights that are not finite have no scale in int8")
        weights /= scale[rows, None]
        values[rows] = np.rint(weights, out=weights)
    return values, scale


def rows(matrix: Matrix, index: Any) -> Matrix:
    """These rows of it."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], matrix)


def as_float32(matrix: Matrix) -> Array:
    """What it stands for, as one array."""
    if isinstance(matrix, Int8):
        return matrix.values.astype(jnp.float32) * matrix.scale[..., None]
    return matrix.astype(jnp.float32)


def product(x: Array, matrix: Matrix, dtype: Any, contract: Contract, narrow: Contract | None = None) -> Array:
    """`contract(x, matrix)` float32 of x [..., D], rounded to `dtype`; of a stack the result's first axes are its own.

    The barrier keeps the values beside the inputs: XLA takes what depends on no pass out of the loops of passes, and
    would keep every matrix in `dtype`, twice its bytes, for the whole generation. A CPU's conversion to bfloat16 costs
    more than one to float32, where the products are the same numbers. `narrow` is what a CPU takes in its place.
    """
    x = x.astype(dtype)
    if not isinstance(matrix, Int8):
        return contract(x, matrix.astype(dtype))
    x, values = lax.optimization_barrier((x, matrix.values))
    sums = lax.platform_dependent(
        x,
        values,
        cpu=lambda x, values: (narrow or contract)(x.astype(jnp.float32), values.astype(jnp.float32)),
        default=lambda x, values: contract(x, values.astype(dtype)),
    )
    *stack, last = matrix.scale.shape
    return sums * matrix.scale.reshape(*stack, *(1,) * (sums.ndim - matrix.scale.ndim), last)


def by_sums(x: Array, matrix: Array) -> Array:
    """x [..., D] times matrix [F, D]. A CPU reads the matrix for it as it is stored; a product's it converts first."""
    return jnp.sum(x[..., None, :] * matrix.reshape(*(1,) * (x.ndim - 1), *matrix.shape), axis=-1)
