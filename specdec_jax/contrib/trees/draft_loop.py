"""The draft loop of chains with siblings: as `decoding/draft_loop.py`, with further candidates at every position.

A policy may expand siblings: they are chosen before a pass, which also reads them, and the tokens drawn after them are
their children.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.contrib.trees.expansion import expanded_tokens, no_children, to_expand, with_children
from specdec_jax.contrib.trees.seams import Children, TreePolicy
from specdec_jax.contrib.trees.siblings import further_candidates
from specdec_jax.contrib.trees.sources import PredictBeside
from specdec_jax.decoding.draft_loop import Loop, draft_one, in_turn, initial_loop, left_over
from specdec_jax.decoding.sampling import BY_CANDIDATE, draw_token
from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import Array, Distribution, Drafted, Next, PolicyState, RoundContext, Source

Uniform = Callable[[Array], Array]


class TreeDrafted(NamedTuple):
    """The result of a round's draft loop: the chain with its siblings and children."""

    chain: Drafted
    siblings: Array  # [B, K, M] int32
    children: Children | None  # for policies that expand siblings


class _TreeLoop(NamedTuple):
    """The loop's carry: that of a chain, and its siblings and children."""

    chain: Loop
    siblings: Array
    children: Children | None


def draft(
    source: Source,
    predict_beside: PredictBeside | None,
    policy: TreePolicy,
    state: PolicyState,
    context: RoundContext,
    uniform: Uniform,
    max_draft_length: int,
    log_q: Array | None = None,
) -> TreeDrafted:
    """One round's draft: a chain of at most `max_draft_length` (K) tokens per row, with `policy.siblings` per token.

    Args:
        predict_beside: reads expanded siblings; None for policies without.
        uniform: (index []) -> [B] float32 in [0, 1), with which draft `index` is drawn; its sibling i with index
            + i * BY_CANDIDATE, followed by the children of siblings expanded in its pass.
        log_q: [B, K, V] buffer for the distributions; None: they are not kept.
    """
    context, chain = initial_loop(source, policy, state, context, max_draft_length, log_q)
    siblings = jnp.zeros((*chain.drafted.tokens.shape, policy.siblings), jnp.int32)
    expansions = policy.expanded * (max_draft_length - 1)  # a round's first pass expands none
    children = no_children(siblings.shape[0], expansions, policy.siblings, log_q) if expansions else None
    body = partial(_draft_one, source, predict_beside, policy, context, uniform)
    loop = lax.while_loop(lambda loop: jnp.any(loop.chain.going), body, _TreeLoop(chain, siblings, children))
    drafted = TreeDrafted(loop.chain.drafted, loop.siblings, loop.children)
    if source.otherwise is None:
        return drafted
    rows = left_over(drafted.chain, context)
    others, other = context._replace(alive=rows), source.otherwise(rows)
    second = draft(other, None, policy, state, others, uniform, max_draft_length, log_q)
    siblings = select_rows(drafted.chain.length > 0, drafted.siblings, second.siblings)
    return TreeDrafted(in_turn(drafted.chain, second.chain, other), siblings, None)


def _draft_one(
    source: Source,
    predict_beside: PredictBeside | None,
    policy: TreePolicy,
    context: RoundContext,
    uniform: Uniform,
    loop: _TreeLoop,
) -> _TreeLoop:
    """One position of all rows still going, with further candidates."""
    index, now, children = loop.chain.index, loop.chain.drafted, loop.children
    if children is None or predict_beside is None:
        following, memory = source.predict(now.memory, now.length, uniform(index))
    else:
        following, children, memory = _expanded(predict_beside, policy, context, uniform, loop)
    chain = draft_one(source, policy, context, uniform, loop.chain, (following, memory))
    siblings = loop.siblings
    if source.chosen is not True:  # lookups have no further candidates
        with jax.named_scope("draft_draw"):
            further = _siblings(following.distribution, following.token, context, policy.siblings, uniform, index, 0)
        siblings = lax.dynamic_update_slice_in_dim(siblings, further[:, None], index, axis=1)
    return _TreeLoop(chain, siblings, children)


def _siblings(
    distribution: Distribution,
    token: Array,
    context: RoundContext,
    count: int,
    uniform: Uniform,
    index: Array,
    first: int,
) -> Array:
    """`count` candidates [B, count] int32 after `token`, keyed from candidate `first` on."""
    is_sampled = context.warp.temperature > 0
    each = lambda candidate: uniform(index + (first + candidate) * BY_CANDIDATE)  # noqa: E731
    return further_candidates(distribution, token, is_sampled, count, each)


def _expanded(
    predict_beside: PredictBeside, policy: TreePolicy, context: RoundContext, uniform: Uniform, loop: _TreeLoop
) -> tuple[Next, Children, Any]:
    """The next position, and the children of siblings expanded in its pass, which are chosen before it."""
    index, now, siblings, children = loop.chain.index, loop.chain.drafted, loop.siblings, loop.children
    assert policy.expand is not None and children is not None  # checked by check_parts
    with jax.named_scope("draft_expand"):
        worth = policy.expand(now.policy, now.length, context)[:, : siblings.shape[1]]
        chosen = to_expand(worth, children.parent, now.length, policy.expanded)
        chosen = jnp.where(loop.chain.going[:, None], chosen, -1)
    fed = expanded_tokens(chosen, siblings)
    following, after, memory = predict_beside(now.memory, now.length, fed, uniform(index))

    def drawn(distribution: Distribution, place: int) -> Array:
        first = (place + 1) * (1 + policy.siblings)  # after the candidates of the chain and of earlier expansions
        token = draw_token(distribution, context.warp, uniform(index + first * BY_CANDIDATE))
        if policy.siblings == 1:
            return token[:, None]
        others = _siblings(distribution, token, context, policy.siblings - 1, uniform, index, first)
        return jnp.concatenate([token[:, None], others], axis=1)

    with jax.named_scope("draft_draw"):
        tokens = jnp.stack([drawn(each, place) for place, each in enumerate(after)], axis=1)
    log_q = None
    if children.log_q is not None:
        log_q = jnp.stack([each.log_prob for each in after], axis=1)
    at = jnp.maximum(index - 1, 0) * policy.expanded  # none is expanded in the first pass
    return following, with_children(children, at, chosen, tokens, log_q), memory
