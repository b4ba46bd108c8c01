"""The survival rule's prior, learnt from a trace of a pair of models.

By likelihood: weights searched for the speed of replays themselves were no faster on other prompts (docs/survival.md).
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from specdec_jax.analysis.trace import FEATURES, Trace
from specdec_jax.stopping.survival import Prior

LEAST, MOST = Prior(-3.0, -4.0, 0.0, 0.0, -2.0, 0.0), Prior(5.0, 0.0, 3.0, 1.0, 3.0, 1.0)
"""Where weights may lie: acceptance never rises with entropy, and never falls with confidence."""
RIDGE = 1e-4


class Positions(NamedTuple):
    """Every position of a trace as the rule sees it, [M] each."""

    sqrt_entropy: np.ndarray
    confidence: np.ndarray  # logit of the largest probability
    surprise: np.ndarray  # log q of the drafted token plus entropy; 0 where greedy
    accepted: np.ndarray  # bool
    text: np.ndarray  # int


def positions(trace: Trace) -> Positions:
    """The positions before every token of every text, with the token that was drafted there."""
    at = np.arange(trace.accepted.shape[1])[None, :] < trace.length[:, None]
    texts, _ = np.nonzero(at)
    features, accepted = trace.path[at].astype(np.float64), trace.accepted[at]
    entropy, largest, log_q = (features[:, FEATURES.index(name)].copy() for name in ("entropy", "max_prob", "log_q"))
    log_q[~accepted] = trace.tails[trace.tail_of[at][~accepted], 0, FEATURES.index("log_q")]
    largest = np.clip(largest, 1e-4, 1 - 1e-4)
    surprise = np.where(trace.temperature[texts] > 0, log_q + entropy, 0.0)
    return Positions(np.sqrt(entropy), np.log(largest) - np.log1p(-largest), surprise, accepted, texts)


def fit_prior(trace: Trace) -> Prior:
    """The prior of greatest likelihood: two logistic regressions, within their bounds.

    The first tells acceptance from the law before the draw, and with the token's surprise after it; the second the
    acceptance of the position after an accepted one from that one's logit.

    Raises:
        ValueError: a trace in which nothing, or everything, was accepted.
    """
    seen = positions(trace)
    if seen.accepted.all() or not seen.accepted.any():
        raise ValueError("a prior needs accepted and rejected tokens to learn from; this trace has one kind only")
    columns = np.stack([np.ones_like(seen.surprise), seen.sqrt_entropy, seen.confidence], axis=1)
    before = _logistic(columns, seen.accepted, LEAST[:3], MOST[:3])
    logit = columns @ before
    with_token = np.stack([np.ones_like(logit), logit, seen.surprise], axis=1)
    surprise = _logistic(with_token, seen.accepted, (0.0, 1.0, LEAST.surprise), (0.0, 1.0, MOST.surprise))[2]
    follows = (seen.text[1:] == seen.text[:-1]) & seen.accepted[:-1]
    after = np.stack([np.ones(int(follows.sum())), logit[:-1][follows]], axis=1)
    following = _logistic(after, seen.accepted[1:][follows], LEAST[4:], MOST[4:])
    return Prior(*(float(value) for value in (*before, surprise, *following)))


def _logistic(columns: np.ndarray, labels: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """Weights of a logistic regression with a little ridge on all but the first, within bounds."""
    signs = np.where(labels, 1.0, -1.0)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = signs * (columns @ weights)
        value = float(np.mean(np.logaddexp(0.0, -margin)) + RIDGE * np.sum(weights[1:] ** 2))
        slope = -(signs / (1.0 + np.exp(margin))) @ columns / len(labels)
        slope[1:] += 2 * RIDGE * weights[1:]
        return value, slope

    start = np.clip(np.zeros(columns.shape[1]), low, high)
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=list(zip(low, high, strict=True))).x
