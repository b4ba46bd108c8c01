"""A drafter with a reduced head: logits for the most frequent tokens and for rare tokens of the text only.

Most of the time of a small drafter's pass is its head: V rows, read from memory, most of them for rare tokens. With the
rows of the N most frequent tokens the pass is cheaper; other tokens are never proposed, which lowers the acceptance
rate. Because texts repeat their rare tokens, the first rare tokens of each row's text can be proposed too: its local
tokens. The target's distribution does not change, and the drafter's is exactly the one that its tokens are drawn from.
It depends only on the text before a position: a drafted token is never a new local token.

Source: FR-Spec (arXiv 2502.14856), which reduces EAGLE's head; EAGLE-3's checkpoints are trained with a reduced head.
Local tokens are an addition here.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models.int8 import Matrix, is_matrix, product, rows
from specdec_jax.models.layers import project, soft_cap
from specdec_jax.types import Array, Cache, DraftModel, Hidden, LanguageModel, Params, ReducedHead

LOCAL = 128  # maximum number of local tokens of a text
NOWHERE = np.iinfo(np.int32).max


class ReducedParams(NamedTuple):
    """A model's weights, and the rows of its head that drafting uses."""

    model: Params
    kernel: Matrix  # [N, D], rows of the head
    tokens: Array  # [N] int32, tokens of these rows, ascending
    place: Array  # [V] int32, index in `tokens`; N: not in it

    @property
    def unread_bytes(self) -> int:
        """Bytes that a pass does not read: the whole head, which may be tied to the embedding, and `place`."""
        row = sum(leaf.nbytes for leaf in jax.tree.leaves(self.kernel)) // self.tokens.size
        return self.place.size * row + self.place.nbytes


class ReducedCache(NamedTuple):
    """A model's cache, and M local tokens of each row, in order of their first occurrence.

    Rolled back by length like a cache: tokens beyond it are invalid, and the next pass removes them.
    """

    cache: Cache
    local: Array  # [B, M] int32
    at: Array  # [B, M] int32, slot of the first occurrence; NOWHERE: unused entry

    @property
    def length(self) -> Array:
        """The cache's length, [B] int32."""
        return self.cache.length


@functools.lru_cache(maxsize=16)
def with_reduced_head(model: LanguageModel, most_local: int = LOCAL) -> DraftModel:
    """The same model with `ReducedParams` as its parameters.

    `apply` returns logits of the whole vocabulary, -inf for tokens that are not proposed; `head` those of N + M tokens,
    the last M = `most_local` of them local ones, -inf for unused entries. Raises ValueError: the model does not expose
    its head, or has a reduced one; most_local below 1.
    """
    head, last = model.hidden, model.hidden.last
    reading: Any = DraftModel.of(model).reading
    drafts = DraftModel.of(model).draft_with
    if last is None:
        reduced = DraftModel.of(model).head is not None
        raise ValueError("its head is reduced already" if reduced else "this model does not offer its head apart")
    if most_local < 1:
        raise ValueError(f"most_local must be at least 1, got {most_local}")

    def few(params, tokens, cache, positions=None, mask=None):
        hidden, inner = last(params.model, tokens, cache.cache, positions, mask)
        return _logits(head, params, hidden, cache), cache._replace(cache=inner)

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, cache = few(params, tokens, note(params, tokens, cache), positions, mask)
        return spread(params, cache, logits), cache

    def init_cache(params, batch, slots, source=None):
        inner = model.init_cache(None if params is None else params.model, batch, slots, source)
        shape = batch, most_local
        return ReducedCache(inner, jnp.zeros(shape, jnp.int32), jnp.full(shape, NOWHERE, jnp.int32))

    def with_length(cache, length):
        return cache._replace(cache=model.with_length(cache.cache, length))

    def reading_pass(params, tokens, reads, cache, positions=None, mask=None):
        _, hidden, inner = reading.apply(params.model, tokens, reads, cache.cache, positions, mask)
        return _logits(head, params, hidden, cache), hidden, cache._replace(cache=inner)

    reads = reading and reading._replace(
        read=lambda params, hidden: reading.read(params.model, hidden),
        stand_in=lambda params, hidden: reading.stand_in(params.model, hidden),
        apply=reading_pass,
    )
    reduced = ReducedHead(note, few, token_of, spread)
    hidden = Hidden(prepared=lambda params: params._replace(model=head.prepared(params.model)))
    return DraftModel(init_cache, apply, with_length, model.spec, hidden, reduced, reads, drafts)


def note(params: ReducedParams, tokens: Array, cache: ReducedCache) -> ReducedCache:
    """The cache with the new local tokens of the next pass, over tokens [B, T], as far as entries are free."""
    slots = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(cache.at < cache.length[:, None], cache.at, NOWHERE)
    noted = jnp.any((tokens[:, :, None] == cache.local[:, None]) & (at < NOWHERE)[:, None], axis=-1)
    repeated = jnp.any(jnp.tril(tokens[:, :, None] == tokens[:, None], -1), axis=-1)
    # Tokens beyond the drafter's vocabulary, which the target may have, have no row.
    lacks_row = jnp.take(params.place, tokens, mode="fill", fill_value=0) == params.tokens.size
    new = lacks_row & ~noted & ~repeated
    count = jnp.sum(at < NOWHERE, axis=1, keepdims=True)
    place = jnp.where(new, count + jnp.cumsum(new, axis=1) - 1, at.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    local, at = cache.local.at[rows, place].set(tokens, mode="drop"), at.at[rows, place].set(slots, mode="drop")
    return cache._replace(local=local, at=at)


def _logits(head: Hidden, params: ReducedParams, hidden: Array, before: ReducedCache) -> Array:
    """Logits [B, T, N + M] of hidden states [B, T, D] of a pass that starts at the end of `before`.

    A local token's logit is -inf before its first occurrence.
    """
    assert head.kernel is not None  # checked by with_reduced_head
    dtype = head.dtype or params.kernel.dtype
    local_rows = rows(head.kernel(params.model), before.local)
    contract = functools.partial(jnp.einsum, "btd,bmd->btm", preferred_element_type=jnp.float32)
    rare = product(hidden, local_rows, dtype, contract)
    slots = before.length[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
    rare = jnp.where(before.at[:, None] <= slots[:, :, None], soft_cap(rare, head.cap), -jnp.inf)
    few = soft_cap(project(hidden, params.kernel, dtype), head.cap)
    return jnp.concatenate([few, rare], axis=-1)


def token_of(params: ReducedParams, cache: ReducedCache, index: Array) -> Array:
    """The token [B] int32 at `index` [B] among a row's N + M tokens."""
    count = params.tokens.size
    local = jnp.take_along_axis(cache.local, jnp.maximum(index - count, 0)[:, None], axis=1)[:, 0]
    return jnp.where(index < count, params.tokens[jnp.minimum(index, count - 1)], local)


def spread(params: ReducedParams, cache: ReducedCache, values: Array) -> Array:
    """Scatters values [B, ..., N + M] of a row's tokens to [B, ..., V], -inf for other tokens."""
    few, rare = jnp.split(values, [params.tokens.size], axis=-1)
    local = jnp.where(cache.at < NOWHERE, cache.local, params.place.size)
    put = jax.vmap(lambda row, tokens, new: row.at[..., tokens].set(new, mode="drop"))
    return put(spread_to_all(params.tokens, few, params.place.size), local, rare)


def spread_to_all(tokens: Array, values: Array, vocab_size: int) -> Array:
    """Scatters values [B, ..., N] of ascending `tokens` [N] to [B, ..., V], -inf for other tokens."""
    empty = jnp.full((*values.shape[:-1], vocab_size), -jnp.inf, values.dtype)
    # On CPUs a scatter of N entries takes a third of the time of gathering V.
    return empty.at[..., tokens].set(values, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)


def reduce_params(model: LanguageModel, params: Params, tokens: Sequence[int] | np.ndarray) -> ReducedParams:
    """Weights for `with_reduced_head(model)`: the head's rows of these tokens, in any order.

    Raises ValueError: no tokens, duplicates, tokens outside the vocabulary, or a model that does not expose its head.
    """
    kernel = model.hidden.kernel
    if kernel is None:
        raise ValueError("this model does not offer its head apart")
    vocab, ids = model.spec.vocab_size, np.asarray(tokens)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        got = f"an array of shape {ids.shape} and dtype {ids.dtype}"
        raise ValueError(f"a draft vocabulary is a list of token ids, got {got}")
    if ids.min() < 0 or ids.max() >= vocab:
        wrong = ids[(ids < 0) | (ids >= vocab)][0]
        raise ValueError(f"a draft vocabulary holds tokens 0 to {vocab - 1}, got {wrong}")
    chosen = np.unique(ids).astype(np.int32)
    if chosen.size < ids.size:
        raise ValueError(f"a draft vocabulary names each token once, {ids.size - chosen.size} are there again")
    place = np.full(vocab, chosen.size, np.int32)
    place[chosen] = np.arange(chosen.size)
    kernel = rows(kernel(params), chosen)
    return ReducedParams(params, kernel, *jax.device_put((chosen, place)))


def check_whole(params: Params) -> None:
    """Raises ValueError for weights that cannot be saved: with a draft vocabulary, or in int8."""
    if isinstance(params, ReducedParams):
        raise ValueError("a draft vocabulary is no part of saved weights: save `params.model`, and load it with @N")
    if any(map(is_matrix, jax.tree.leaves(params, is_leaf=is_matrix))):
        raise ValueError("int8 weights are made at loading and never saved: load the model in another dtype to save it")
