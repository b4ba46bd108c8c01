"""Counts the programs of a jitted function."""

import functools
from collections.abc import Callable
from typing import Any


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function for `jax.jit` to count its traces, one per program; `num_programs` returns the count."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        traced.programs += 1  # type: ignore[attr-defined]
        return function(*arguments)

    traced.programs = 0  # type: ignore[attr-defined]
    return traced


def num_programs(jitted: Any) -> int:
    """Number of programs of a jitted `counted` function so far, one for every set of shapes and static values."""
    return jitted.__wrapped__.programs
