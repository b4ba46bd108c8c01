"""Where two decodings part, and by how little the target preferred one token to the other there."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.types import LanguageModel, Params


class Difference(NamedTuple):
    """The first token at which two outputs differ."""

    position: int  # index into the new tokens
    tokens: tuple[int | None, int | None]  # None: that output had ended
    logit_gap: float | None  # |logit difference| of the two tokens under the target, at temperature 1


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that only one of them has); None for equal sequences."""
    if list(one) == list(other):
        return None
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), shared)


def compare_outputs(
    target: LanguageModel, params: Params, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """How two outputs for one prompt part; None if they are equal.

    In bfloat16 a pass of another width rounds differently, so a greedy choice between near-equal logits may flip: the
    gap says whether that is what happened. It comes from one teacher-forced pass over the shared beginning.
    """
    at = first_difference(one, other)
    if at is None:
        return None
    pair = (one[at] if at < len(one) else None, other[at] if at < len(other) else None)
    if pair[0] is None or pair[1] is None:
        return Difference(at, pair, None)
    known = [*prompt, *one[:at]]
    padded = known + [0] * (-len(known) % 64)  # a few shapes only: one more token must not compile anew
    cache = target.init_cache(params, 1, len(padded))
    logits, _ = target.apply(params, jnp.array([padded], jnp.int32), cache)
    row = logits[0, len(known) - 1]
    return Difference(at, pair, float(jnp.abs(row[pair[0]] - row[pair[1]])))
