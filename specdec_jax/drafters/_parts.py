"""Functions of drafters without state."""

from typing import Any

from specdec_jax.types import Array, Params


def no_state(params: Params, batch: int, slots: int, source: Any = None) -> tuple[()]:
    """An empty state."""
    del params, batch, slots, source
    return ()


def no_commit(params: Params, state: Any, tokens: Array, length: Array) -> Any:
    """Return the state unchanged."""
    del params, tokens, length
    return state
