"""Replays of policies with siblings, by the recorded candidate of the drafter that is the text's token."""

from typing import Any

import jax.numpy as jnp

from specdec_jax.contrib.trees.layout import places, truncated
from specdec_jax.contrib.trees.rejections import candidates
from specdec_jax.contrib.trees.seams import TreeDraft, TreePolicy, TreeResult
from specdec_jax.replay.candidates import CANDIDATES
from specdec_jax.replay.rounds import Rows, Texts, unrecorded
from specdec_jax.replay.trace import Trace
from specdec_jax.types import Array, Draft, RoundContext


def check_replay(policy: TreePolicy, trace: Trace) -> None:
    """Raises ValueError for a policy that needs data about siblings that the trace lacks."""
    if policy.expanded:
        raise ValueError(
            f"a trace does not hold what follows siblings, and {policy.name} wants {policy.expanded} expanded"
        )
    candidates(trace)
    if policy.siblings >= CANDIDATES:
        raise ValueError(f"a trace has {CANDIDATES - 1} siblings, and {policy.name} wants {policy.siblings}")


def end_round(
    policy: TreePolicy, texts: Texts, rows: Rows, context: RoundContext, draft: Draft, most_places: int
) -> tuple[TreeDraft, TreeResult, Array, Array]:
    """(draft, result, tokens verified [R] after the first, tokens emitted [R]) of rounds that end with their rows."""
    assert policy.beside is not None  # checked by check_parts
    size, longest = rows.at.shape[0], draft.one_hot.shape[1]
    siblings = jnp.zeros((size, longest, policy.siblings), jnp.int32)  # their tokens are not read
    free = most_places - rows.drafted
    wanted = policy.beside(rows.policy, rows.drafted, free, context, None)
    tree = truncated(TreeDraft(*draft, siblings=siblings), wanted, free)
    right = _sibling_is_right(texts, rows, tree).astype(jnp.int32)
    tokens: Any = unrecorded("the emitted tokens", (size, longest + 1))
    result = TreeResult(tokens, rows.accepted + 1, right)
    return tree, result, places(tree), result.emitted


def _sibling_is_right(texts: Texts, rows: Rows, draft: TreeDraft) -> Array:
    """[R] bool, whether one of the siblings of the first rejected draft is the text's token."""
    assert texts.candidate is not None and draft.sibling_counts is not None  # checked by check_replay
    at = rows.at if texts.run is not None else rows.at + rows.accepted
    right = texts.candidate[texts.text, jnp.minimum(at, texts.candidate.shape[1] - 1)].astype(jnp.int32)
    depth = jnp.minimum(rows.accepted, draft.sibling_counts.shape[1] - 1)
    count = jnp.take_along_axis(draft.sibling_counts, depth[:, None], axis=1)[:, 0]
    return (rows.accepted < rows.drafted) & (right > 0) & (right <= count)
