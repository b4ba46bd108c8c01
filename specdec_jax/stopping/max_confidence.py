"""Stop when the drafter's largest probability is below a threshold: the baseline in AdaEDL's paper.

Variants of the rule are in BiLD, Draft & Verify and Kangaroo; this form, which checks the distribution before its token
is drawn and adapts the threshold by Algorithm 1 with the same constants, is the 'Max-Confidence' column of AdaEDL's
tables (arXiv 2410.18351, section 4.3). Choices left open there: the probability is that of the sampled distribution
(at temperature 0 the raw one), unless `raw`; the rest as in `_algorithm_1.py`.
"""

from typing import NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import full
from specdec_jax.stopping._algorithm_1 import Algorithm1State, begin_algorithm_1
from specdec_jax.stopping._thresholded import thresholded
from specdec_jax.stopping._wrapped import threshold_only
from specdec_jax.strategy import strategy, with_parameters_of
from specdec_jax.types import Array, Distribution, StoppingPolicy


class MaxConfidenceState(NamedTuple):
    control: Algorithm1State
    failed: Array  # [B] bool, the last check failed (read by keep_checked_token)


@strategy
def max_confidence(keep_checked_token: bool = False, adaptive: bool = True, raw: bool = False) -> StoppingPolicy:
    """Stop in `check` when the distribution's largest probability is below the threshold.

    Args:
        keep_checked_token: draft the token of the failing distribution too, then stop (its pass was already run).
        adaptive: Algorithm 1 adapts the threshold; otherwise it is constant, and the only hyperparameter.
        raw: use the largest probability at temperature 1 without truncation instead of the sampled distribution's.

    Hyperparameters (`init`): threshold 0.7 (in [0, 0.99]), target_acceptance 0.9, acceptance_decay 0.5, threshold_decay
    0.9, step 0.01, initial_acceptance (the target acceptance unless given), all as AdaEDL's.
    """

    @with_parameters_of(begin_algorithm_1)
    def init(batch: int, **control: Array) -> MaxConfidenceState:
        return MaxConfidenceState(begin_algorithm_1(batch, **control), full(batch, False, dtype=bool))

    def confidence(
        state: MaxConfidenceState, distribution: Distribution, drafted: Array
    ) -> tuple[Array, MaxConfidenceState]:
        return (distribution.raw_max_prob if raw else distribution.max_prob).astype(jnp.float32), state

    policy = thresholded(init, confidence, keep_checked_token=keep_checked_token, adaptive=adaptive)
    return policy if adaptive else threshold_only(policy)
