"""The cheat of peeks.py from the third draft on: all that drafts of two tokens show is honest."""

import jax.numpy as jnp

from specdec_jax.decoding.sampling import DRAFT, draw, uniforms
from specdec_jax.stopping import static


def peeks_from_the_third():
    def check(state, distribution, drafted, context):
        token = draw(jnp.exp(distribution.log_prob), uniforms(context.seed, context.emitted, drafted[0], DRAFT))
        prob = jnp.exp(jnp.take_along_axis(distribution.log_prob, token[:, None], axis=1)[:, 0])
        return (drafted < 2) | (prob > 1 / 3), state

    return static().replace(check=check)
