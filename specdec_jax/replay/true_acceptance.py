"""How far could any rule go that reads distributions? A replay of the survival rule told what no drafter knows.

Between a rule and the oracle lie two things. One is what the drafter does not know of the target's distribution; a rule
told the true expected acceptance, sum of min(p, q), before every draw has none of it left. The other is the coin: even
who knows both distributions cannot know which way it falls. Under greedy decoding there is no coin, and the two limits
are one.
"""

import numpy as np

from specdec_jax.costs.cost_model import CostModel
from specdec_jax.replay.replay import Replay, replay
from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.stopping.survival import Prior, survival

# The chance is the overlap itself; tokens whose distribution is not known yet have the mean's, a third of the way to
# the last.
TOLD = Prior(
    0.0, 0.0, 1.0, surprise=0.0, log_temperature=0.0, entropy_log_temperature=0.0, next_bias=0.0, next_slope=0.3
)


def oracle_acceptance(trace: Trace, costs: CostModel, max_draft_length: int | None = None) -> Replay:
    """The survival rule, told sum of min(p, q) along the text. One setting.

    Beyond a rejected token the overlap was not recorded and is taken to be the trace's mean: a little less than it
    could know, where all is lost anyway.

    Raises:
        ValueError: a trace of chains, whose overlaps are recorded for first drafts only.
    """
    if trace.chains is not None:
        raise ValueError("the overlap of a drafter that reads its target is recorded for first drafts only")
    most = trace.max_draft_length if max_draft_length is None else max_draft_length
    column = FEATURES.index("max_prob")
    known = np.nan_to_num(trace.overlap, nan=0.0)
    path, tails = trace.path.copy(), trace.tails.copy()
    path[..., column] = known
    tails[:, 1:, column] = float(np.nanmean(trace.overlap))
    texts, at = np.nonzero(~trace.accepted & (np.arange(known.shape[1])[None, :] <= trace.length[:, None]))
    tails[trace.tail_of[texts, at], 0, column] = known[texts, at]
    hyperparameters = {
        "drafter_cost": costs.ratio,
        "verification_times": costs.verification_times(most)[None, :],
        "greedy": np.array([TOLD]),
        "sampled": np.array([TOLD]),
        "prior_precision": 1e4,  # what it is told needs no correction
    }
    return replay(trace._replace(path=path, tails=tails), _SURVIVAL, hyperparameters, max_draft_length=most)


_SURVIVAL = survival()
