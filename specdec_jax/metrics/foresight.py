"""An upper bound for stopping rules: all distributions of the draft are known before it begins, the coins are not.

A rule sees a distribution after it has paid for the pass. With foresight the whole draft of the round, its
distributions and its tokens, is known at once, and the length that brings most is drafted; whether a token is accepted
stays random. Chances are those of the logistic model of `metrics.prior`, fitted on this very trace. No rule that reads
entropy, largest probability and the drawn token's probability, and learns their weights from other texts, should be
faster but by luck. `replay.oracle`, which knows the coins too, lies far above.
"""

import numpy as np

from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.prior import chances, fit_prior
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import Trace

ROUNDS_OF_RATE = 12  # Dinkelbach's iteration converges in three or four


def with_foresight(trace: Trace, costs: CostModel, max_draft_length: int | None = None) -> Replay:
    """The counts of the best draft lengths for known distributions and unknown coins. One setting.

    Each round drafts the n that maximises E[tokens] - R (n c + V(n)), and R is the rate that results (renewal reward).

    Raises:
        ValueError: a trace without distributions, or one in which everything or nothing was accepted.
    """
    if trace.lengths_only:
        raise ValueError("foresight of distributions needs a trace that holds them, and this one has lengths only")
    most = trace.max_draft_length if max_draft_length is None else max_draft_length
    features, run = drafts_from(trace, most)
    survival = np.cumprod(chances(fit_prior(trace), features, trace.temperature[:, None, None]), axis=2)
    worth = np.concatenate([np.zeros((*run.shape, 1)), np.cumsum(survival, axis=2)], axis=2)  # tokens of n drafts
    room = np.clip(trace.limit[:, None] - np.arange(run.shape[1]) - 1, 0, most)
    worth[np.arange(most + 1) > room[:, :, None]] = -np.inf
    time = costs.pass_times(most) / costs.plain_pass + np.arange(most + 1) * costs.ratio
    rate, best = 1.0, None
    for _ in range(ROUNDS_OF_RATE):
        played = _play(trace, np.argmax(worth - rate * time, axis=2), run, most)
        speed = played.total_speedup(costs)[0]
        if best is not None and speed <= best.total_speedup(costs)[0]:
            break
        rate, best = speed, played
    assert best is not None
    return best


def drafts_from(trace: Trace, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The draft of a round that begins at each position: features [N, T+1, K, F], and drafts accepted of it [N, T+1].

    Features lie along the text while drafts are accepted and along the drafter's own continuation after that. Beyond a
    text's end they mean nothing.
    """
    if trace.chains is not None and trace.run is not None:
        return trace.chains[:, :, :most], np.minimum(trace.run, most)
    texts, positions = trace.accepted.shape
    run = np.zeros((texts, positions), int)
    for at in range(positions - 2, -1, -1):
        run[:, at] = np.where(trace.accepted[:, at], run[:, at + 1] + 1, 0)
    row, begin = np.arange(texts)[:, None, None], np.arange(positions)[None, :, None]
    step = np.arange(most)
    along = trace.path[row, np.minimum(begin + step, positions - 1)]
    ends = np.minimum(begin[..., 0] + run, positions - 1)
    tail_of = trace.tail_of[row[..., 0], ends][..., None]
    beyond = trace.tails[tail_of, np.clip(step - run[..., None], 0, trace.max_draft_length - 1)]
    return np.where((step < run[..., None])[..., None], along, beyond), np.minimum(run, most)


def _play(trace: Trace, lengths: np.ndarray, run: np.ndarray, most: int) -> Replay:
    """Rounds that draft `lengths` [N, T+1] tokens where they begin."""
    texts = np.arange(trace.num_texts)
    counts = np.zeros((4, 1, trace.num_texts), np.int64)  # rounds, drafted, accepted, passes
    by_length = np.zeros((1, trace.num_texts, most + 1), np.int64)
    at = np.zeros(trace.num_texts, int)
    while (going := at < trace.length).any():
        rows = texts[going]
        drafted = lengths[rows, at[rows]]
        emitted = np.minimum(np.minimum(run[rows, at[rows]], drafted) + 1, trace.length[rows] - at[rows])
        accepted = np.minimum(np.minimum(run[rows, at[rows]], drafted), emitted)
        counts[:, 0, rows] += np.stack([np.ones_like(drafted), drafted, accepted, drafted])
        by_length[0, rows, drafted] += 1
        at[rows] += emitted
    rounds, drafted, accepted, passes = counts
    return Replay(rounds, trace.length[None].astype(np.int64), drafted, accepted, passes, passes * 0, by_length, None)
