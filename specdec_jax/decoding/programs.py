"""How many programs a jitted function has."""

import functools
from collections.abc import Callable
from typing import Any


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for `jax.jit`; `num_programs` says how often jax traced it, which is once a program."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        traced.programs += 1  # type: ignore[attr-defined]
        return function(*arguments)

    traced.programs = 0  # type: ignore[attr-defined]
    return traced


def num_programs(jitted: Any) -> int:
    """How many programs a jitted `counted` function has by now, one for every set of shapes and static values."""
    return jitted.__wrapped__.programs
