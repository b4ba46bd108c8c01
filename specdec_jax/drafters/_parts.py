"""Helpers of drafters: the check of the draft length, and functions of drafters without state."""

from typing import Any

from specdec_jax.types import Array, Params


def check_length(max_draft_length: int) -> None:
    """Raises ValueError for a maximum draft length below 1."""
    if max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {max_draft_length}")


def no_state(params: Params, batch: int, slots: int, source: Any = None) -> tuple[()]:
    """An empty state."""
    del params, batch, slots, source
    return ()


def no_commit(params: Params, state: Any, tokens: Array, length: Array) -> Any:
    """Return the state unchanged."""
    del params, tokens, length
    return state
