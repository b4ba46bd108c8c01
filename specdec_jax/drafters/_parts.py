"""What drafters share: the check of their length, and a state for those that keep nothing between rounds."""

from typing import Any

from specdec_jax.types import Array, Params


def check_length(max_draft_length: int) -> None:
    """Raises ValueError below 1."""
    if max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {max_draft_length}")


def no_state(params: Params, batch: int, slots: int, source: Any = None) -> tuple[()]:
    """Nothing is kept between rounds."""
    del params, batch, slots, source
    return ()


def no_commit(params: Params, state: Any, tokens: Array, length: Array) -> Any:
    """The round's outcome teaches nothing."""
    del params, tokens, length
    return state
