"""First rejections of a trace, and whether another candidate of the drafter would have been accepted."""

from typing import Any, NamedTuple

import numpy as np

from specdec_jax.replay.candidates import CANDIDATES
from specdec_jax.replay.trace import FEATURES, Trace

ENTROPY = FEATURES.index("entropy")


class Rejections(NamedTuple):
    """The first rejected draft, within K and the text, of a round from every position; R of them."""

    text: np.ndarray  # [R] int64, index of the text
    begin: np.ndarray  # [R] int64, tokens emitted when the round began
    depth: np.ndarray  # [R] int64, number of drafts accepted before it
    entropy: np.ndarray  # [R] float64, nats, of its distribution
    candidate: np.ndarray  # [R] int64, index of the candidate that is the text's token; 0: none


def runs(trace: Trace) -> np.ndarray:
    """[N, T+1] int64, number of accepted drafts of a round of K drafts from each position, ignoring the text's end."""
    if trace.run is not None:
        return trace.run.astype(np.int64)
    lengths = np.zeros(trace.accepted.shape, np.int64)
    for at in range(lengths.shape[1] - 2, -1, -1):
        lengths[:, at] = np.where(trace.accepted[:, at], lengths[:, at + 1] + 1, 0)
    return np.minimum(lengths, trace.max_draft_length)


def candidates(trace: Trace) -> np.ndarray:
    """[N, T+1] int64, the correct candidate of the first rejected draft of a round from each position; 0: none.

    Raises:
        ValueError: the trace was recorded without candidates.
    """
    if trace.candidate is None:
        raise ValueError("this trace does not say which candidate is right; experiments.record writes one that does")
    if trace.run is not None:
        return trace.candidate.astype(np.int64)
    columns = np.arange(trace.accepted.shape[1])[None, :] + runs(trace)
    return np.take_along_axis(trace.candidate, columns, axis=1).astype(np.int64)


def rejections(trace: Trace) -> Rejections:
    """All rejections of a trace. Raises ValueError as `candidates`."""
    run, right = runs(trace), candidates(trace)
    at = np.arange(run.shape[1])[None, :]
    text, begin = np.nonzero((run < trace.max_draft_length) & (at + run < trace.length[:, None]))
    depth = run[text, begin]
    entropy = entropies(trace)[text, begin, depth]
    return Rejections(text, begin, depth, entropy, right[text, begin])


def entropies(trace: Trace) -> np.ndarray:
    """Entropies [N, T+1, K] float64, nats, of a round's drafts from each position, along the text while accepted."""
    if trace.chains is not None:
        return trace.chains[..., ENTROPY].astype(np.float64)
    ahead = np.arange(trace.path.shape[1])[:, None] + np.arange(trace.max_draft_length)[None, :]
    along = trace.path[:, np.minimum(ahead, trace.path.shape[1] - 1), ENTROPY].astype(np.float64)
    run, depth = runs(trace)[..., None], np.arange(trace.max_draft_length)
    first = np.take_along_axis(trace.tail_of, np.minimum(np.arange(run.shape[1]) + run[..., 0], run.shape[1] - 1), 1)
    beyond = trace.tails[first[..., None], np.clip(depth - run, 0, None), ENTROPY] if len(trace.tails) else along
    return np.where(depth < run, along, beyond)


def chances(right: Any, text: np.ndarray, texts: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Number of times that candidate 1, 2 ... was correct, and that it was tested (earlier ones wrong); [N] each.

    Args:
        right: [R] of Rejections.candidate; text: [R], index of the text of each, below `texts`.
    """
    rows = []
    for candidate in range(1, CANDIDATES):
        tried = (right == 0) | (right >= candidate)
        rows.append(tuple(np.bincount(text[of], minlength=texts) for of in (tried & (right == candidate), tried)))
    return rows
