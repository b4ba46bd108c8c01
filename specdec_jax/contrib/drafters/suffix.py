"""Suffix drafting: proposes the most frequent continuation of the longest earlier match of the text's end.

SuffixDecoding (arXiv 2411.04975) keeps a suffix tree of the request and of earlier outputs. Here only the request's
text is used, and instead of a tree a length for every slot: that of the longest common suffix of the text up to the
slot and the whole text. A further token shifts these lengths with one comparison, [B, S], so that matches of any length
cost the same, while `prompt_lookup` needs one comparison per token of its longest match. Occurrences with the longest
match, or with at least `longest` tokens, are counted together; the token that followed most of them is proposed.

As in the source, a draft has at most `factor` times the tokens of its initial match (alpha in the paper; 1 in their
code). Choices: among equally frequent tokens the latest is used; for a token that followed c of t occurrences of m
tokens policies see the probability (c + m - 1/2) / (t + m), as with `ngram`.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from specdec_jax.drafters import lookup
from specdec_jax.ranges import Between, DraftLength
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Drafter, RoundContext, Source


class SuffixState(NamedTuple):
    matched: Array  # [B, S] int32, length of the common suffix of the text up to a slot and the text; 0 from its end
    counted: Array  # [B] int32, length of the text for these lengths


@strategy
def suffix(
    max_draft_length: DraftLength = 7,
    longest: Annotated[int, Between(1)] = 8,
    factor: Annotated[float, Between(0, open="low")] = 1.0,
    vocab_size: int | None = None,
) -> Drafter:
    """Propose what followed the longest earlier match of the text's end most often. No model pass; parameters are None.

    Args:
        longest: occurrences that match in at least this many tokens are counted together.
        factor: maximum tokens of a draft per token of its match; above 1 drafts may be longer than their matches.
        vocab_size: the target's (set by `build_pair`), for policies that read the drafted token's probability.
    """

    def init(params: Any, batch: int, slots: int, source: Any = None) -> SuffixState:
        return SuffixState(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def source(params: Any, state: SuffixState, tokens: Array, context: RoundContext) -> Source:
        limit = jnp.ceil(factor * _best(state.matched, context.length).astype(jnp.float32)).astype(jnp.int32)

        def retrieve(matched: Array, drafted: Array) -> tuple[Array, Array, Array]:
            token, available, chance = most_frequent(matched, tokens, context.length, longest)
            return token, available & (drafted < limit), chance

        def remember(matched: Array, token: Array) -> Array:
            return longer(matched, tokens, token, context.length)

        return lookup(state, retrieve, vocab_size, memory=state.matched, remember=remember)

    def commit(params: Any, state: SuffixState, tokens: Array, length: Array) -> SuffixState:
        cut = length < state.counted  # the text was truncated: counted again
        state = SuffixState(jnp.where(cut[:, None], 0, state.matched), jnp.where(cut, 0, state.counted))

        def count_one(now: SuffixState) -> SuffixState:
            more = now.counted < length
            place = jnp.minimum(now.counted, tokens.shape[1] - 1)[:, None]
            matched = longer(now.matched, tokens, jnp.take_along_axis(tokens, place, axis=1)[:, 0], now.counted)
            return SuffixState(jnp.where(more[:, None], matched, now.matched), now.counted + more.astype(jnp.int32))

        return lax.while_loop(lambda now: jnp.any(now.counted < length), count_one, state)

    return Drafter(init, source, commit, max_draft_length)


def longer(matched: Array, tokens: Array, token: Array, length: Array) -> Array:
    """The lengths [B, S] after appending `token` [B]; occurrences are within the first `length` [B] tokens."""
    slot = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    before = jnp.pad(matched, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where((tokens == token[:, None]) & (slot < length[:, None]), before + 1, 0)


def most_frequent(matched: Array, tokens: Array, length: Array, longest: int) -> tuple[Array, Array, Array]:
    """(the token [B] that followed most of the best occurrences, whether there is one, its estimated probability)."""
    slots = tokens.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    level = jnp.minimum(_best(matched, length), longest)
    chosen = (matched >= level[:, None]) & (slot + 1 < length[:, None]) & (level > 0)[:, None]
    follower = jnp.where(chosen, jnp.pad(tokens, ((0, 0), (0, 1)))[:, 1:], -1)
    order = jnp.argsort(follower, axis=1, stable=True).astype(jnp.int32)  # equal tokens are adjacent, the latest last
    sorted_ = jnp.take_along_axis(follower, order, axis=1)
    begins = jnp.where(sorted_ != jnp.pad(sorted_, ((0, 0), (1, 0)), constant_values=-2)[:, :-1], slot, 0)
    count = jnp.where(sorted_ >= 0, slot - lax.cummax(begins, axis=1) + 1, 0)
    top = jnp.max(count, axis=1)
    latest = jnp.max(jnp.where(count == top[:, None], order, 0), axis=1)
    token = jnp.maximum(jnp.take_along_axis(follower, latest[:, None], axis=1)[:, 0], 0)
    agreed = level.astype(jnp.float32)
    total = jnp.sum(chosen, axis=1).astype(jnp.float32)
    return token, level > 0, (top.astype(jnp.float32) + agreed - 0.5) / jnp.maximum(total + agreed, 1.0)


def _best(matched: Array, length: Array) -> Array:
    """[B] int32, length of the longest match with a continuation."""
    slot = jnp.arange(matched.shape[1], dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(slot + 1 < length[:, None], matched, 0), axis=1)
