"""AdaEDL with an entropy factor fitted online, so that the bound is calibrated: the paper's first open question.

AdaEDL (arXiv 2410.18351) estimates acceptance by `1 - sqrt(entropy_factor * H)` with a fixed factor of 0.2, its gamma.
Here the factor is fitted to the observed acceptance by the method of moments: over the evaluated positions,
`sqrt(entropy_factor) = sum(rejected) / sum(sqrt(H))`. Both sums decay per round, but not the prior: `prior_weight`
positions of 1 nat with the rejection rate implied by `entropy_factor`. The factor stays in [0.001, 10]: if every token
is accepted it would approach 0, where no entropy stops a draft and only rejections are informative. Algorithm 1 adapts
lambda as in AdaEDL. Only drafted positions enter the fit: positions that failed the check are never verified, so with
a high lambda the fit sees low entropies only; `keep_checked_token` adds one failing position per round.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import full, host
from specdec_jax.ranges import Between, Positive, Share
from specdec_jax.stopping._algorithm_1 import Algorithm1State, begin_algorithm_1
from specdec_jax.stopping._readings import evaluated_positions, remember
from specdec_jax.stopping._thresholded import thresholded
from specdec_jax.strategy import strategy, with_parameters_of
from specdec_jax.types import Array, Distribution, Draft, StoppingPolicy, VerificationResult

FACTOR_RANGE = (1e-3, 10.0)


class AdaptiveGammaState(NamedTuple):
    control: Algorithm1State
    failed: Array  # [B] bool, the last check failed (read by keep_checked_token)
    root_entropy: Array  # [B, P] float32, sqrt(H) at this round's positions
    rejected: Array  # [B] float32, decayed count of rejected positions
    roots: Array  # [B] float32, decayed sum of sqrt(H) over the positions evaluated
    entropy_factor: Array  # [B] float32, the prior's
    prior_weight: Array  # [B] float32, positions
    decay: Array  # [B] float32, per round


@strategy
def adaptive_gamma(keep_checked_token: bool = False, positions: Annotated[int, Between(1)] = 32) -> StoppingPolicy:
    """AdaEDL with a fitted entropy factor.

    Args:
        keep_checked_token: as in `adaedl`: the token of the distribution that fails the check is kept.
        positions: number of drafts per round that enter the fit.

    Hyperparameters (`init`): entropy_factor 0.2 (of the prior, in [0.001, 10]), prior_weight 10 (positions, > 0), decay
    0.98 (0 to 1, per round), and AdaEDL's threshold 0.7, target_acceptance 0.9, acceptance_decay 0.5,
    threshold_decay 0.9, step 0.01, initial_acceptance.
    """

    @with_parameters_of(begin_algorithm_1)
    def init(
        batch: int,
        entropy_factor: Annotated[Any, Between(*FACTOR_RANGE)] = 0.2,
        prior_weight: Positive = 10.0,
        decay: Share = 0.98,
        **control: Array,
    ) -> AdaptiveGammaState:
        return AdaptiveGammaState(
            control=begin_algorithm_1(batch, **control),
            failed=full(batch, False, dtype=bool),
            root_entropy=host(np.zeros((batch, positions), np.float32)),
            rejected=full(batch, 0.0),
            roots=full(batch, 0.0),
            entropy_factor=entropy_factor,
            prior_weight=prior_weight,
            decay=decay,
        )

    def bound(
        state: AdaptiveGammaState, distribution: Distribution, drafted: Array
    ) -> tuple[Array, AdaptiveGammaState]:
        root = jnp.sqrt(jnp.maximum(distribution.entropy.astype(jnp.float32), 0.0))
        seen = state._replace(root_entropy=remember(state.root_entropy, drafted, root))
        rejected = state.prior_weight * jnp.sqrt(state.entropy_factor) + state.rejected
        factor = jnp.clip(jnp.square(rejected / (state.prior_weight + state.roots)), *FACTOR_RANGE)
        return 1.0 - jnp.sqrt(factor) * root, seen

    def fit(state: AdaptiveGammaState, draft: Draft, result: VerificationResult) -> AdaptiveGammaState:
        evaluated, accepted = evaluated_positions(draft, result, state.root_entropy.shape[1])
        rejected = jnp.sum(evaluated & ~accepted, axis=1, dtype=jnp.int32).astype(jnp.float32)
        roots = jnp.sum(jnp.where(evaluated, state.root_entropy, 0.0), axis=1)
        return state._replace(rejected=state.decay * state.rejected + rejected, roots=state.decay * state.roots + roots)

    return thresholded(init, bound, keep_checked_token=keep_checked_token, learn=fit)
