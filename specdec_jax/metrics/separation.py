"""How well one number separates accepted tokens from rejected ones: thresholds, ranks, curves."""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import rankdata

from specdec_jax.metrics.intervals import RESAMPLES, Interval

PERCENTILES = (5, 10, 25, 50, 75, 90, 95, 99)
FACTORS, GRID = (1e-3, 5.0), 400  # range of entropy factors, and grid size for intervals (steps of 2 %)


class Separation(NamedTuple):
    """The best single threshold: tokens at values above it count as rejected."""

    threshold: float
    youden: float  # share of rejected tokens above it minus that of accepted ones (Youden's J); 0: random
    area: float  # area under the ROC curve, P(a rejected token's value exceeds an accepted one's); 0.5: random


class Curve(NamedTuple):
    """Acceptance rate by value, in bins of equally many tokens."""

    value: list[float]  # mean of each bin
    acceptance: list[float]
    count: list[int]


def separate(values: np.ndarray, accepted: np.ndarray) -> Separation:
    """The threshold of `values` [M] that best separates the rejected tokens.

    Raises ValueError: all tokens are accepted, or none is.
    """
    if accepted.all() or not accepted.any():
        raise ValueError("a threshold needs accepted and rejected tokens; these are of one kind only")
    order = np.argsort(values, kind="stable")
    sorted_values, sorted_accepted = values[order], accepted[order]
    below_accepted = np.cumsum(sorted_accepted) / sorted_accepted.sum()  # cumulative shares, by value
    below_rejected = np.cumsum(~sorted_accepted) / (~sorted_accepted).sum()
    gain = np.where(np.append(np.diff(sorted_values) > 0, True), below_accepted - below_rejected, -1.0)
    best = int(np.argmax(gain))
    ranks = rankdata(values)[~accepted]
    rejected, others = len(ranks), int(accepted.sum())
    area = (ranks.sum() - rejected * (rejected + 1) / 2) / (rejected * others)
    return Separation(float(sorted_values[best]), float(gain[best]), float(area))


def percentiles(values: np.ndarray) -> dict[str, float]:
    """The percentiles PERCENTILES, by number."""
    return dict(zip(map(str, PERCENTILES), np.percentile(values, PERCENTILES).tolist(), strict=True))


def acceptance_curve(values: np.ndarray, accepted: np.ndarray, bins: int = 12) -> Curve:
    """Acceptance rate in bins of equally many tokens."""
    parts = np.array_split(np.argsort(values, kind="stable"), min(bins, len(values)))
    return Curve(
        [float(values[part].mean()) for part in parts],
        [float(accepted[part].mean()) for part in parts],
        [len(part) for part in parts],
    )


def fitted_entropy_factor(entropy: np.ndarray, accepted: np.ndarray) -> float:
    """The factor with which AdaEDL's bound 1 - sqrt(factor * H), cut at 0, fits acceptance by least squares."""

    def loss(log_factor: float) -> float:
        return float(np.mean(_squares(np.exp(log_factor), entropy, accepted)))

    minimum: Any = minimize_scalar(loss, bounds=tuple(np.log(FACTORS)), method="bounded")
    return float(np.exp(minimum.x))


def entropy_factor_interval(entropy: np.ndarray, accepted: np.ndarray, texts: np.ndarray) -> Interval:
    """`fitted_entropy_factor` with its 95 % bootstrap interval; texts [M]: index of each token's text.

    Texts are resampled by weights, which reduces to a matrix product over a grid of factors.
    """
    estimate, count = fitted_entropy_factor(entropy, accepted), int(texts.max()) + 1
    if count < 2:
        return Interval(estimate, float("nan"), float("nan"))
    grid = np.geomspace(*FACTORS, GRID)
    losses = np.stack([np.bincount(texts, _squares(factor, entropy, accepted), count) for factor in grid], axis=1)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    low, high = np.quantile(grid[np.argmin(drawn @ losses, axis=1)], (0.025, 0.975))
    return Interval(estimate, float(low), float(high))


def _squares(factor: float, entropy: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Squared error of AdaEDL's bound per token."""
    return (accepted - np.maximum(0.0, 1.0 - np.sqrt(factor * entropy))) ** 2
