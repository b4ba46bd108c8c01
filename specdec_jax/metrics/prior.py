"""Fits the survival policy's prior to traces of a pair of models.

By maximum likelihood: weights optimised for the speed of replays were no faster on other prompts (docs/method.md).
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.stopping.survival import PRIOR, Prior, log_odds

RIDGE = 1e-4
PRECISION, LAPSE, LAPSE_WEIGHT = 4.0, 0.05, 5.0  # priors of a text's offset (precision) and lapse rate (weight)
ITERATIONS = 50  # iterations of expectation maximisation


class Positions(NamedTuple):
    """All drafts of a sampled trace with the policy's inputs, [M] each."""

    evidence: np.ndarray  # logits: the negative log entropy
    log_temperature: np.ndarray
    accepted: np.ndarray  # bool


def positions(trace: Trace) -> Positions:
    """The drafts at every token of every text; for a drafter that reads its target, every chain's drafts up to the
    first rejected one, or to the text's end.
    """
    at, features, accepted = _evaluated(trace)
    temperature = trace.temperature[np.nonzero(at)[0]].astype(np.float64)
    return Positions(_logit(Prior(0.0, 0.0), features[at], temperature), np.log(temperature), accepted[at])


def _evaluated(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(which drafts were verified [N, T+1] or [N, T+1, K], their features [..., F] float64, which were accepted)."""
    if trace.chains is None or trace.run is None:
        at = np.arange(trace.accepted.shape[1])[None, :] < trace.length[:, None]
        return at, trace.path.astype(np.float64), trace.accepted
    begin, step = np.arange(trace.run.shape[1])[None, :, None], np.arange(trace.chains.shape[2])
    at = (step <= trace.run[:, :, None]) & (begin + step < trace.length[:, None, None])
    return at, trace.chains.astype(np.float64), np.broadcast_to(step < trace.run[:, :, None], at.shape)


class Learnt(NamedTuple):
    """What one text differs by; [N] each. No rule knows it in advance."""

    offset: np.ndarray  # logits
    lapse: np.ndarray  # share of drafts that are rejected however confident the drafter is


NOTHING_LEARNT = Learnt(np.zeros(1), np.zeros(1))  # broadcasts to any number of texts


def learnt_by_text(prior: Prior, trace: Trace) -> Learnt:
    """The offset and the lapse rate of every whole text, by expectation maximisation (Dempster et al. 1977)."""
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
    entropy, largest = (features[..., FEATURES.index(name)].astype(np.float64) for name in ("entropy", "raw_max_prob"))
    largest = np.clip(largest, 1e-4, 1 - 1e-4)
    sampled = log_odds(np.maximum(entropy, 0.0), temperature, prior, np)
    return np.where(temperature > 0, sampled, np.log(largest) - np.log1p(-largest))


def fit_prior(*traces: Trace) -> Prior:
    """The prior by maximum likelihood (logistic regression) of sampled traces; all traces have equal weight.

    The weight of the temperature needs several temperatures, otherwise it is that of the default prior. Raises
    ValueError: no traces, a greedy one, or traces in which nothing, or everything, was accepted.
    """
    if not traces or min(trace.temperature.min() for trace in traces) <= 0:
        raise ValueError("a prior needs at least one trace to learn from, and sampled ones only")
    parts = [positions(trace) for trace in traces]
    seen = Positions(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))
    weight = np.concatenate([np.full(len(part.accepted), 1 / len(part.accepted)) for part in parts]) / len(parts)
    if seen.accepted.all() or not seen.accepted.any():
        raise ValueError("a prior needs accepted and rejected tokens to learn from; these traces have one kind only")
    several = np.ptp(seen.log_temperature) > 0
    slope = 0.0 if several else PRIOR.log_temperature
    logit = seen.evidence + slope * seen.log_temperature
    before = np.stack([np.ones_like(logit), seen.log_temperature * several], axis=1)
    signs = np.where(seen.accepted, 1.0, -1.0)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = signs * (logit + before @ weights)
        value = float(weight @ np.logaddexp(0.0, -margin) + RIDGE * np.sum(weights**2))
        return value, -(weight * signs / (1.0 + np.exp(margin))) @ before + 2 * RIDGE * weights

    bounds = ((-np.inf, np.inf), (0.0, np.inf))
    bias, more = minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=bounds).x
    return Prior(float(bias), float(slope + more))
