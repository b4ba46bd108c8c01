"""Stop when the drafter's largest probability falls under a threshold: AdaEDL's own baseline.

The rule is as old as early exit (BiLD, Draft & Verify, Kangaroo); this form, where the distribution is checked before
its token is drawn and Algorithm 1 moves the threshold with the same constants, is the 'Max-Confidence' column of
AdaEDL's tables (arXiv 2410.18351, section 4.3). Open there and decided here: the probability is that of the
distribution as sampled (at temperature 0 the raw one), unless `raw`; the rest as in `_algorithm_1.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.hyperparameters import per_row
from specdec_jax.stopping._algorithm_1 import Algorithm1State, begin_algorithm_1
from specdec_jax.stopping._thresholded import thresholded
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, StoppingPolicy


class MaxConfidenceState(NamedTuple):
    control: Algorithm1State
    failed: Array  # [B] bool, the last check failed (read by keep_checked_token)


@strategy
def max_confidence(keep_checked_token: bool = False, adaptive: bool = True, raw: bool = False) -> StoppingPolicy:
    """Stop in `check` when the distribution's largest probability is below the threshold.

    Args:
        keep_checked_token: draw the token of the failing distribution too and stop after it (its pass is already paid).
        adaptive: Algorithm 1 moves the threshold; otherwise it stays, and is the only hyperparameter.
        raw: read the largest probability at temperature 1 without truncation instead of the distribution's as sampled.

    Hyperparameters (`init`): threshold 0.7 (in [0, 0.99]), target_acceptance 0.9, acceptance_decay 0.5, threshold_decay
    0.9, step 0.01, initial_acceptance (the target acceptance unless given), all as AdaEDL's.
    """

    def init(
        batch: int,
        threshold: Any = 0.7,
        target_acceptance: Any = 0.9,
        acceptance_decay: Any = 0.5,
        threshold_decay: Any = 0.9,
        step: Any = 0.01,
        initial_acceptance: Any = None,
    ) -> MaxConfidenceState:
        return MaxConfidenceState(
            begin_algorithm_1(
                batch, threshold, target_acceptance, acceptance_decay, threshold_decay, step, initial_acceptance
            ),
            per_row(batch, False, "failed", dtype=bool),
        )

    def init_fixed(batch: int, threshold: Any = 0.7) -> MaxConfidenceState:
        return init(batch, threshold)

    def confidence(
        state: MaxConfidenceState, distribution: Distribution, drafted: Array
    ) -> tuple[Array, MaxConfidenceState]:
        del drafted
        return (distribution.raw_max_prob if raw else distribution.max_prob).astype(jnp.float32), state

    begun = init if adaptive else init_fixed
    return thresholded(begun, confidence, keep_checked_token=keep_checked_token, adaptive=adaptive)
