"""Detection of repeated text. Small targets loop in greedy decoding, which makes text easy to predict for any drafter.

Definition: a token is repeated when it is in an n-gram (default 8 tokens) that already began earlier in the same
text. The first copy is not counted; copies may overlap (of "ha" twenty times, all but the first are repeated), need not
be adjacent, and need not last to the end of the text. A common phrase of fewer than n tokens is not repetition, and
neither is a loop that changes something in every n tokens (a counting list); lower n to see those.
"""

from collections.abc import Sequence

import numpy as np

DEFAULT_N = 8


def repeated_mask(tokens: Sequence[int] | np.ndarray, n: int = DEFAULT_N) -> np.ndarray:
    """Which tokens [T] of one text (without its prompt) are repeated, [T] bool: at least `n` consecutive ones.

    Raises ValueError: `n` is below 1, or `tokens` is not one-dimensional.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    if ids.ndim != 1:
        raise ValueError(f"tokens must be one text, [T], got shape {ids.shape}")
    mask = np.zeros(len(ids), dtype=bool)
    if len(ids) <= n:
        return mask
    grams = np.lib.stride_tricks.sliding_window_view(ids, n)  # [T-n+1, n]
    _, first, which = np.unique(grams, axis=0, return_index=True, return_inverse=True)
    began_earlier = first[which.reshape(-1)] < np.arange(len(grams))
    for offset in range(n):
        mask[offset : offset + len(grams)] |= began_earlier
    return mask


def repeated_share(tokens: Sequence[int] | np.ndarray) -> float:
    """The share of tokens that are repeated, 0 to 1; 0 for an empty text. Raises as `repeated_mask` does."""
    mask = repeated_mask(tokens)
    return float(mask.mean()) if len(mask) else 0.0
