"""The survival rule's prior, learnt from a trace of a pair of models.

By likelihood: weights searched for the speed of replays themselves were no faster on other prompts (docs/survival.md).
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.stopping.survival import Prior

LEAST, MOST = Prior(-3, -4, 0, 0, -4, 0, -2, 0), Prior(5, 0, 3, 1, 4, 3, 3, 1)
"""Where weights may lie: acceptance never rises with entropy, and never falls with confidence."""
RIDGE = 1e-4


class Positions(NamedTuple):
    """Every draft that a trace holds as the rule sees it, [M] each."""

    sqrt_entropy: np.ndarray
    confidence: np.ndarray  # logit of the largest probability
    surprise: np.ndarray  # log q of the drafted token plus entropy; 0 where greedy
    log_temperature: np.ndarray  # log temperature; 0 where greedy
    accepted: np.ndarray  # bool
    chain: np.ndarray  # int; drafts of one chain, one behind the other, may be those of one round


def positions(trace: Trace) -> Positions:
    """The draft before every token of every text; of a drafter that reads its target, every chain's drafts."""
    texts, chain, features, accepted = _along(trace) if trace.chains is None else _of_chains(trace)
    entropy, largest, log_q = (features[:, FEATURES.index(name)] for name in ("entropy", "max_prob", "log_q"))
    largest = np.clip(largest, 1e-4, 1 - 1e-4)
    temperature = trace.temperature[texts].astype(np.float64)
    surprise = np.where(temperature > 0, log_q + entropy, 0.0)
    log_temperature = np.log(np.where(temperature > 0, temperature, 1.0))
    return Positions(np.sqrt(entropy), np.log(largest) - np.log1p(-largest), surprise, log_temperature, accepted, chain)


def _along(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(text, chain, features, accepted) of every position: a text is a chain."""
    at = np.arange(trace.accepted.shape[1])[None, :] < trace.length[:, None]
    texts, _ = np.nonzero(at)
    features, accepted = trace.path[at].astype(np.float64), trace.accepted[at]
    log_q = FEATURES.index("log_q")
    features[~accepted, log_q] = trace.tails[trace.tail_of[at][~accepted], 0, log_q]
    return texts, texts, features, accepted


def _of_chains(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The same of every chain's drafts up to the first that is rejected, or to the text's end."""
    assert trace.chains is not None and trace.run is not None
    begin, step = np.arange(trace.run.shape[1])[None, :, None], np.arange(trace.chains.shape[2])
    run = trace.run[:, :, None]
    at = (step <= run) & (begin + step < trace.length[:, None, None])
    texts, begun, _ = np.nonzero(at)
    accepted = np.broadcast_to(step < run, at.shape)[at]
    return texts, texts * trace.run.shape[1] + begun, trace.chains[at].astype(np.float64), accepted


def chances(prior: Prior, features: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """The chance that each drafted token is accepted: features [..., F] of a trace, a temperature that broadcasts."""
    entropy, largest, log_q = (features[..., FEATURES.index(name)] for name in ("entropy", "max_prob", "log_q"))
    largest, sampled = np.clip(largest.astype(np.float64), 1e-4, 1 - 1e-4), temperature > 0
    log_temperature = np.log(np.where(sampled, temperature, 1.0))
    slope = np.minimum(prior.entropy + prior.entropy_log_temperature * log_temperature, 0.0)
    logit = prior.bias + prior.log_temperature * log_temperature + slope * np.sqrt(np.maximum(entropy, 0.0))
    logit = logit + prior.confidence * (np.log(largest) - np.log1p(-largest))
    return 1 / (1 + np.exp(-logit - np.where(sampled, prior.surprise * (log_q + entropy), 0.0)))


def fit_prior(*traces: Trace) -> Prior:
    """The prior of greatest likelihood: logistic regressions, within their bounds.

    The first tells acceptance from the distribution before the draw, the second adds the token's surprise after it, the
    third tells the acceptance of the position after an accepted one from that one's logit. Give greedy traces or
    sampled ones; several temperatures teach what temperature does, from one it is taken to do nothing.

    Raises:
        ValueError: no traces, or such in which nothing, or everything, was accepted.
    """
    if not traces:
        raise ValueError("a prior needs at least one trace to learn from")
    parts = [positions(trace) for trace in traces]
    offsets = np.cumsum([0, *(part.chain.max(initial=0) + 1 for part in parts[:-1])])
    shifted = [part._replace(chain=part.chain + offset) for part, offset in zip(parts, offsets, strict=True)]
    seen = Positions(*(np.concatenate(fields) for fields in zip(*shifted, strict=True)))
    if seen.accepted.all() or not seen.accepted.any():
        raise ValueError("a prior needs accepted and rejected tokens to learn from; these traces have one kind only")
    columns = np.stack(
        [
            np.ones_like(seen.log_temperature),
            seen.sqrt_entropy,
            seen.confidence,
            seen.log_temperature,
            seen.sqrt_entropy * seen.log_temperature,
        ],
        axis=1,
    )
    names = ("bias", "entropy", "confidence", "log_temperature", "entropy_log_temperature")
    before = _logistic(columns, seen.accepted, *([getattr(end, name) for name in names] for end in (LEAST, MOST)))
    logit = columns @ before
    with_token = np.stack([np.ones_like(logit), logit, seen.surprise], axis=1)
    surprise = _logistic(with_token, seen.accepted, (0.0, 1.0, LEAST.surprise), (0.0, 1.0, MOST.surprise))[2]
    follows = (seen.chain[1:] == seen.chain[:-1]) & seen.accepted[:-1]
    after = np.stack([np.ones(int(follows.sum())), logit[:-1][follows]], axis=1)
    following = _logistic(after, seen.accepted[1:][follows], LEAST[-2:], MOST[-2:])
    fitted = {name: float(value) for name, value in zip(names, before, strict=True)}
    return Prior(**fitted, surprise=float(surprise), next_bias=float(following[0]), next_slope=float(following[1]))


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
