"""AdaEDL: stop when the drafter's entropy indicates that the next token is likely to be rejected (arXiv 2410.18351).

The bound (section 3, appendix B): the acceptance rate is one minus the total variation of drafter and target; Pinsker's
inequality and the stable-entropy hypothesis give about `1 - sqrt(entropy_factor * H)`. Drafting stops when that is
below lambda (`_thresholded.py`), which adapts to the acceptance rate (`_algorithm_1.py`). Left open by the paper:

- entropy in nats, of the sampled distribution (after warping), or raw; at temperature 0 the raw one;
- the running acceptance rate starts at the target acceptance rate, lambda at 0.7 (the paper sweeps 0.3 to 0.9);
- a round without drafts leaves both unchanged, and lambda stays in [0, 0.99] (for the reason see `_algorithm_1.py`).
"""

from typing import NamedTuple

from specdec_jax.hyperparameters import full
from specdec_jax.ranges import Positive
from specdec_jax.stopping._algorithm_1 import Algorithm1State, begin_algorithm_1
from specdec_jax.stopping._thresholded import entropy_bound, thresholded
from specdec_jax.strategy import strategy, with_parameters_of
from specdec_jax.types import Array, Distribution, StoppingPolicy


class AdaEDLState(NamedTuple):
    control: Algorithm1State
    failed: Array  # [B] bool, the last check failed (read by keep_checked_token)
    entropy_factor: Array  # [B] float32, the paper's gamma


@strategy
def adaedl(keep_checked_token: bool = False, raw_entropy: bool = False) -> StoppingPolicy:
    """AdaEDL's Algorithm 1 as printed, or with the token of the distribution that fails the check kept.

    Args:
        keep_checked_token: draft the token of the failing distribution too and stop after it. Its pass was already run,
            and the decision does not depend on the token, so this is as lossless as the published rule. An addition of
            this project.
        raw_entropy: use the entropy at temperature 1 without truncation instead of the sampled distribution's.

    Hyperparameters (`init`), the paper's values (section 4.4) except for the first: threshold 0.7 (lambda, in [0,
    0.99]), entropy_factor 0.2 (> 0), target_acceptance 0.9 (alpha), acceptance_decay 0.5 (beta1), threshold_decay 0.9
    (beta2), step 0.01 (epsilon), initial_acceptance (alpha unless given); the last five in [0, 1].
    """

    @with_parameters_of(begin_algorithm_1)
    def init(batch: int, entropy_factor: Positive = 0.2, **control: Array) -> AdaEDLState:
        failed = full(batch, False, dtype=bool)
        return AdaEDLState(begin_algorithm_1(batch, **control), failed, entropy_factor)

    def bound(state: AdaEDLState, distribution: Distribution, drafted: Array) -> tuple[Array, AdaEDLState]:
        entropy = distribution.raw_entropy if raw_entropy else distribution.entropy
        return entropy_bound(state.entropy_factor, entropy), state

    return thresholded(init, bound, keep_checked_token=keep_checked_token)
