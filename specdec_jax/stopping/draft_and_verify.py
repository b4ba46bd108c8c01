"""Draft & Verify: stop after a token with a low drafter probability (arXiv 2309.08168, section 3.3).

The token is drawn and kept; drafting stops after it if its probability is below the threshold. After a round, as in the
authors' `decoding.py` (their auto parameters 1, 0.5, 0.9, 0.01, 0.9):

    match = 0.5 * match + 0.5 * accepted / drafted                        (match starts at 0)
    if match < 0.9: new = threshold + 0.01;  elif drafted == most: new = threshold;  else: new = threshold - 0.01
    threshold = 0.9 * threshold + 0.1 * new

AdaEDL's Algorithm 1 tests instead whether a full-length draft was accepted. Choices left open: the probability is that
of the sampled distribution (the authors use the softmax without temperature, which is equal at temperatures 0 and 1
without truncation); a round without drafts is ignored; the threshold stays in [0, 0.99]. It starts at 0.6, as in the
authors' notebooks; the paper has 0.8 for exact (greedy) decoding and 0.5 for sampling.
"""

import functools

from specdec_jax.ranges import Share
from specdec_jax.stopping._algorithm_1 import Algorithm1State, Threshold, algorithm_1
from specdec_jax.stopping._readings import show_probability, token_probability
from specdec_jax.stopping._wrapped import threshold_only
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, RoundContext, StoppingPolicy


@strategy
def draft_and_verify(adaptive: bool = True) -> StoppingPolicy:
    """Stop after a drawn token whose probability is below the threshold.

    Args:
        adaptive: adapt the threshold; otherwise it is constant, and the only hyperparameter.

    Hyperparameters (`init`): threshold 0.6 (in [0, 0.99]), target_match 0.9, match_decay 0.5, threshold_decay 0.9, step
    0.01, initial_match 0; all but the threshold in [0, 1].
    """

    def init(
        batch: int,
        threshold: Threshold = 0.6,
        target_match: Share = 0.9,
        match_decay: Share = 0.5,
        threshold_decay: Share = 0.9,
        step: Share = 0.01,
        initial_match: Share = 0.0,
    ) -> Algorithm1State:
        return Algorithm1State(threshold, initial_match, target_match, match_decay, threshold_decay, step)

    def proceed(
        state: Algorithm1State, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, Algorithm1State]:
        return ~(token_probability(distribution, token, context) < state.threshold), state

    policy = StoppingPolicy(init, proceed=proceed, threshold=show_probability)
    if not adaptive:
        return threshold_only(policy)
    return policy.replace(update=functools.partial(algorithm_1, falls_if_rejected=False))
