"""Fits the survival policy's prior to traces of a pair of models.

By maximum likelihood: weights optimised for the speed of replays were no faster on other prompts (docs/survival.md).
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.stopping._survival_state import LAPSE, LAPSE_WEIGHT, PRECISION, Prior, evidence
from specdec_jax.stopping.survival import SAMPLED

RIDGE = 1e-4
MOST_SURPRISE = 1.5
ITERATIONS = 50  # iterations of expectation maximisation


class Positions(NamedTuple):
    """All drafts of a trace with the policy's inputs, [M] each."""

    evidence: np.ndarray  # logits: that of the largest probability if greedy, the negative log entropy if sampled
    surprise: np.ndarray  # log q of the drafted token plus entropy; 0 if greedy
    log_temperature: np.ndarray  # 0 if greedy
    accepted: np.ndarray  # bool


def positions(trace: Trace) -> Positions:
    """The drafts at every token of every text; for a drafter that reads its target, every chain's drafts up to the
    first rejected one, or to the text's end.
    """
    at, features, accepted = _evaluated(trace)
    return Positions(*_read(features[at], trace.temperature[np.nonzero(at)[0]].astype(np.float64)), accepted[at])


def _evaluated(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(which drafts were verified [N, T+1] or [N, T+1, K], their features [..., F] float64, which were accepted)."""
    if trace.chains is None or trace.run is None:
        at = np.arange(trace.accepted.shape[1])[None, :] < trace.length[:, None]
        features, log_q, rejected = trace.path.astype(np.float64), FEATURES.index("log_q"), at & ~trace.accepted
        features[rejected, log_q] = trace.tails[trace.tail_of[rejected], 0, log_q]
        return at, features, trace.accepted
    begin, step = np.arange(trace.run.shape[1])[None, :, None], np.arange(trace.chains.shape[2])
    at = (step <= trace.run[:, :, None]) & (begin + step < trace.length[:, None, None])
    return at, trace.chains.astype(np.float64), np.broadcast_to(step < trace.run[:, :, None], at.shape)


def _read(features: np.ndarray, temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(evidence, surprise, log temperature) of a trace's features [..., F] at a temperature that broadcasts."""
    entropy, largest, log_q = (features[..., FEATURES.index(name)] for name in ("entropy", "max_prob", "log_q"))
    entropy, largest = np.maximum(entropy, 0.0).astype(np.float64), largest.astype(np.float64)
    logit, log_temperature = evidence(entropy, largest, temperature, np)
    surprise = np.where(temperature > 0, log_q + entropy, 0.0)
    return logit, surprise, np.broadcast_to(log_temperature, logit.shape)


class Learnt(NamedTuple):
    """The parameters per text that `survival` learns in addition to the prior; [N] each."""

    offset: np.ndarray  # logits
    lapse: np.ndarray  # the lapse rate


NOTHING_LEARNT = Learnt(np.zeros(1), np.zeros(1))  # broadcasts to any number of texts


def learnt_by_text(prior: Prior, trace: Trace) -> Learnt:
    """The offset and the lapse rate of every whole text, by expectation maximisation with the policy's priors."""
    at, features, accepted = _evaluated(trace)
    texts = len(at)
    at, accepted = at.reshape(texts, -1), accepted.reshape(texts, -1)
    logit = _logit(prior, features, trace.temperature.reshape(-1, *[1] * (features.ndim - 2))).reshape(texts, -1)
    offset, lapse, count = np.zeros(texts), np.full(texts, LAPSE), at.sum(axis=1)
    for _ in range(ITERATIONS):
        chance = 1 / (1 + np.exp(-logit - offset[:, None]))
        lapsed = np.where(at & ~accepted, lapse[:, None] / (1 - (1 - lapse[:, None]) * chance), 0.0)
        weight = at - lapsed
        excess = np.sum(weight * (accepted - chance), axis=1) - PRECISION * offset
        offset = np.clip(offset + excess / (PRECISION + np.sum(weight * chance * (1 - chance), axis=1)), -9, 9)
        lapse = (LAPSE * LAPSE_WEIGHT + lapsed.sum(axis=1)) / (LAPSE_WEIGHT + count)
    return Learnt(offset, lapse)


def chances(prior: Prior, features: np.ndarray, temperature: np.ndarray, learnt: Learnt = NOTHING_LEARNT) -> np.ndarray:
    """The acceptance probability of each drafted token, for features [..., F] of a trace ([N, ..., F] with parameters
    `learnt` for each of N texts) and a temperature that broadcasts."""
    logit = _logit(prior, features, temperature)
    offset, lapse = (values.reshape(-1, *[1] * (logit.ndim - 1)) for values in learnt)
    return (1 - lapse) / (1 + np.exp(-logit - offset))


def _logit(prior: Prior, features: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    logit, surprise, log_temperature = _read(features, temperature)
    return prior.bias + prior.log_temperature * log_temperature + logit + prior.surprise * surprise


def fit_prior(*traces: Trace) -> Prior:
    """The prior by maximum likelihood (logistic regression); all traces have equal weight.

    The bias and the weight of the temperature are fitted to the distributions before the draw, then the weight of the
    token's surprise after it. Traces are either greedy or sampled; the weight of the temperature needs several
    temperatures, otherwise it is that of the default prior. Raises ValueError: no traces, or traces in which nothing,
    or everything, was accepted.
    """
    if not traces:
        raise ValueError("a prior needs at least one trace to learn from")
    parts = [positions(trace) for trace in traces]
    seen = Positions(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))
    weight = np.concatenate([np.full(len(part.accepted), 1 / len(part.accepted)) for part in parts]) / len(parts)
    if seen.accepted.all() or not seen.accepted.any():
        raise ValueError("a prior needs accepted and rejected tokens to learn from; these traces have one kind only")
    several = np.ptp(seen.log_temperature) > 0
    slope = SAMPLED.log_temperature if not several and max(trace.temperature.max() for trace in traces) > 0 else 0.0
    logit = seen.evidence + slope * seen.log_temperature
    before = np.stack([np.ones_like(logit), seen.log_temperature * several], axis=1)
    bias, more = _logistic(before, logit, seen.accepted, weight, ((-np.inf, np.inf), (0.0, np.inf)))
    logit = logit + before @ [bias, more]
    surprise = _logistic(seen.surprise[:, None], logit, seen.accepted, weight, ((0.0, MOST_SURPRISE),))[0]
    return Prior(float(bias), float(slope + more), float(surprise))


def _logistic(
    columns: np.ndarray, logit: np.ndarray, labels: np.ndarray, weight: np.ndarray, bounds: Any
) -> np.ndarray:
    """Weights of columns that are added to a logit, within bounds, with a small ridge penalty; `weight` sums to 1."""
    signs = np.where(labels, 1.0, -1.0)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = signs * (logit + columns @ weights)
        value = float(weight @ np.logaddexp(0.0, -margin) + RIDGE * np.sum(weights**2))
        slope = -(weight * signs / (1.0 + np.exp(margin))) @ columns + 2 * RIDGE * weights
        return value, slope

    return minimize(loss, np.zeros(columns.shape[1]), jac=True, method="L-BFGS-B", bounds=bounds).x
