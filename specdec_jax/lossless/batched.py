"""Compiled functions over any number of rows, a batch at a time: numpy in, numpy out, and rows compared among batches.

The rows of a call are shuffled, so that a batch mixes texts, warps and drafts. Each call is repeated for some rows: in
the same place beside other rows, where every bit must be equal, and alone, in a batch of one.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from specdec_jax.types import RoundContext

ROWS = 512  # rows per compiled call
REPEATED = 32  # rows per call that are repeated in a batch of one


class Neighbours:
    """Counts of compared rows, and the first function whose answer for a row depended on other rows."""

    def __init__(self, seed: int) -> None:
        self.rng, self.compared, self.wrong = np.random.default_rng(seed), 0, ""

    def compare(self, name: str, how: str, answers: Any, others: Any, exact: bool) -> None:
        """Compares the answers [N, ...] for the same rows; floats to the bit if `exact`, else up to rounding."""
        pairs = [*zip(jax.tree.leaves(answers), jax.tree.leaves(others), strict=True)]
        self.compared += len(pairs[0][0]) if pairs else 0
        if not self.wrong and not all(_alike(first, second, exact) for first, second in pairs):
            self.wrong = f"{name} differs for the same row {how}"


def _alike(first: np.ndarray, second: np.ndarray, exact: bool) -> bool:
    if exact or first.dtype.kind != "f":
        return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
    return np.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def in_batches(
    function: Callable[..., Any],
    batch: int,
    name: str,
    joins_rows: bool = False,
    as_used: Callable[[Any], Any] = lambda answers: answers,
) -> Callable[..., Any]:
    """`function` as (neighbours, context, *rest [N, ...]) -> answers [N, ...], `batch` rows per call of it.

    The last batch is padded with finished rows. Functions that join rows on purpose are not compared.
    `as_used` gives what is compared of answers whose unused parts are rounding.
    """
    compiled = jax.jit(lambda arguments: lax.map(lambda rows: function(*rows), arguments))

    def answers(rows: Any, batch: int) -> Any:
        """The answers for rows in batches of `batch`, one after the other; ROWS or REPEATED of them."""
        grouped = jax.tree.map(lambda leaf: leaf.reshape(len(leaf) // batch, batch, *leaf.shape[1:]), rows)
        flat = lambda leaf: np.asarray(leaf).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])  # noqa: E731
        return jax.tree.map(flat, compiled(grouped))

    def call(neighbours: Neighbours, context: RoundContext, *rest: Any) -> Any:
        count, size = len(context.length), ROWS // batch * batch
        if count == 0:
            one_row = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), (context, *rest))
            return jax.tree.map(lambda leaf: leaf[:0], call(neighbours, *one_row))
        places = np.arange(-(-count // size) * size)
        order = neighbours.rng.permutation(count)
        alive = take_rows(context.alive, order[places % count]) & (places < count)
        context, *others = take_rows((context, *rest), order[places % count])
        context = context._replace(alive=alive, budget=np.where(alive, context.budget, 0))
        parts = [
            answers(take_rows((context, *others), slice(first, first + size)), batch)
            for first in range(0, len(places), size)
        ]
        results = joined(parts)
        if not joins_rows:
            shifted = places[:size].reshape(-1, batch)
            shifted = np.stack([np.roll(column, index) for index, column in enumerate(shifted.T)], axis=1).ravel()
            again = answers(take_rows((context, *others), shifted), batch)
            neighbours.compare(name, "beside other rows", take_rows(results, shifted), again, exact=True)
            some = neighbours.rng.choice(count, REPEATED)
            single = as_used(answers(take_rows((context, *others), some), 1))
            neighbours.compare(name, "alone and in a batch", as_used(take_rows(results, some)), single, exact=False)
        return take_rows(results, np.argsort(order))

    return call


def take_rows(rows: Any, index: Any) -> Any:
    """Rows of every leaf, copied."""
    return jax.tree.map(lambda leaf: np.array(np.asarray(leaf)[index]), rows)


def joined(parts: list[Any]) -> Any:
    """Concatenates the rows of all parts."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
