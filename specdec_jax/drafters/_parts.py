"""Helpers of drafters: ranges of options, and functions of drafters without state."""

from typing import Annotated, Any

from specdec_jax.ranges import Between
from specdec_jax.types import Array, Params

FED = 2  # tokens per pass of a drafter's model
DraftLength = Annotated[int, Between(1)]
CatchUp = Annotated[int, Between(FED)]


def no_state(params: Params, batch: int, slots: int, source: Any = None) -> tuple[()]:
    """An empty state."""
    del params, batch, slots, source
    return ()


def no_commit(params: Params, state: Any, tokens: Array, length: Array) -> Any:
    """Return the state unchanged."""
    del params, tokens, length
    return state
