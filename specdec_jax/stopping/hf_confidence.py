"""transformers' dynamic speculation (arXiv 1910.03771): stop after a low-confidence token, with a refitted threshold.

Rule and refit are those of `generation/candidate_generator.py` (`assistant_confidence_threshold`, the default since
4.45): the token is kept, and drafting stops after it if its probability is below 0.4. After a round every drafted token
up to and including the first rejected one is a sample (probability, accepted). With more than 5 samples and both labels
present, the threshold becomes the one with the smallest `fpr + 3 * fnr`, where a false positive is a rejected token at
or above the threshold, a false negative an accepted one below it; in case of ties the highest, like `np.argmin` over
sklearn's descending thresholds.

Differences: thresholds are the edges 0, 1/bins, ... of equal bins instead of the samples and infinity as in sklearn's
`roc_curve` (a compiled state has no lists of variable length); the history belongs to one request and holds, for each
edge, the number of samples at or above it; probabilities are those of the sampled distribution (raw at temperature 0),
like transformers' processed scores; drafts beyond `positions` are not sampled. transformers' maximum of 20 tokens per
round corresponds to the drafter's `max_draft_length`.
"""

from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.hyperparameters import host
from specdec_jax.ranges import Between, Count, NotNegative, Share
from specdec_jax.stopping._readings import evaluated_positions, remember, show_probability, token_probability
from specdec_jax.stopping._wrapped import threshold_only
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, RoundContext, StoppingPolicy, VerificationResult


class _History(NamedTuple):
    probability: Array  # [B, P] float32, of this round's drafts
    accepted_above: Array  # [B, bins] int32, accepted samples at or above each edge
    rejected_above: Array  # [B, bins] int32
    least_samples: Array  # [B] int32, a refit needs more samples than this
    false_positive_weight: Array  # [B] float32
    false_negative_weight: Array  # [B] float32


class HFConfidenceState(NamedTuple):
    threshold: Array  # [B] float32
    history: _History | None  # None without refit


@strategy
def hf_confidence(
    refit: bool = True, bins: Annotated[int, Between(1)] = 50, positions: Annotated[int, Between(1)] = 32
) -> StoppingPolicy:
    """Stop after a drawn token whose probability is below the threshold.

    Args:
        refit: fit the threshold to the samples; otherwise it is constant, and the only hyperparameter.
        bins: number of thresholds that a refit chooses from.
        positions: maximum number of samples per round.

    Hyperparameters (`init`): threshold 0.4 (0 to 1), least_samples 5 (a refit needs more), false_positive_weight 1 and
    false_negative_weight 3 (these three >= 0).
    """

    def init(
        batch: int,
        threshold: Share = 0.4,
        least_samples: Count = 5,
        false_positive_weight: NotNegative = 1.0,
        false_negative_weight: NotNegative = 3.0,
    ) -> HFConfidenceState:
        if not refit:
            return HFConfidenceState(threshold, None)
        counts = host(np.zeros((batch, bins), np.int32))
        history = _History(
            probability=host(np.zeros((batch, positions), np.float32)),
            accepted_above=counts,
            rejected_above=counts,
            least_samples=least_samples,
            false_positive_weight=false_positive_weight,
            false_negative_weight=false_negative_weight,
        )
        return HFConfidenceState(threshold, history)

    def proceed(
        state: HFConfidenceState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, HFConfidenceState]:
        probability = token_probability(distribution, token, context)
        go_on = ~(probability < state.threshold)
        if state.history is not None:
            seen = remember(state.history.probability, drafted - 1, probability)
            state = state._replace(history=state.history._replace(probability=seen))
        return go_on, state

    policy = StoppingPolicy(init, proceed=proceed, threshold=show_probability)
    return policy.replace(update=_refit) if refit else threshold_only(policy)


def _refit(state: HFConfidenceState, draft: Draft, result: VerificationResult) -> HFConfidenceState:
    assert state.history is not None
    history, bins = state.history, state.history.accepted_above.shape[1]
    probability = history.probability[:, : draft.tokens.shape[1]]
    # Edges 0, 1/bins, ..., by numpy, because XLA may turn the division into a product with other rounding.
    edges = jnp.asarray(np.arange(bins, dtype=np.float32) / np.float32(bins))
    above = probability[:, :, None] >= edges[None, None, :]  # [B, P, bins]
    evaluated, is_accepted = evaluated_positions(draft, result, probability.shape[1])
    count = lambda chosen: jnp.sum(above & chosen[:, :, None], axis=1, dtype=jnp.int32)  # noqa: E731
    history = history._replace(
        accepted_above=history.accepted_above + count(evaluated & is_accepted),
        rejected_above=history.rejected_above + count(evaluated & ~is_accepted),
    )
    accepted_above, rejected_above = (
        counts.astype(jnp.float32) for counts in (history.accepted_above, history.rejected_above)
    )
    accepted, rejected = accepted_above[:, :1], rejected_above[:, :1]  # [B, 1]: totals
    # fpr and fnr times accepted * rejected: integers, so that ties are exact.
    cost = history.false_positive_weight[:, None] * rejected_above * accepted
    cost = cost + history.false_negative_weight[:, None] * (accepted - accepted_above) * rejected
    best = bins - 1 - jnp.argmin(cost[:, ::-1], axis=1)
    ready = ((accepted > 0) & (rejected > 0))[:, 0]
    ready = ready & (history.accepted_above[:, 0] + history.rejected_above[:, 0] > history.least_samples)
    return HFConfidenceState(jnp.where(ready, edges[best], state.threshold), history)
