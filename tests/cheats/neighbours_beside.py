"""A cheat on "a request gives the same tokens in any batch": its siblings depend on the row before it."""

import jax.numpy as jnp

from specdec_jax.contrib.trees import comb


def neighbours_beside():
    """Drafts two or more; siblings beside them where the row before has emitted more."""
    inner = comb(most=2)

    def init(batch):
        return inner.init(batch, links=2, siblings=(2, 2))

    def beside(state, length, free, context):
        more = jnp.roll(context.emitted, 1) > context.emitted
        return jnp.where(more[:, None], state.siblings, 0)

    def begin(state, context):
        return context.emitted % 4 != 3, state

    def proceed(state, distribution, token, drafted, context):
        return drafted < 2 + context.emitted % 4, state

    return inner.replace(init=init, beside=beside, begin=begin, proceed=proceed, hyperparameters={})
