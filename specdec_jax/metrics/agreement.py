"""Where two outputs differ first, and the target's logit gap between the two tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.types import LanguageModel, Params

PADDED = 64  # texts are padded to multiples of this, to compile few shapes


class Difference(NamedTuple):
    """The first token at which two outputs differ."""

    position: int  # index into the new tokens
    tokens: tuple[int | None, int | None]  # None: the output has ended
    logit_gap: float | None  # |logit difference| of the two tokens under the target, at temperature 1


def first_difference(first: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that only one of them has); None for equal sequences."""
    if list(first) == list(other):
        return None
    shared = min(len(first), len(other))
    return next((i for i in range(shared) if first[i] != other[i]), shared)


def compare_outputs(
    target: LanguageModel, params: Params, prompt: Sequence[int], first: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """The first difference of two outputs for one prompt; None if they are equal.

    In bfloat16 passes of different widths round differently, so a greedy choice between nearly equal logits may change;
    a small gap indicates this case. It is computed by one teacher-forced pass over the common prefix.
    """
    at = first_difference(first, other)
    if at is None:
        return None
    pair = (first[at] if at < len(first) else None, other[at] if at < len(other) else None)
    if pair[0] is None or pair[1] is None:
        return Difference(at, pair, None)
    common = [*prompt, *first[:at]]
    padded = jnp.asarray(np.pad(np.asarray(common, np.int32), (0, -len(common) % PADDED))[None])
    cache = target.init_cache(params, 1, padded.shape[1])
    logits, _ = target.apply(params, padded, cache)
    row = logits[0, len(common) - 1]
    return Difference(at, pair, float(jnp.abs(row[pair[0]] - row[pair[1]])))
