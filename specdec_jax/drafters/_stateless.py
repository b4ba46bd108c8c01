"""The two halves of a drafter that remembers nothing: it reads the text anew every round, or never."""

from specdec_jax.types import Array, Params


def no_state(params: Params, batch: int, slots: int) -> tuple[()]:
    """Nothing is kept between rounds."""
    del params, batch, slots
    return ()


def no_commit(params: Params, state: tuple[()], tokens: Array, length: Array) -> tuple[()]:
    """The round's outcome teaches nothing."""
    del params, tokens, length
    return state
