"""A drafter whose vocabulary is not its target's, over the target's token ids.

It proposes the tokens that both vocabularies have, its distribution restricted to them and renormalised, so that what
is drafted is drawn from exactly the distribution that the verifier gets. A token that only the target has is never
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

from specdec_jax.drafters.draft_models.reduced_head import ReducedParams, spread_to_all
from specdec_jax.models.adapters import replace_length
from specdec_jax.models.int8 import Matrix, rows
from specdec_jax.models.layers import project, soft_cap
from specdec_jax.types import Array, Cache, DraftModel, Forward, LanguageModel, ModelSpec, Params, ReducedHead

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
def with_shared_tokens(model: LanguageModel, vocab_size: int) -> DraftModel:
    """The drafter with `SharedParams`, over the target's `vocab_size` tokens.

    `apply` gives logits of the whole vocabulary, -inf for tokens that are not shared; `head` those of the N shared.
    A text whose spelling outgrows the drafter's cache, `ROOM` tokens for each of the target's, is read on without the
    pieces that have no room: its drafts are worse, and as lossless.

    Raises:
        ValueError: the model does not offer its head, reads its target, or has a draft vocabulary.
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
        hidden, cache = _hidden(model, last_states, params, tokens, cache)
        return soft_cap(project(hidden, params.kernel, head.dtype or params.kernel.dtype), head.cap), cache

    def spread(params, cache, values):
        return spread_to_all(params.place, values)

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, cache = few(params, tokens, cache, positions, mask)
        return spread(params, cache, logits), cache

    def init_cache(params, batch, slots, source=None):
        inner = model.init_cache(None if params is None else params.model, batch, ROOM * slots, source)
        return SharedCache(inner, jnp.zeros((batch, slots + 1), jnp.int32), jnp.zeros((batch,), jnp.int32))

    spec = ModelSpec(vocab_size, model.spec.context, ())
    token = lambda params, cache, index: params.tokens[index]  # noqa: E731
    shared = ReducedHead(lambda params, tokens, cache: cache, few, token, spread)
    return DraftModel(init_cache, apply, replace_length, spec, head=shared)


def _hidden(
    model: LanguageModel, last_states: Forward, params: SharedParams, tokens: Array, cache: SharedCache
) -> tuple[Array, SharedCache]:
    """Hidden states [B, T, D] after the last piece of each of tokens [B, T], and the cache.

    As many passes of T pieces as the row needs that has the most: one, unless a token is spelled by several.
    """
    width, slots = tokens.shape[1], cache.ends.shape[1] - 1
    limit = ROOM * slots - width  # writes beyond are clamped to it, and nothing that counts stands there
    start = jnp.take_along_axis(cache.ends, cache.length[:, None], axis=1)  # [B, 1]
    ends = jnp.minimum(start + jnp.cumsum(params.count[tokens], axis=1), limit)  # [B, T]
    first = jnp.concatenate([start, ends[:, :-1]], axis=1)

    def one_pass(carry: tuple[Array, Cache, Array]) -> tuple[Array, Cache, Array]:
        done, inner, hidden = carry  # passes
        begin = start + done * width
        at = begin + jnp.arange(width, dtype=jnp.int32)[None, :]  # [B, T], places in the drafter's text
        token = jnp.minimum(jnp.sum(at[:, :, None] >= ends[:, None, :], axis=2), width - 1)  # that a piece is of
        piece = jnp.clip(at - jnp.take_along_axis(first, token, axis=1), 0, params.pieces.shape[1] - 1)
        fed = params.pieces[jnp.take_along_axis(tokens, token, axis=1), piece]
        state, inner = last_states(params.model, fed, model.with_length(inner, begin[:, 0]))
        last = ends - 1 - begin  # [B, T], where each token's last piece stands in this pass
        ended = jnp.take_along_axis(state, jnp.clip(last, 0, width - 1)[:, :, None], axis=1)
        return done + 1, inner, jnp.where(((last >= 0) & (last < width))[:, :, None], ended, hidden)

    begin = jnp.zeros((), jnp.int32), cache.cache, jnp.zeros((*tokens.shape, params.kernel.shape[1]), jnp.float32)
    more = ends[:, -1] - start[:, 0]
    _, inner, hidden = lax.while_loop(lambda carry: carry[0] * width < jnp.max(more), one_pass, begin)
    rows, here = jnp.arange(tokens.shape[0])[:, None], cache.length[:, None] + jnp.arange(width + 1)[None, :]
    ends_so_far = cache.ends.at[rows, here].set(jnp.concatenate([start, ends], axis=1), mode="drop")
    return hidden, SharedCache(inner, ends_so_far, cache.length + width)


def shared_params(model: LanguageModel, params: Params, drafter_ids: Any, pieces: Any, count: Any) -> SharedParams:
    """Weights for `with_shared_tokens`.

    Args:
        drafter_ids: [V] int32, the drafter's id of each token of the target, -1 for those it lacks.
        pieces: [V, P] int32 and count [V]: how it spells them.

    Raises:
        ValueError: no token is shared, or the model does not offer its head.
    """
    kernel = model.hidden.kernel
    if kernel is None:
        raise ValueError("this model does not offer its head apart")
    drafter_ids = np.asarray(drafter_ids)
    tokens = np.flatnonzero(drafter_ids >= 0).astype(np.int32)
    if not tokens.size:
        raise ValueError("the two vocabularies have no token in common")
    place = np.full(drafter_ids.shape, tokens.size, np.int32)
    place[tokens] = np.arange(tokens.size, dtype=np.int32)
    kernel = rows(kernel(params), drafter_ids[tokens])
    tables = (jnp.asarray(table, jnp.int32) for table in (tokens, place, pieces, count))
    return SharedParams(params, kernel, *tables)
