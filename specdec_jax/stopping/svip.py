"""SVIP: stop after a token whose distribution has a high entropy (arXiv 2411.18462, section 3).

The token is drawn and kept; drafting stops after it when `sqrt(entropy_factor * H) > threshold`. With the authors' 0.15
and 0.3 (`vanilla-sd/eval_specbench.py`) that is H > 0.6 nats. The criterion is equivalent to AdaEDL's bound,
`1 - sqrt(f H)` below 0.7, with a fixed threshold, the entropy at temperature 1, and the token kept. The authors'
maximum of 40 drafts corresponds to the drafter's `max_draft_length`.
"""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.ranges import NotNegative, Positive
from specdec_jax.stopping._thresholded import in_unit
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, RoundContext, StoppingPolicy


class SVIPState(NamedTuple):
    entropy_factor: Array  # [B] float32
    threshold: Array  # [B] float32


@strategy
def svip(raw_entropy: bool = True) -> StoppingPolicy:
    """Stop after a token drawn from a distribution with `sqrt(entropy_factor * H)` above the threshold.

    Args:
        raw_entropy: use the entropy at temperature 1 without truncation, like the authors; otherwise that of the
            sampled distribution.

    Hyperparameters (`init`): entropy_factor 0.15 (> 0), threshold 0.3 (>= 0).
    """

    def init(batch: int, entropy_factor: Positive = 0.15, threshold: NotNegative = 0.3) -> SVIPState:
        return SVIPState(entropy_factor, threshold)

    def proceed(
        state: SVIPState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, SVIPState]:
        entropy = distribution.raw_entropy if raw_entropy else distribution.entropy
        return ~(jnp.sqrt(state.entropy_factor * entropy.astype(jnp.float32)) > state.threshold), state

    return StoppingPolicy(init, proceed=proceed, threshold=in_unit("√(factor H)", lambda state: state.threshold))
