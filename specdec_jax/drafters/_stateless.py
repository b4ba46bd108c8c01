"""The two halves of a drafter that remembers nothing: it reads the text anew every round, or never."""

from typing import Any

from specdec_jax.types import Array, Params


def no_state(params: Params, batch: int, slots: int, source: Any = None) -> tuple[()]:
    """Nothing is kept between rounds."""
    del params, batch, slots, source
    return ()


def no_commit(params: Params, state: Any, tokens: Array, length: Array) -> Any:
    """The round's outcome teaches nothing."""
    del params, tokens, length
    return state
