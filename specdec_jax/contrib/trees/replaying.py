"""Replays of policies with siblings, by the recorded candidate that is the text's token; rejections of a trace."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.contrib.trees.seams import TreeDraft, TreePolicy, TreeResult
from specdec_jax.metrics.foresight import drafts_from
from specdec_jax.replay.chains import CANDIDATES
from specdec_jax.replay.rounds import Rows, Texts, unrecorded
from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.types import Array, Draft, RoundContext


class Rejections(NamedTuple):
    """The first rejected draft, within K and the text, of a round from every position; R of them."""

    text: np.ndarray  # [R] int64, index of the text
    depth: np.ndarray  # [R] int64, number of drafts accepted before it
    entropy: np.ndarray  # [R] float64, nats, of its distribution
    candidate: np.ndarray  # [R] int64, index of the candidate that is the text's token; 0: none


def runs(trace: Trace) -> np.ndarray:
    """[N, T+1] int64, number of accepted drafts of a round of K drafts from each position, ignoring the text's end."""
    return np.minimum(trace.accepted_runs().astype(np.int64), trace.max_draft_length)


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
    return Rejections(text, depth, entropies(trace)[text, begin, depth], right[text, begin])


def entropies(trace: Trace) -> np.ndarray:
    """Entropies [N, T+1, K] float64, nats, of a round's drafts from each position, along the text while accepted."""
    return drafts_from(trace, trace.max_draft_length)[..., FEATURES.index("entropy")].astype(np.float64)


def chances(right: Any, text: np.ndarray, texts: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Number of times that candidate 1, 2 ... was correct, and that it was tested (earlier ones wrong); [N] each.

    `right` and `text` [R] are of Rejections, `texts` (N) is the number of texts.
    """
    rows = []
    for candidate in range(1, CANDIDATES):
        tried = (right == 0) | (right >= candidate)
        rows.append(tuple(np.bincount(text[of], minlength=texts) for of in (tried & (right == candidate), tried)))
    return rows


def check_replay(policy: TreePolicy, trace: Trace) -> None:
    """Raises ValueError for a policy that needs data about siblings that the trace lacks."""
    candidates(trace)
    if policy.siblings >= CANDIDATES:
        raise ValueError(f"a trace has {CANDIDATES - 1} siblings, and {policy.name} wants {policy.siblings}")


def end_round(
    policy: TreePolicy, texts: Texts, rows: Rows, context: RoundContext, draft: Draft, most_places: int
) -> tuple[TreeDraft, TreeResult, Array, Array]:
    """(draft, result, tokens verified [R] after the first, tokens emitted [R]) of rounds that end with their rows."""
    assert policy.beside is not None and texts.candidate is not None  # checked by round_of and check_replay
    size, longest = draft.one_hot.shape
    siblings = jnp.zeros((size, longest, policy.siblings), jnp.int32)  # their tokens are not read
    free = most_places - rows.drafted
    tree = TreeDraft.of(draft, siblings, policy.beside(rows.policy, rows.drafted, free, context), free)
    # the text's token is the candidate `right` of the first rejected draft, counted from the draft itself
    at = rows.at if texts.run is not None else rows.at + rows.accepted
    right = texts.candidate[texts.text, jnp.minimum(at, texts.candidate.shape[1] - 1)].astype(jnp.int32)
    depth = jnp.minimum(rows.accepted, longest - 1)
    count = jnp.take_along_axis(tree.sibling_counts, depth[:, None], axis=1)[:, 0]
    is_accepted = (rows.accepted < rows.drafted) & (right > 0) & (right <= count)
    tokens: Any = unrecorded("the emitted tokens", (size, longest + 1))
    result = TreeResult(tokens, rows.accepted + 1, is_accepted.astype(jnp.int32))
    return tree, result, tree.places, result.emitted
