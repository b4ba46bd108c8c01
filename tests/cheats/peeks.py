"""A cheat: it draws the drafter's uniform again and rejects tokens that it knows will be improbable."""

import jax.numpy as jnp

from specdec_jax.decoding.sampling import DRAFT, draw, uniforms
from specdec_jax.stopping import static


def peeks(first=0):
    """From draft `first` + 1 on."""

    def check(state, distribution, drafted, context):
        token = draw(jnp.exp(distribution.log_prob), uniforms(context.seed, context.emitted, drafted[0], DRAFT))
        prob = jnp.exp(jnp.take_along_axis(distribution.log_prob, token[:, None], axis=1)[:, 0])
        return (drafted < first) | (prob > 1 / 3), state

    return static().replace(check=check)
