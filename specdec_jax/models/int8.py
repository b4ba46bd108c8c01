"""Weight matrices in int8 with a scale per row, for models that do not fit into memory in bfloat16.

Symmetric quantisation by output channel (arXiv 1806.08342, section 2): the largest weight of a row is 127 times its
scale. Matrices are quantised when a model is loaded. Int8 values are exact in bfloat16, so that the product with the
values, summed in float32, times the scales equals the product with the rounded matrix; inputs, sums and all other
parameters are not quantised. The rows of an embedding or a head are tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.types import Array

LARGEST = 127
TOGETHER = 1 << 18  # number of weights rounded at a time in float32, to stay in the processor's cache


class Int8(NamedTuple):
    """A matrix, or a stack of matrices. Indexing rows, or matrices of a stack, applies to both arrays."""

    values: Any  # [..., F, D] int8
    scale: Any  # [..., F] float32, one per output channel

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def size(self) -> int:
        return self.values.size


Contract = Callable[[Array, Array], Array]
Matrix = Any
"""A matrix [..., F, D] for `layers.project`: an array or Int8."""


def is_matrix(node: Any) -> bool:
    """Whether a node is Int8; the `is_leaf` of walks over parameter trees."""
    return isinstance(node, Int8)


def rounded(matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """A host matrix [F, D] as int8 values [F, D] and scales [F] float32.

    Raises ValueError for weights that are not finite.
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
    """The rows of a matrix at `index`."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], matrix)


def as_float32(matrix: Matrix) -> Array:
    """The dequantised matrix."""
    if isinstance(matrix, Int8):
        return matrix.values.astype(jnp.float32) * matrix.scale[..., None]
    return matrix.astype(jnp.float32)


def product(x: Array, matrix: Matrix, dtype: Any, contract: Contract, narrow: Contract | None = None) -> Array:
    """`contract(x, matrix)` float32 of x [..., D], rounded to `dtype`; a stack's axes come first in the result.

    The barrier ties the values to the inputs: XLA would hoist their conversion out of the loops of passes and keep
    every matrix in `dtype`, twice its bytes, for the whole generation. On a CPU conversion to bfloat16 costs more than
    to float32, which gives the same products. `narrow` replaces `contract` on a CPU.
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
    """x [..., D] times matrix [F, D] by sums: a CPU reads the stored matrix; a product would convert it first."""
    flat = x.reshape(-1, x.shape[-1])  # XLA of jax 0.10.2 (its YNNPACK fusions) adds up wrong numbers with more axes
    return jnp.sum(flat[:, None, :] * matrix[None], axis=-1).reshape(*x.shape[:-1], -1)
