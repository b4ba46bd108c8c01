"""Replays of policies with siblings, by the recorded candidate that is the text's token."""

from typing import Any

import jax.numpy as jnp

from specdec_jax.contrib.trees.seams import TreeDraft, TreePolicy, TreeResult
from specdec_jax.replay.chains import CANDIDATES
from specdec_jax.replay.rounds import Rows, Texts, unrecorded
from specdec_jax.types import Array, Draft, RoundContext


def end_round(
    policy: TreePolicy, texts: Texts, rows: Rows, context: RoundContext, draft: Draft, most_places: int
) -> tuple[TreeDraft, TreeResult, Array, Array]:
    """(draft, result, tokens verified [R] after the first, tokens emitted [R]) of rounds that end with their rows.

    Raises ValueError for a policy that needs data about siblings that the trace lacks.
    """
    assert policy.beside is not None  # checked by round_of
    if texts.candidate is None:
        raise ValueError("this trace does not say which candidate is right; experiments.record writes one that does")
    if policy.siblings >= CANDIDATES:
        raise ValueError(f"a trace has {CANDIDATES - 1} siblings, and {policy.name} wants {policy.siblings}")
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
