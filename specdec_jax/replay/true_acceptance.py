"""The survival rule with the true acceptance: a replay in which its estimate is replaced by sum of min(p, q).

It shows what a better estimate of the acceptance probability would bring to `survival` on a pair. It is no upper bound
for other rules: the model that `survival` has of later tokens stays, and where that is wrong another rule can be
faster (on Qwen2.5-Coder 1.5B with 0.5B at 0.7, AdaEDL with its checked token kept is: docs/results.md). The upper
bound is `replay.oracle`, which never drafts a token that will be rejected. Greedily the true acceptance is 0 or 1.
"""

import numpy as np

from specdec_jax.costs.cost_model import CostModel
from specdec_jax.replay.replay import Replay, replay
from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.stopping.survival import Prior, survival

# The acceptance probability is the overlap itself. A token whose distribution is still unknown has the trace's mean,
# moved by a third towards the last overlap.
TRUE = Prior(
    0.0, 0.0, 1.0, surprise=0.0, log_temperature=0.0, entropy_log_temperature=0.0, next_bias=0.0, next_slope=0.3
)


def survival_true_acceptance(trace: Trace, costs: CostModel, max_draft_length: int | None = None) -> Replay:
    """Replays `survival` with sum of min(p, q) as the acceptance probability of every position. One setting.

    The overlap after a rejected token is not recorded: the trace's mean stands for it. The round is lost there anyway.

    Raises:
        ValueError: a trace of chains, whose overlaps are recorded for first drafts only.
    """
    if trace.chains is not None:
        raise ValueError("the overlap of a drafter that reads its target is recorded for first drafts only")
    most = trace.max_draft_length if max_draft_length is None else max_draft_length
    column = FEATURES.index("max_prob")
    overlap = np.nan_to_num(trace.overlap, nan=0.0)
    path, tails = trace.path.copy(), trace.tails.copy()
    path[..., column] = overlap
    tails[:, 1:, column] = float(np.nanmean(trace.overlap))
    texts, at = np.nonzero(~trace.accepted & (np.arange(overlap.shape[1])[None, :] <= trace.length[:, None]))
    tails[trace.tail_of[texts, at], 0, column] = overlap[texts, at]
    hyperparameters = {
        "drafter_cost": costs.ratio,
        "verification_times": costs.verification_times(most)[None, :],
        "greedy": np.array([TRUE]),
        "sampled": np.array([TRUE]),
        "prior_precision": 1e4,  # the true acceptance needs no correction
    }
    return replay(trace._replace(path=path, tails=tails), _SURVIVAL, hyperparameters, max_draft_length=most)


_SURVIVAL = survival()
