"""A draft model with a vocabulary other than its target's, as a model over the target's token ids.

It proposes the tokens that both vocabularies share: its distribution is restricted to them and renormalised, so that
drafts are drawn from exactly the distribution that the verifier gets. A token that only the target has is never
proposed; in the text, the drafter reads it as a sequence of its own tokens.

Source: token-level intersection, TLI (arXiv 2502.05202, section 3.3), where the text is tokenised again outside the
model; the table of spellings of single tokens, used inside the loop, is an addition here.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.drafters.draft_models.reduced_head import spread_to_all
from specdec_jax.models.attention import with_length
from specdec_jax.models.int8 import Matrix, rows
from specdec_jax.models.layers import project, soft_cap
from specdec_jax.types import Array, Cache, DraftModel, LanguageModel, ModelSpec, Params, ReducedHead

ROOM = 3  # slots of the drafter's cache per slot of the target's


class SharedParams(NamedTuple):
    """A drafter's weights, the rows of its head for the N shared tokens, and its spellings of the target's tokens."""

    model: Params
    kernel: Matrix  # [N, D]
    tokens: Array  # [N] int32, the target's ids, ascending
    pieces: Array  # [V, P] int32, the drafter's ids that spell each token of the target
    count: Array  # [V] int32, number of those ids, 1 to P
    tables: Any = None  # for drafters whose text is tokenised again (contrib/retokenized)

    @property
    def unread_bytes(self) -> int:
        """Bytes that a pass does not read: those of a reduced head, and most of the spellings and tables."""
        row = sum(leaf.nbytes for leaf in jax.tree.leaves(self.kernel)) // self.tokens.size
        whole = self.count if self.tables is None else self.tokens  # with tables it reads its whole original head
        return whole.size * row + sum(leaf.nbytes for leaf in jax.tree.leaves((self.pieces, self.count, self.tables)))


class SharedCache(NamedTuple):
    """The drafter's cache, in its own tokens, and the number of those tokens up to each of the target's."""

    cache: Cache
    ends: Array  # [B, S + 1] int32
    length: Array  # [B] int32, number of the target's tokens


@functools.lru_cache(maxsize=16)
def with_shared_tokens(model: LanguageModel, vocab_size: int) -> DraftModel:
    """The draft model with `SharedParams`, over the target's `vocab_size` tokens.

    `apply` returns logits of the whole vocabulary, -inf for tokens that are not shared; `head` those of the N shared
    ones. If the text's spelling exceeds the drafter's cache, `ROOM` tokens for each of the target's, further pieces are
    dropped: drafts become worse but stay lossless. Raises ValueError: the model does not expose its head, reads its
    target, or has a draft vocabulary. Passes raise it for `positions` or a `mask`.
    """
    head, drafts, last_states = model.hidden, DraftModel.of(model), model.hidden.last
    if last_states is None or drafts.reading is not None or drafts.head is not None:
        why = "it has a draft vocabulary" if drafts.head else "it does not offer its head apart, or reads its target"
        raise ValueError(f"a drafter with another vocabulary cannot be translated: {why}")

    def few(params, tokens, cache, positions=None, mask=None):
        if positions is not None or mask is not None:
            raise ValueError(
                "a drafter with another vocabulary serves plain causal passes: positions, mask must be None"
            )
        hidden, cache = last_pieces(params, tokens, cache)
        return soft_cap(project(hidden, params.kernel, head.dtype or params.kernel.dtype), head.cap), cache

    def last_pieces(params: SharedParams, tokens: Array, cache: SharedCache) -> tuple[Array, SharedCache]:
        """Hidden states [B, T, D] after the last piece of each of tokens [B, T], and the cache.

        Runs as many passes of T pieces as the row with the most pieces needs: one, unless a token has several pieces.
        """
        width, slots = tokens.shape[1], cache.ends.shape[1] - 1
        limit = ROOM * slots - width  # later writes are clamped to it; no valid entries are there
        start = jnp.take_along_axis(cache.ends, cache.length[:, None], axis=1)  # [B, 1]
        ends = jnp.minimum(start + jnp.cumsum(params.count[tokens], axis=1), limit)  # [B, T]
        first = jnp.concatenate([start, ends[:, :-1]], axis=1)

        def one_pass(carry: tuple[Array, Cache, Array]) -> tuple[Array, Cache, Array]:
            done, inner, hidden = carry  # passes
            begin = start + done * width
            at = begin + jnp.arange(width, dtype=jnp.int32)[None, :]  # [B, T], positions in the drafter's text
            token = jnp.minimum(jnp.sum(at[:, :, None] >= ends[:, None, :], axis=2), width - 1)  # each piece's token
            piece = jnp.clip(at - jnp.take_along_axis(first, token, axis=1), 0, params.pieces.shape[1] - 1)
            fed = params.pieces[jnp.take_along_axis(tokens, token, axis=1), piece]
            state, inner = last_states(params.model, fed, model.with_length(inner, begin[:, 0]))
            last = ends - 1 - begin  # [B, T], index of each token's last piece in this pass
            ended = jnp.take_along_axis(state, jnp.clip(last, 0, width - 1)[:, :, None], axis=1)
            return done + 1, inner, jnp.where(((last >= 0) & (last < width))[:, :, None], ended, hidden)

        begin = jnp.zeros((), jnp.int32), cache.cache, jnp.zeros((*tokens.shape, params.kernel.shape[1]), jnp.float32)
        more = ends[:, -1] - start[:, 0]
        _, inner, hidden = lax.while_loop(lambda carry: carry[0] * width < jnp.max(more), one_pass, begin)
        rows, here = jnp.arange(tokens.shape[0])[:, None], cache.length[:, None] + jnp.arange(width + 1)[None, :]
        ends_so_far = cache.ends.at[rows, here].set(jnp.concatenate([start, ends], axis=1), mode="drop")
        return hidden, SharedCache(inner, ends_so_far, cache.length + width)

    def spread(params, cache, values):
        return spread_to_all(params.tokens, values, vocab_size)

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, cache = few(params, tokens, cache, positions, mask)
        return spread(params, cache, logits), cache

    def init_cache(params, batch, slots, source=None):
        inner = model.init_cache(None if params is None else params.model, batch, ROOM * slots, source)
        return SharedCache(inner, jnp.zeros((batch, slots + 1), jnp.int32), jnp.zeros((batch,), jnp.int32))

    spec = ModelSpec(vocab_size, model.spec.context, ())
    token = lambda params, cache, index: params.tokens[index]  # noqa: E731
    shared = ReducedHead(lambda params, tokens, cache: cache, few, token, spread)
    return DraftModel(init_cache, apply, with_length, spec, head=shared)


def shared_params(model: LanguageModel, params: Params, drafter_ids: Any, pieces: Any, count: Any) -> SharedParams:
    """Weights for `with_shared_tokens`.

    Args:
        drafter_ids: [V] int32, the drafter's id of each token of the target, -1 if it lacks the token.
        pieces: [V, P] int32 and count [V]: the drafter's spelling of each token.

    Raises:
        ValueError: no token is shared, or the model does not expose its head.
    """
    kernel = model.hidden.kernel
    if kernel is None:
        raise ValueError("this model does not offer its head apart")
    drafter_ids = np.asarray(drafter_ids)
    tokens = np.flatnonzero(drafter_ids >= 0).astype(np.int32)
    if not tokens.size:
        raise ValueError("the two vocabularies have no token in common")
    kernel = rows(kernel(params), drafter_ids[tokens])
    tables = (jnp.asarray(table, jnp.int32) for table in (tokens, pieces, count))
    return SharedParams(params, kernel, *tables)
