"""Stop when the product of the drawn tokens' probabilities is below a threshold.

The rule has several names (cumulative product, dynamic depth, SADDLE; EAGLE-2's tree scores, arXiv 2406.16858, are the
same product). Unlike a threshold on single tokens it accumulates the risk along the draft. Published settings: 0.05 for
trees, 0.2 for chains, which is the default. The last token is kept. Choices left open: the probabilities are those of
the sampled distribution (at temperature 0 the raw ones), and the product includes the last token.
"""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import full
from specdec_jax.ranges import Share
from specdec_jax.stopping._readings import show_probability, token_probability
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, RoundContext, StoppingPolicy


class CumulativeConfidenceState(NamedTuple):
    threshold: Array  # [B] float32
    confidence: Array  # [B] float32, the product over this round's draft so far


@strategy
def cumulative_confidence() -> StoppingPolicy:
    """Stop after the token with which the product of the drawn tokens' probabilities falls below the threshold.

    Hyperparameters (`init`): threshold 0.2 (0 to 1; at 0 it never stops).
    """

    def init(batch: int, threshold: Share = 0.2) -> CumulativeConfidenceState:
        return CumulativeConfidenceState(threshold, full(batch, 1.0))

    def begin(state: CumulativeConfidenceState, context: RoundContext) -> tuple[Array, CumulativeConfidenceState]:
        return jnp.ones_like(context.alive), state._replace(confidence=jnp.ones_like(state.confidence))

    def proceed(
        state: CumulativeConfidenceState,
        distribution: Distribution,
        token: Array,
        drafted: Array,
        context: RoundContext,
    ) -> tuple[Array, CumulativeConfidenceState]:
        confidence = state.confidence * token_probability(distribution, token, context)
        return confidence >= state.threshold, state._replace(confidence=confidence)

    return StoppingPolicy(init, begin, proceed=proceed, threshold=show_probability)
