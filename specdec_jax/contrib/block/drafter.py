"""A small language model that reads its target and drafts a block of tokens in one pass, from their exact distribution.

The pass feeds a row's last tokens and K - 1 masks, and gives logits base_i for every position i of the block. A token
is drawn from softmax(base_i + V U[x]), where x is the token drawn before it (no such term for the first one): this is
the distribution q of the verifier. Only the first draft of a round costs a pass; a further one costs the low-rank term,
and the policy is asked before each, as ever. A mask is the last token of the text again, read with the target's
features of that token and a learned vector of its position.

Sources: P-EAGLE (arXiv 2602.01469) and DFlash (2602.06036) for blocks of masks that read the target; DSpark
(2607.05147) for a cheap sequential part after a parallel pass. Drawing from q with the low-rank term under any stopping
rule is an addition here.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.drafters.model import FED, next_of
from specdec_jax.drafters.reading import ReadingState, reading
from specdec_jax.models.adapters import resized
from specdec_jax.models.int8 import Matrix, as_float32, rows
from specdec_jax.models.layers import project
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Cache, Drafter, DraftModel, LanguageModel, Next, Params, RoundContext, Source

MASK, MARKOV = "mask", "markov"
"""Names of the additional parameters: the features that masks add, [K-1, P], and the matrices of the low-rank term,
`token` (U) and `next` (V), [V, R] each."""


class _Memory(NamedTuple):
    """The memory of the draft loop."""

    cache: Cache
    base: Array  # [B, K, N] float32, logits of the block's positions
    effects: tuple[Matrix, ...]  # with a reduced head: V of its tokens [N, R] and of local tokens [B, M, R]
    token: Array  # [B] int32, the last draft


@dataclass(frozen=True, eq=False, repr=False)
class BlockDrafter(Drafter):
    """A drafter whose rounds cost one pass."""

    def num_passes(self, num_drafts: int) -> int:
        """One, if anything is drafted."""
        return min(num_drafts, 1)


@strategy
def block(
    language_model: LanguageModel, max_draft_length: int = 7, catch_up: int = 4, step_cost: float = 0.05
) -> Drafter:
    """Draft with a model of a type of this package, up to `max_draft_length` (K) tokens per round in one pass.

    Args:
        catch_up: as for `drafters.reading`.
        step_cost: cost of a draft after the first, relative to that of a block of K drafts (`drafter_cost`).

    Raises:
        ValueError: as `drafters.reading`; a step cost for which K drafts cost more than a block; while it is traced,
            parameters for fewer positions.
    """
    before = reading(language_model, max_draft_length, catch_up)
    if not 0 <= (max_draft_length - 1) * step_cost < 1:
        raise ValueError(f"step_cost must lie in [0, 1 / {max(max_draft_length - 1, 1)}), got {step_cost}")
    draft_model, size = DraftModel.of(language_model), max_draft_length
    head = draft_model.head
    target_reading: Any = draft_model.reading

    def source(params: Params, state: ReadingState, tokens: Array, context: RoundContext) -> Source:
        reads_target = before.source(params, state, tokens, context)
        weights = params if head is None else params.model
        if weights[MASK].shape[0] < size - 1:
            raise ValueError(f"this model drafts {weights[MASK].shape[0] + 1} tokens at most, got {size}")

        def open(going: Array) -> _Memory:
            fed = reads_target.open(going)
            last = (context.length - 1 - jnp.maximum(context.length - FED, 0))[:, None]  # [B, 1], in the pass
            slot = jnp.arange(FED + size - 1, dtype=jnp.int32)[None, :]
            masks = weights[MASK].astype(jnp.float32)[jnp.clip(slot - last - 1, 0, len(weights[MASK]) - 1)]
            reads = jnp.take_along_axis(fed.reads, jnp.minimum(slot, last)[..., None], axis=1)
            reads = reads + jnp.where((slot > last)[..., None], masks, 0.0)
            block_tokens = jnp.take_along_axis(fed.last, jnp.minimum(slot, last), axis=1)
            place = last + jnp.arange(size, dtype=jnp.int32)[None, :]

            def one_pass(carry: Any) -> Any:
                logits, _, cache = target_reading.apply(params, block_tokens, reads, carry[0])
                return cache, jnp.take_along_axis(logits, place[..., None], axis=1), jnp.zeros((), bool)

            with jax.named_scope("draft_pass"):
                shape = jax.eval_shape(one_pass, (fed.cache, None, None))[1]
                # A loop of one pass or none: `lax.cond` would copy the cache.
                start = fed.cache, jnp.zeros(shape.shape, shape.dtype), jnp.any(going)
                cache, base, _ = lax.while_loop(lambda carry: carry[2], one_pass, start)
            return _Memory(cache, base, effects_of(params, weights, cache), fed.last[:, -1])

        def predict(memory: _Memory, drafted: Array, uniform: Array) -> tuple[Next, _Memory]:
            place = jnp.minimum(drafted, size - 1)[:, None, None]
            base = jnp.take_along_axis(memory.base, place, axis=1)[:, 0]
            with jax.named_scope("draft_step"):
                token = as_float32(rows(weights[MARKOV]["token"], memory.token))
                effect = _effect(token, memory.effects or (weights[MARKOV]["next"],), target_reading.dtype)
                effect = jnp.where((drafted > 0)[:, None], resized(effect, base.shape[1]), 0.0)
            return next_of(head, params, memory.cache, base + effect, context, uniform), memory

        def keep(memory: _Memory, token: Array, is_drafted: Array, drafted: Array) -> _Memory:
            return memory._replace(token=jnp.where(is_drafted, token, memory.token))

        cost = 1.0 - (size - 1) * step_cost, step_cost
        return Source(open, predict, keep, reads_target.close, cost)

    def effects_of(params: Params, weights: Params, cache: Cache) -> tuple[Matrix, ...]:
        matrix = weights[MARKOV]["next"]
        return () if head is None else (rows(matrix, params.tokens), rows(matrix, cache.local))

    return BlockDrafter(
        before.init, source, before.commit, max_draft_length, language_model, before.observe, before.prefill
    )


def _effect(token: Array, effects: tuple[Matrix, ...], dtype: Any) -> Array:
    """V U[x] [B, N] float32, for rows U[x] [B, R], over the tokens of the head and local tokens."""
    few = project(token[:, None], effects[0], dtype)[:, 0]
    if len(effects) == 1:
        return few
    return jnp.concatenate([few, jnp.einsum("br,bmr->bm", token, as_float32(effects[1]))], axis=1)
