"""A cheat, a drafter: prompt lookup that says its tokens were drawn, from a uniform distribution."""

import jax.numpy as jnp

from specdec_jax.drafters import prompt_lookup


def wrong_log_q(max_draft_length=3, vocab_size=1):
    inner = prompt_lookup(max_draft_length, vocab_size=vocab_size)

    def source(*arguments):
        made = inner.source(*arguments)

        def close(drafted):
            state, drafted = made.close(drafted)
            log_q = jnp.full((*drafted.tokens.shape, vocab_size), -jnp.log(vocab_size), jnp.float32)
            return state, drafted._replace(log_q=log_q, chosen=jnp.zeros_like(drafted.chosen))

        return made._replace(close=close)

    return inner.replace(source=source)
