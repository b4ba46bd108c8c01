"""A reference for stopping policies: all distributions of the draft are known in advance, but not the acceptance.

A policy sees a distribution only after its pass. With foresight the whole draft of the round, its distributions and
tokens, is known in advance, and the best length is drafted; acceptance remains random. The acceptance probabilities are
those of `survival`, in sampling with a prior fitted to the same trace, and an offset and a lapse rate fitted to each
whole text. It is no upper bound: each round is played for itself, though where it ends decides how the next begins, and
a policy can be a little faster. `replay.oracle`, which also knows the acceptance, is much faster.
"""

import numpy as np

from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.prior import chances, fit_prior, learnt_by_text
from specdec_jax.replay.replay import Replay, rounds_of
from specdec_jax.replay.trace import Trace
from specdec_jax.stopping.survival import PRIOR

ROUNDS_OF_RATE = 12  # Dinkelbach's iteration converges in three or four


def with_foresight(trace: Trace, costs: CostModel, max_draft_length: int | None = None) -> Replay:
    """The counts of the best draft lengths for known distributions and unknown acceptance. One setting.

    Each round drafts the n that maximises E[tokens] - R (n c + V(n)), with R the resulting rate (renewal reward).
    Raises ValueError: a trace without distributions, or a sampled one in which everything or nothing was accepted.
    """
    if trace.lengths_only:
        raise ValueError("foresight of distributions needs a trace that holds them, and this one has lengths only")
    longest = trace.max_draft_length if max_draft_length is None else max_draft_length
    prior = fit_prior(trace) if trace.temperature.max() > 0 else PRIOR
    drafts = drafts_from(trace, longest)
    chance = chances(prior, drafts, trace.temperature[:, None, None], learnt_by_text(prior, trace))
    worth = np.pad(np.cumsum(np.cumprod(chance, axis=2), axis=2), ((0, 0), (0, 0), (1, 0)))  # tokens of n drafts
    budget = np.clip(trace.limit[:, None] - np.arange(worth.shape[1]) - 1, 0, longest)
    worth[np.arange(longest + 1) > budget[:, :, None]] = -np.inf
    time = costs.verification_times(longest) + np.arange(longest + 1) * costs.ratio
    rate, best = 1.0, None
    for _ in range(ROUNDS_OF_RATE):
        replayed = rounds_of(trace, np.argmax(worth - rate * time, axis=2), longest)
        speed = replayed.total_speedup(costs)[0]
        if best is not None and speed <= best.total_speedup(costs)[0]:
            break
        rate, best = speed, replayed
    assert best is not None
    return best


def drafts_from(trace: Trace, longest: int) -> np.ndarray:
    """The draft of a round that begins at each position, features [N, T+1, K, F].

    They follow the text while drafts are accepted and the drafter's own continuation after that. Beyond a text's end
    they are meaningless.
    """
    if trace.chains is not None:
        return trace.chains[:, :, :longest]
    run, (texts, positions) = trace.accepted_runs(), trace.accepted.shape
    row, begin, step = np.arange(texts)[:, None], np.arange(positions)[None, :], np.arange(longest)
    along = trace.path[row[..., None], np.minimum(begin[..., None] + step, positions - 1)]
    tail_of = trace.tail_of[row, np.minimum(begin + run, positions - 1)][..., None]
    beyond = along
    if len(trace.tails):  # something was rejected
        beyond = trace.tails[tail_of, np.clip(step - run[..., None], 0, trace.max_draft_length - 1)]
    return np.where((step < run[..., None])[..., None], along, beyond)
