"""A small language model as drafter: the draft loop, one `lax.while_loop` over drafter passes for the whole batch.

The loop runs while any row goes on; rows that stopped are masked. It is not a `vmap` of a one-row loop, which copies
the whole cache each step (measured 165 against 26 ms a round). Each pass feeds a row's last two tokens: the pass that
writes the second-last entry is then the same one that follows a fully accepted round, whose last draft was never fed,
and on CPUs a bf16 matrix product of a single row takes a path ten times slower than of two.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.hyperparameters import select_rows
from specdec_jax.sampling import distribution, draw
from specdec_jax.strategy import strategy
from specdec_jax.types import (
    Array,
    Cache,
    Distribution,
    Draft,
    Drafter,
    DraftInfo,
    LanguageModel,
    Params,
    PolicyState,
    ReducedHead,
    RoundContext,
    StoppingPolicy,
)

FED = 2  # tokens fed by one drafter pass


class ModelDrafterState(NamedTuple):
    cache: Cache
    valid: Array  # [B] int32, entries of the cache that hold the row's own tokens


class _Loop(NamedTuple):
    """The carry. `pass_index` counts passes of the batch; a row that is still going has drafted as many tokens."""

    pass_index: Array  # [] int32
    going: Array  # [B] bool
    cache: Cache
    policy: PolicyState
    tokens: Array  # [B, S] int32, the text with the draft appended
    drafted: Array  # [B] int32
    passes: Array  # [B] int32
    log_q: Array | None  # [B, K, V]
    entropy: Array  # [B, K] float32
    max_prob: Array  # [B, K] float32


@strategy
def model(language_model: LanguageModel, max_draft_length: int = 7, catch_up: int = 64) -> Drafter:
    """Draft with a language model, up to `max_draft_length` (K) tokens a round.

    Args:
        catch_up: tokens a pass feeds when the drafter's cache is behind (a prompt, or rounds it sat out).

    Raises:
        ValueError: max_draft_length or catch_up below its least value.
    """
    if max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {max_draft_length}")
    if catch_up < FED:
        raise ValueError(f"catch_up must be at least {FED}, got {catch_up}")

    def init(params: Params, batch: int, slots: int) -> ModelDrafterState:
        return ModelDrafterState(language_model.init_cache(params, batch, slots), jnp.zeros((batch,), jnp.int32))

    def propose(
        params: Params,
        state: ModelDrafterState,
        tokens: Array,
        context: RoundContext,
        uniform: Callable[[Array], Array],
        policy: StoppingPolicy,
        policy_state: PolicyState,
        keep_log_q: bool,
    ) -> tuple[Draft, DraftInfo, ModelDrafterState, PolicyState]:
        begins, begun = policy.begin(policy_state, context)
        loop = _start(language_model, params, state.cache, tokens, context, max_draft_length, keep_log_q)
        loop = loop._replace(
            going=context.alive & (context.budget > 0) & begins,
            policy=select_rows(context.alive, begun, policy_state),
        )

        def body(loop: _Loop) -> _Loop:
            return _draft_one(language_model, policy, params, context, uniform, loop)

        loop = lax.while_loop(lambda loop: jnp.any(loop.going), body, loop)
        offset = jnp.arange(max_draft_length, dtype=jnp.int32)[None, :]
        drafts = jnp.take_along_axis(loop.tokens, context.length[:, None] + offset, axis=1)
        draft = Draft(drafts, loop.log_q, jnp.zeros(drafts.shape, bool), loop.drafted)
        info = DraftInfo(loop.passes, loop.passes - loop.drafted, loop.entropy, loop.max_prob, 0 * loop.drafted)
        fed = jnp.where(loop.passes > 0, context.length + loop.passes - 1, state.valid)
        return draft, info, ModelDrafterState(loop.cache, jnp.maximum(state.valid, fed)), loop.policy

    def commit(params: Params, state: ModelDrafterState, tokens: Array, length: Array) -> ModelDrafterState:
        return _catch_up(language_model, params, state, tokens, length, catch_up)

    return Drafter(init, propose, commit, max_draft_length, language_model)


def _start(
    language_model: LanguageModel,
    params: Params,
    cache: Cache,
    tokens: Array,
    context: RoundContext,
    most: int,
    keep_log_q: bool,
) -> _Loop:
    batch = tokens.shape[0]
    vocab = language_model.spec.vocab_size
    dtype = jax.eval_shape(language_model.apply, params, tokens[:, :FED], cache)[0].dtype
    zeros = jnp.zeros((batch,), jnp.int32)
    unknown = jnp.full((batch, most), jnp.nan, jnp.float32)
    log_q = jnp.full((batch, most, vocab), -jnp.inf, dtype) if keep_log_q else None
    return _Loop(jnp.int32(0), context.alive, cache, (), tokens, zeros, zeros, log_q, unknown, unknown)


def _draft_one(
    language_model: LanguageModel,
    policy: StoppingPolicy,
    params: Params,
    context: RoundContext,
    uniform: Callable[[Array], Array],
    loop: _Loop,
) -> _Loop:
    """One drafter pass for every row still going: distribution, check, draw, proceed."""
    step, reduced = loop.pass_index, language_model.reduced
    end = context.length + loop.drafted  # [B], tokens known; rows that stopped feed their own last tokens again
    with jax.named_scope("draft_pass"):
        start = jnp.maximum(end - FED, 0)
        cache = language_model.with_length(loop.cache, start)
        apply = language_model.apply if reduced is None else reduced.apply
        logits, cache = apply(params, _window(loop.tokens, start, FED), cache)
        last = jnp.take_along_axis(logits, (end - 1 - start)[:, None, None], axis=1)[:, 0]  # [B, V], [B, N] if reduced
        # fused into each of the distribution's sums, XLA's CPU code makes them anew
        last = lax.optimization_barrier(last)
    with jax.named_scope("draft_distribution"):
        own_distribution = distribution(last, context.warp)
        next_distribution = own_distribution if reduced is None else _of_all_tokens(reduced, params, own_distribution)
    with jax.named_scope("draft_stop"):
        wants, checked_policy = policy.check(loop.policy, next_distribution, loop.drafted, context)
        checked_policy = select_rows(loop.going, checked_policy, loop.policy)
        drawn = loop.going & wants
    token = _draw_draft(own_distribution.log_prob, own_distribution.top_token, context, partial(uniform, step))
    token = token if reduced is None else reduced.tokens(params)[token]
    tokens = _put(loop.tokens, end, token, drawn)
    drafted = loop.drafted + drawn.astype(jnp.int32)
    with jax.named_scope("draft_stop"):
        goes_on, next_policy = policy.proceed(checked_policy, next_distribution, token, drafted, context)
        next_policy = select_rows(drawn, next_policy, checked_policy)
    keep = lambda buffer, value: lax.dynamic_update_slice_in_dim(buffer, value[:, None], step, axis=1)  # noqa: E731
    seen = lambda buffer, value: keep(buffer, jnp.where(loop.going, value.astype(jnp.float32), jnp.nan))  # noqa: E731
    return _Loop(
        pass_index=step + 1,
        going=drawn & goes_on & (drafted < context.budget),
        cache=cache,
        policy=next_policy,
        tokens=tokens,
        drafted=drafted,
        passes=loop.passes + loop.going.astype(jnp.int32),
        log_q=None if loop.log_q is None else keep(loop.log_q, next_distribution.log_prob),
        entropy=seen(loop.entropy, next_distribution.entropy),
        max_prob=seen(loop.max_prob, next_distribution.max_prob),
    )


def _of_all_tokens(reduced: ReducedHead, params: Params, few: Distribution) -> Distribution:
    """A distribution of N tokens as one of the vocabulary; what nobody reads of it is never computed."""
    raw = few.raw_log_prob
    return few._replace(
        log_prob=reduced.spread(params, few.log_prob),
        top_token=reduced.tokens(params)[few.top_token],
        raw_log_prob=None if raw is None else reduced.spread(params, raw),
    )


def _draw_draft(log_prob: Array, top_token: Array, context: RoundContext, uniform: Callable[[], Array]) -> Array:
    """The drafted token [B] int32; the whole cumulative sum is skipped when every row is greedy."""
    is_sampled = context.warp.temperature > 0

    def sampled() -> Array:
        return jnp.where(is_sampled, draw(jnp.exp(log_prob), uniform()), top_token)

    with jax.named_scope("draft_draw"):
        return lax.cond(jnp.any(is_sampled), sampled, lambda: top_token)


def _catch_up(
    language_model: LanguageModel, params: Params, state: ModelDrafterState, tokens: Array, length: Array, chunk: int
) -> ModelDrafterState:
    """Roll back to what still holds and feed what is missing up to the last two tokens, `chunk` tokens a pass."""
    chunk = min(chunk, tokens.shape[1])
    wanted = jnp.maximum(length - FED, 0)

    def feed(state: ModelDrafterState) -> ModelDrafterState:
        # Starting early enough to end inside the cache feeds some tokens again, to the same values: a start that runs
        # over the end would be clamped silently and overwrite good entries.
        start = jnp.minimum(state.valid, tokens.shape[1] - chunk)
        cache = language_model.with_length(state.cache, start)
        _, cache = language_model.apply(params, _window(tokens, start, chunk), cache)
        return ModelDrafterState(cache, jnp.maximum(state.valid, jnp.minimum(start + chunk, wanted)))

    state = state._replace(valid=jnp.minimum(state.valid, jnp.maximum(length - 1, 0)))
    return lax.while_loop(lambda state: jnp.any(state.valid < wanted), feed, state)


def _window(tokens: Array, start: Array, size: int) -> Array:
    """tokens[b, start[b] : start[b] + size] for every row."""
    offset = jnp.arange(size, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(tokens, start[:, None] + offset, axis=1)


def _put(tokens: Array, index: Array, token: Array, chosen: Array) -> Array:
    """tokens with tokens[b, index[b]] = token[b] where chosen[b]."""
    slot = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where((slot == index[:, None]) & chosen[:, None], token[:, None], tokens)
