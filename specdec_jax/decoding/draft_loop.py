"""The draft loop: begin, then check, draw and proceed, position by position, over a source of next distributions.

A source is a language model's cache and pass (drafters/model.py), or a text or table in which the next token is looked
up (drafters/_lookup.py). The loop is one `lax.while_loop` for the whole batch: it runs while any row goes on, and rows
that stopped are masked. It is not a `vmap` of a one-row loop, which copies the whole cache each step (measured 165
against 26 ms a round). `begin` and `step` by themselves are what a replay plays a trace with.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.decoding.expansion import Fed, fed_with, no_children, to_expand, with_children
from specdec_jax.decoding.siblings import BY_CANDIDATE
from specdec_jax.hyperparameters import select_rows
from specdec_jax.types import Array, Children, Distribution, PolicyState, RoundContext, StoppingPolicy


class Drawn(NamedTuple):
    """The token of a position."""

    token: Array  # [B] int32
    siblings: Array | None = None  # [B, M] int32, drawn after it without replacement


class Draw(Protocol):
    """The token of a position and `siblings` (M) others.

    `uniform(candidate)` gives [B] float32 in [0, 1), of the token 0, of its siblings 1 to M; each is read once or not
    at all.
    """

    def __call__(self, uniform: Callable[[int], Array], siblings: int, /) -> Drawn: ...


class Next(NamedTuple):
    """The next position of every row, as a source knows it before a token is drawn there."""

    distribution: Distribution  # what policies read, and of drawn tokens what verifiers divide by
    draw: Draw
    known: Array | None = None  # [B] bool: a row without a next position stops; None: all rows have one


class Predict(Protocol):
    """The next position of rows that have drafted so many tokens, [B] int32, and the memory after it."""

    def __call__(self, memory: Any, drafted: Array, /) -> tuple[Next, Any]: ...


class PredictBeside(Protocol):
    """As `Predict`, and what follows each of the siblings that the pass is fed with, W of them."""

    def __call__(self, memory: Any, drafted: Array, fed: Fed, /) -> tuple[Next, tuple[Next, ...], Any]: ...


class Keep(Protocol):
    """The memory after `token` [B] was drafted where `drawn` [B] bool, as the draft after `drafted` [B] others."""

    def __call__(self, memory: Any, token: Array, drawn: Array, drafted: Array, /) -> Any: ...


class Source(NamedTuple):
    """Where next distributions come from. `memory` is the loop's to carry: a pytree of constant shapes."""

    memory: Any
    predict: Predict
    keep: Keep
    predict_beside: PredictBeside | None = None  # of models whose passes may hold several tokens at one position


class Step(NamedTuple):
    """What the policy said of one position."""

    candidates: Drawn  # the draft where `drawn`, elsewhere meaningless
    drawn: Array  # [B] bool, the position has become a draft
    drafted: Array  # [B] int32, drafts of the round, this one among them
    going: Array  # [B] bool, the next position is asked for
    policy: PolicyState


class Drafted(NamedTuple):
    """What came of a round's loop. Entries of a row at and beyond `length` are meaningless, but for the statistics."""

    tokens: Array  # [B, K] int32
    length: Array  # [B] int32
    predictions: Array  # [B] int32, positions whose distribution was asked for; of a model its passes
    log_q: Array | None  # [B, K, V], the distributions as the source gave them
    siblings: Array | None  # [B, K, M] int32, of rules that want some
    children: Children | None  # of rules that expand some of them
    entropy: Array  # [B, K] float32, nats, of every distribution asked for; NaN beyond
    max_prob: Array  # [B, K] float32
    policy: PolicyState
    memory: Any  # the source's


class _Loop(NamedTuple):
    """The carry. `index` counts positions of the batch; a row that is still going has drafted as many tokens."""

    index: Array  # [] int32
    going: Array  # [B] bool
    drafted: Drafted


def check_length(max_draft_length: int) -> None:
    """Raises ValueError below 1."""
    if max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {max_draft_length}")


def begin(policy: StoppingPolicy, state: PolicyState, context: RoundContext, rows: Array) -> tuple[Array, PolicyState]:
    """Which of `rows` [B] bool pay for their first distribution, and the policy's state; other rows keep theirs."""
    begins, begun = policy.begin(state, context)
    return rows & (context.budget > 0) & begins, select_rows(rows, begun, state)


def step(
    policy: StoppingPolicy,
    state: PolicyState,
    context: RoundContext,
    going: Array,
    drafted: Array,
    distribution: Distribution,
    draw: Callable[[], Drawn],
) -> Step:
    """One position of the rows that are `going` [B]: check, draw, proceed. Other rows keep their state.

    Whether the token is drafted is decided before `draw` is called: the order of these lines is what makes every
    stopping policy lossless.
    """
    with jax.named_scope("draft_stop"):
        wants, checked = policy.check(state, distribution, drafted, context)
        checked = select_rows(going, checked, state)
        drawn = going & wants
    with jax.named_scope("draft_draw"):
        candidates = draw()
    drafted = drafted + drawn.astype(jnp.int32)
    with jax.named_scope("draft_stop"):
        goes_on, proceeded = policy.proceed(checked, distribution, candidates.token, drafted, context)
        after = select_rows(drawn, proceeded, checked)
    return Step(candidates, drawn, drafted, drawn & goes_on & (drafted < context.budget), after)


def draft(
    open_source: Callable[[Array], Source],
    policy: StoppingPolicy,
    state: PolicyState,
    context: RoundContext,
    uniform: Callable[[Array], Array],
    most: int,
    log_q: Array | None = None,
) -> Drafted:
    """One round's draft of at most `most` (K) tokens a row.

    Args:
        open_source: (rows that begin [B] bool) -> the source, which need not serve others.
        uniform: (index []) -> [B] float32 in [0, 1), what draft `index` is drawn with; its sibling i with that of
            index + i * BY_CANDIDATE, and so on with the children of what its pass was fed with.
        log_q: [B, K, V] to write the distributions into; None keeps none.
    """
    going, begun = begin(policy, state, context, context.alive)
    none = jnp.zeros(context.length.shape, jnp.int32)
    unknown = jnp.full((none.shape[0], most), jnp.nan, jnp.float32)
    tokens = jnp.zeros(unknown.shape, jnp.int32)
    siblings = jnp.zeros((*tokens.shape, policy.siblings), jnp.int32) if policy.siblings else None
    expansions = policy.expanded * (most - 1)  # a round's first pass is fed with no siblings
    children = no_children(none.shape[0], expansions, policy.siblings, log_q) if expansions else None
    source = open_source(going)
    empty = Drafted(tokens, none, none, log_q, siblings, children, unknown, unknown, begun, source.memory)
    body = partial(_draft_one, source, policy, context, uniform)
    return lax.while_loop(lambda loop: jnp.any(loop.going), body, _Loop(jnp.int32(0), going, empty)).drafted


def _draft_one(
    source: Source, policy: StoppingPolicy, context: RoundContext, uniform: Callable[[Array], Array], loop: _Loop
) -> _Loop:
    """One position of every row still going; they all stand at the same one, so it is written as a column."""
    index, now = loop.index, loop.drafted
    if now.children is None:
        following, memory = source.predict(now.memory, now.length)
        children = None
    else:
        following, children, memory = _expanded(source, policy, context, uniform, loop)
    going = loop.going if following.known is None else loop.going & following.known

    def draw() -> Drawn:
        return following.draw(lambda candidate: uniform(index + candidate * BY_CANDIDATE), policy.siblings)

    done = step(policy, now.policy, context, going, now.length, following.distribution, draw)
    column = jnp.arange(now.tokens.shape[1], dtype=jnp.int32)[None, :] == index

    def put(buffer: Array, rows: Array, value: Array) -> Array:
        return jnp.where(column & rows[:, None], value.astype(buffer.dtype)[:, None], buffer)

    log_q = now.log_q
    if log_q is not None:  # in place and for all rows: a mask would read and write all K of [B, V]
        log_q = lax.dynamic_update_slice_in_dim(log_q, following.distribution.log_prob[:, None], index, axis=1)
    siblings = now.siblings
    if siblings is not None and done.candidates.siblings is not None:  # what is looked up has none
        siblings = lax.dynamic_update_slice_in_dim(siblings, done.candidates.siblings[:, None], index, axis=1)
    drafted = Drafted(
        tokens=put(now.tokens, done.drawn, done.candidates.token),
        length=done.drafted,
        predictions=now.predictions + going.astype(jnp.int32),
        log_q=log_q,
        siblings=siblings,
        children=children,
        entropy=put(now.entropy, going, following.distribution.entropy),
        max_prob=put(now.max_prob, going, following.distribution.max_prob),
        policy=done.policy,
        memory=source.keep(memory, done.candidates.token, done.drawn, now.length),
    )
    return _Loop(index + 1, done.going, drafted)


def _expanded(
    source: Source, policy: StoppingPolicy, context: RoundContext, uniform: Callable[[Array], Array], loop: _Loop
) -> tuple[Next, Children, Any]:
    """The next position, and the children of the siblings that its pass is fed with, chosen before they are read."""
    index, now, count = loop.index, loop.drafted, policy.expanded
    assert source.predict_beside is not None and policy.expand is not None  # build_decoder looked
    assert now.children is not None and now.siblings is not None
    with jax.named_scope("draft_expand"):
        worth = policy.expand(now.policy, now.length, context)[:, : now.siblings.shape[1]]
        chosen = to_expand(worth, now.children.parent, now.length, count)
        chosen = jnp.where(loop.going[:, None], chosen, -1)
    following, beside, memory = source.predict_beside(now.memory, now.length, fed_with(chosen, now.siblings))

    def drawn(each: Next, place: int) -> Array:
        first = (place + 1) * (1 + policy.siblings)  # candidates of the chain and of the places before
        found = each.draw(lambda of: uniform(index + (first + of) * BY_CANDIDATE), policy.siblings - 1)
        own = found.token[:, None]
        return own if found.siblings is None else jnp.concatenate([own, found.siblings], axis=1)

    with jax.named_scope("draft_draw"):
        tokens = jnp.stack([drawn(each, place) for place, each in enumerate(beside)], axis=1)
    log_q = None
    if now.children.log_q is not None:
        log_q = jnp.stack([each.distribution.log_prob for each in beside], axis=1)
    at = jnp.maximum(index - 1, 0) * count  # nothing is chosen before the first pass
    return following, with_children(now.children, at, chosen, tokens, log_q), memory
