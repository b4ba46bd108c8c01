"""A drafter whose vocabulary is another than its target's: it speaks in the target's token ids.

It proposes the tokens that both vocabularies have, its distribution restricted to them and renormalised, so that what
is drafted is drawn from exactly the distribution that the verifier is told. A token that only the target has is never
proposed; where the text has one, the drafter reads it as its own tokens spell it.

Source: token-level intersection, TLI (arXiv 2502.05202, section 3.3), where the text is tokenised again outside of the
model; the spelling of single tokens by a table, inside the loop, is ours.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.models.adapters import replace_length
from specdec_jax.models.int8 import Matrix, rows
from specdec_jax.models.layers import project, soft_cap
from specdec_jax.models.reduced_head import ReducedParams
from specdec_jax.types import Array, Cache, Hidden, LanguageModel, ModelSpec, Params, ReducedHead

ROOM = 3  # slots of the drafter's cache for one of the target's


class SharedParams(NamedTuple):
    """A drafter's weights, the rows of its head for the N shared tokens, and how it reads the target's."""

    model: Params
    kernel: Matrix  # [N, D]
    tokens: Array  # [N] int32, the target's ids, ascending
    place: Array  # [V] int32, where a token of the target stands among them; N: nowhere
    pieces: Array  # [V, P] int32, the drafter's ids that spell a token of the target
    count: Array  # [V] int32, how many of them count, 1 to P
    tables: Any = None  # where the drafter's text is tokenised again (contrib/retokenized), how

    @property
    def unread_bytes(self) -> int:
        """What a pass leaves unread, as that of a reduced head, and most of the spellings and tables."""
        head = ReducedParams(self.model, self.kernel, self.tokens, self.place).unread_bytes
        if self.tables is not None:  # its own whole head is what it reads
            head = self.kernel.nbytes + self.place.nbytes
        return head + self.pieces.nbytes + self.count.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(self.tables))


class SharedCache(NamedTuple):
    """The drafter's cache, in its own tokens, and how many of them there are after each of the target's."""

    cache: Cache
    ends: Array  # [B, S + 1] int32
    length: Array  # [B] int32, tokens of the target


@functools.lru_cache(maxsize=16)
def with_shared_tokens(model: LanguageModel, vocab_size: int) -> LanguageModel:
    """The drafter with `SharedParams`, over the target's `vocab_size` tokens.

    `apply` gives logits of the whole vocabulary, -inf for tokens that are not shared; `reduced` those of the N shared.
    A text whose spelling outgrows the drafter's cache, `ROOM` tokens for each of the target's, is read on without the
    pieces that have no room: its drafts are worse, and as lossless.

    Raises:
        ValueError: the model does not offer its head, reads its target, or has a draft vocabulary.
    """
    head = model.hidden
    if head.last is None or model.reading is not None or model.reduced is not None:
        why = "it has a draft vocabulary" if model.reduced else "it does not offer its head apart, or reads its target"
        raise ValueError(f"a drafter with another vocabulary cannot be translated: {why}")

    def few(params, tokens, cache, positions=None, mask=None):
        if positions is not None or mask is not None:
            raise ValueError(
                "a drafter with another vocabulary serves plain causal passes: positions, mask must be None"
            )
        hidden, cache = _hidden(model, head, params, tokens, cache)
        return soft_cap(project(hidden, params.kernel, head.dtype or params.kernel.dtype), head.cap), cache

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, cache = few(params, tokens, cache, positions, mask)
        return spread(params, cache, logits), cache

    def init_cache(params, batch, slots, source=None):
        inner = model.init_cache(None if params is None else params.model, batch, ROOM * slots, source)
        return SharedCache(inner, jnp.zeros((batch, slots + 1), jnp.int32), jnp.zeros((batch,), jnp.int32))

    spec = ModelSpec(vocab_size, model.spec.context, ())
    reduced = ReducedHead(lambda params, tokens, cache: cache, few, token_of, spread)
    return LanguageModel(init_cache, apply, replace_length, spec, reduced=reduced)


def _hidden(
    model: LanguageModel, head: Hidden, params: SharedParams, tokens: Array, cache: SharedCache
) -> tuple[Array, SharedCache]:
    """Hidden states [B, T, D] after the last piece of each of tokens [B, T], and the cache.

    As many passes of T pieces as the row needs that has the most: one, unless a token is spelled by several.
    """
    width, slots = tokens.shape[1], cache.ends.shape[1] - 1
    room = ROOM * slots - width  # writes beyond are clamped to it, and nothing that counts stands there
    start = jnp.take_along_axis(cache.ends, cache.length[:, None], axis=1)  # [B, 1]
    ends = jnp.minimum(start + jnp.cumsum(params.count[tokens], axis=1), room)  # [B, T]
    first = jnp.concatenate([start, ends[:, :-1]], axis=1)

    assert head.last is not None  # with_shared_tokens looked
    last_states = head.last

    def one(carry: tuple[Array, Cache, Array]) -> tuple[Array, Cache, Array]:
        done, inner, hidden = carry  # passes
        begin = start + done * width
        at = begin + jnp.arange(width, dtype=jnp.int32)[None, :]  # [B, T], places in the drafter's text
        whose = jnp.minimum(jnp.sum(at[:, :, None] >= ends[:, None, :], axis=2), width - 1)  # of which token a piece
        piece = jnp.clip(at - jnp.take_along_axis(first, whose, axis=1), 0, params.pieces.shape[1] - 1)
        fed = params.pieces[jnp.take_along_axis(tokens, whose, axis=1), piece]
        state, inner = last_states(params.model, fed, model.with_length(inner, begin[:, 0]))
        last = ends - 1 - begin  # [B, T], where each token's last piece stands in this pass
        found = jnp.take_along_axis(state, jnp.clip(last, 0, width - 1)[:, :, None], axis=1)
        return done + 1, inner, jnp.where(((last >= 0) & (last < width))[:, :, None], found, hidden)

    begin = jnp.zeros((), jnp.int32), cache.cache, jnp.zeros((*tokens.shape, params.kernel.shape[1]), jnp.float32)
    more = ends[:, -1] - start[:, 0]
    _, inner, hidden = lax.while_loop(lambda carry: carry[0] * width < jnp.max(more), one, begin)
    rows, here = jnp.arange(tokens.shape[0])[:, None], cache.length[:, None] + jnp.arange(width + 1)[None, :]
    known = cache.ends.at[rows, here].set(jnp.concatenate([start, ends], axis=1), mode="drop")
    return hidden, SharedCache(inner, known, cache.length + width)


def token_of(params: SharedParams, cache: SharedCache, index: Array) -> Array:
    """Which token [B] int32 of the target entry `index` [B] of the N shared ones is."""
    del cache
    return params.tokens[index]


def spread(params: SharedParams, cache: SharedCache, values: Array) -> Array:
    """[B, ..., N] values of the shared tokens as [B, ..., V], -inf for the others."""
    del cache
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
    return jnp.take(padded, params.place, axis=-1)


def shared_params(model: LanguageModel, params: Params, own: Any, pieces: Any, count: Any) -> SharedParams:
    """Weights for `with_shared_tokens`.

    Args:
        own: [V] int32, the drafter's id of each token of the target, -1 for those it lacks.
        pieces: [V, P] int32 and count [V]: how it spells them.

    Raises:
        ValueError: no token is shared, or the model does not offer its head.
    """
    kernel = model.hidden.kernel
    if kernel is None:
        raise ValueError("this model does not offer its head apart")
    own = np.asarray(own)
    tokens = np.flatnonzero(own >= 0).astype(np.int32)
    if not tokens.size:
        raise ValueError("the two vocabularies have no token in common")
    place = np.full(own.shape, tokens.size, np.int32)
    place[tokens] = np.arange(tokens.size, dtype=np.int32)
    kernel = rows(kernel(params), own[tokens])
    tables = (jnp.asarray(table, jnp.int32) for table in (tokens, place, pieces, count))
    return SharedParams(params, kernel, *tables)
