"""A cheat, a drafter: prompt lookup that says its tokens were drawn, from a uniform distribution."""

import jax.numpy as jnp

from specdec_jax.drafters import prompt_lookup


def wrong_log_q(max_draft_length=3, vocab_size=1):
    inner = prompt_lookup(max_draft_length, vocab_size=vocab_size)

    def propose(*arguments):
        draft, *rest = inner.propose(*arguments)
        log_q = jnp.full((*draft.tokens.shape, vocab_size), -jnp.log(vocab_size), jnp.float32)
        return draft._replace(log_q=log_q, one_hot=jnp.zeros_like(draft.one_hot)), *rest

    return inner.replace(propose=propose)
