"""Compiled functions over any number of rows, a fixed number a call: numpy in, numpy out."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from specdec_jax.types import RoundContext

GROUPS = 64  # batches per compiled call


def in_batches(function: Callable[..., Any], batch: int) -> Callable[..., Any]:
    """`function` over [N, ...] numpy arguments, `batch` rows per call; the last call is padded with finished rows."""
    compiled = jax.jit(lambda arguments: lax.map(lambda rows: function(*rows), arguments))
    size = batch * GROUPS

    def call(context: RoundContext, *rest: Any) -> Any:
        count = len(context.length)
        index = np.arange(-(-max(count, 1) // size) * size)
        if count == 0:
            one_row = jax.tree.map(
                lambda leaf: np.zeros((1, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), (context, *rest)
            )
            return jax.tree.map(lambda leaf: leaf[:0], call(*one_row))
        context, *others = take((context, *rest), index % count)
        alive = context.alive & (index < count)
        context = context._replace(alive=alive, budget=np.where(alive, context.budget, 0))
        results = []
        for begin in range(0, len(index), size):
            rows = take((context, *others), slice(begin, begin + size))
            grouped = jax.tree.map(lambda leaf: leaf.reshape(GROUPS, batch, *leaf.shape[1:]), rows)
            flat = lambda leaf: np.asarray(leaf).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])  # noqa: E731
            results.append(jax.tree.map(flat, compiled(grouped)))
        return take(joined(results), slice(0, count))

    return call


def take(rows: Any, index: Any) -> Any:
    """Rows of every leaf, copied."""
    return jax.tree.map(lambda leaf: np.array(np.asarray(leaf)[index]), rows)


def joined(parts: list[Any]) -> Any:
    """Concatenates the rows of all parts."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
