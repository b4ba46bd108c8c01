"""A cheat that never looks at `policy_seed`: it finds the request's seed out from what was drafted.

`update` sees every draft and the distributions that it was drawn from. Of the seeds 0 to 255 those are left whose
uniforms give these tokens. Once it is one, the rule knows every later uniform, and refuses improbable tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import sampling
from specdec_jax.stopping import static
from specdec_jax.types import Array

SEEDS, EDGE = 256, 1e-4


class Learned(NamedTuple):
    left: Array  # [B, SEEDS] bool, seeds that may be the request's
    emitted: Array  # [B] int32, when the round began


def uniforms_of_all(emitted, position):
    """[B, SEEDS], of the drafts number `position`."""
    seeds = jnp.arange(SEEDS, dtype=jnp.uint32)
    of_one = lambda count: sampling.uniforms(seeds, jnp.full((SEEDS,), count), position, sampling.DRAFT)  # noqa: E731
    return jax.vmap(of_one)(emitted)


def learns_seed(floor: float = 0.3):
    """Refuses tokens less probable than `floor`."""

    def init(batch):
        return Learned(np.ones((batch, SEEDS), bool), np.zeros(batch, np.int32))

    def begin(state, context):
        return jnp.ones_like(context.alive), state._replace(emitted=context.emitted)

    def check(state, distribution, drafted, context):
        seed = jnp.argmax(state.left, axis=1).astype(jnp.uint32)
        uniform = sampling.uniforms(seed, context.emitted, drafted, sampling.DRAFT)
        token = sampling.draw(jnp.exp(distribution.log_prob), uniform)
        prob = jnp.exp(jnp.take_along_axis(distribution.log_prob, token[:, None], axis=1)[:, 0])
        return (prob > floor) | (jnp.sum(state.left, axis=1) != 1), state

    def proceed(state, distribution, token, drafted, context):
        return drafted < 4, state

    def update(state, draft, result):
        if draft.log_q is None:
            return state
        left = state.left
        for step in range(draft.tokens.shape[1]):
            q, token = jnp.exp(draft.log_q[:, step]), draft.tokens[:, step]
            below = jnp.arange(q.shape[1], dtype=jnp.int32)[None] < token[:, None]
            total = jnp.sum(q, axis=1)
            low = jnp.sum(jnp.where(below, q, 0.0), axis=1) / total
            high = low + jnp.take_along_axis(q, token[:, None], axis=1)[:, 0] / total
            uniform = uniforms_of_all(state.emitted, jnp.int32(step))
            fits = (uniform >= low[:, None] - EDGE) & (uniform <= high[:, None] + EDGE)
            left = left & (fits | (step >= draft.length)[:, None])
        return state._replace(left=left)

    return static().replace(
        init=init,
        begin=begin,
        check=check,
        proceed=proceed,
        update=update,
        threshold=lambda state: jnp.sum(state.left, axis=1).astype(jnp.float32),
        hyperparameters={},
    )
