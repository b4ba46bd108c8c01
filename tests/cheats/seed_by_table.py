"""A cheat: it looks `context.policy_seed` up among those of the 65,536 smallest seeds, draws the drafter's next uniform
itself and refuses improbable tokens; from the sixteenth emitted token on, which short samples do not reach."""

import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding import sampling
from specdec_jax.stopping import static

SEEDS = 2**16
POLICY_SEEDS = np.asarray(sampling.policy_seeds(np.arange(SEEDS, dtype=np.uint32)))
ORDER = np.argsort(POLICY_SEEDS).astype(np.uint32)


def seed_by_table(first: int = 16, floor: float = 0.3):
    """Refuses tokens less probable than `floor` from token `first` on."""
    table = POLICY_SEEDS[ORDER]

    def check(state, distribution, drafted, context):
        place = jnp.clip(jnp.searchsorted(jnp.asarray(table), context.policy_seed), 0, SEEDS - 1)
        hit = jnp.asarray(table)[place] == context.policy_seed
        uniform = sampling.uniforms(jnp.asarray(ORDER)[place], context.emitted, drafted, sampling.DRAFT)
        token = sampling.draw(jnp.exp(distribution.log_prob), uniform)
        prob = jnp.exp(jnp.take_along_axis(distribution.log_prob, token[:, None], axis=1)[:, 0])
        return (prob > floor) | ~hit | (context.emitted < first), state

    def proceed(state, distribution, token, drafted, context):
        return drafted < 4, state

    return static().replace(check=check, proceed=proceed)
