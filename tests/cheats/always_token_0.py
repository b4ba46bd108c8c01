"""A drafter that proposes token 0 and says that it drew it from all tokens alike, which AdaEDL refuses to draft."""

from typing import Any

import jax.numpy as jnp

from specdec_jax.decoding.sampling import distribution
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Drafted, Drafter, Next, RoundContext, Source


@strategy
def always_token_0(max_draft_length: int = 4, vocab_size: int = 1) -> Drafter:
    def init(params: Any, batch: int, slots: int, source: Any = None) -> Array:
        return jnp.zeros((batch,), jnp.int32)

    def source(params: Any, state: Array, tokens: Array, context: RoundContext) -> Source:
        def predict(memory: Array, drafted: Array, uniform: Array) -> tuple[Next, Array]:
            return Next(distribution(jnp.zeros((state.shape[0], vocab_size)), context.warp), state), memory

        def close(drafted: Drafted) -> tuple[Array, Drafted]:
            return state, drafted

        return Source(lambda going: state, predict, lambda memory, *drawn: memory, close, cost=0.0)

    return Drafter(init, source, lambda params, state, tokens, length: state, max_draft_length)
