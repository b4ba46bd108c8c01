"""The types of weights by name: floating dtypes and int8."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.strategy import nearest

DTYPES = ("bfloat16", "float16", "float32")
INT8 = "int8"
PRECISIONS = (*DTYPES, INT8)


class Precision(NamedTuple):
    """The number types of a model."""

    dtype: Any  # dtype of the cache, inputs of matrix products, and weights (with int8: except matrices)
    int8: bool = False  # whether matrices are int8 (models.int8)


def check_dtype(dtype: Any) -> Any:
    """A name or a dtype as a numpy dtype. Raises ValueError for unsupported types of weights."""
    return precision(dtype, DTYPES).dtype


def precision(dtype: Any, names: Sequence[str] = PRECISIONS) -> Precision:
    """The Precision for a `dtype` of `load_model`, a name or a dtype. Raises ValueError if it is none of `names`."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    if name not in names:
        raise ValueError(f"unknown dtype {name!r}{nearest(name, names)}")
    return Precision(jnp.dtype("bfloat16" if name == INT8 else name), name == INT8)
