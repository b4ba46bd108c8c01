"""How well one number tells accepted tokens from rejected ones: thresholds, ranks, curves."""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import rankdata

PERCENTILES = (5, 10, 25, 50, 75, 90, 95, 99)


class Separation(NamedTuple):
    """The best single threshold: tokens at values above it count as rejected."""

    threshold: float
    youden: float  # share of rejected tokens above it, less that of accepted ones (Youden's J); 0 is chance
    area: float  # under the ROC curve: a rejected token's value exceeds an accepted one's; 0.5 is chance


class Curve(NamedTuple):
    """Acceptance by value, in bins of equally many tokens."""

    value: list[float]  # mean of each bin
    acceptance: list[float]
    count: list[int]


def separate(values: np.ndarray, accepted: np.ndarray) -> Separation:
    """The threshold of `values` [M] that best separates the rejected tokens.

    Raises:
        ValueError: all tokens are accepted, or none is.
    """
    _check_both(accepted)
    order = np.argsort(values, kind="stable")
    sorted_values, kept = values[order], accepted[order]
    below_accepted = np.cumsum(kept) / kept.sum()  # shares at or below each value
    below_rejected = np.cumsum(~kept) / (~kept).sum()
    gain = np.where(np.append(np.diff(sorted_values) > 0, True), below_accepted - below_rejected, -1.0)
    best = int(np.argmax(gain))
    ranks = rankdata(values)[~accepted]
    rejected, others = len(ranks), int(accepted.sum())
    area = (ranks.sum() - rejected * (rejected + 1) / 2) / (rejected * others)
    return Separation(float(sorted_values[best]), float(gain[best]), float(area))


def youden(values: np.ndarray, accepted: np.ndarray, threshold: float) -> float:
    """Youden's J of a threshold found elsewhere."""
    _check_both(accepted)
    above = values > threshold
    return float(above[~accepted].mean() - above[accepted].mean())


def percentiles(values: np.ndarray) -> dict[str, float]:
    """The customary ones, by their number."""
    found = np.percentile(values, PERCENTILES)
    return {str(name): float(value) for name, value in zip(PERCENTILES, found, strict=True)}


def acceptance_curve(values: np.ndarray, accepted: np.ndarray, bins: int = 12) -> Curve:
    """Acceptance in bins of equally many tokens."""
    parts = np.array_split(np.argsort(values, kind="stable"), min(bins, len(values)))
    return Curve(
        [float(values[part].mean()) for part in parts],
        [float(accepted[part].mean()) for part in parts],
        [len(part) for part in parts],
    )


def fitted_entropy_factor(entropy: np.ndarray, accepted: np.ndarray) -> float:
    """The factor with which AdaEDL's 1 - sqrt(factor * H), cut at 0, is nearest to what was accepted, by squares."""

    def loss(log_factor: float) -> float:
        bound = np.maximum(0.0, 1.0 - np.sqrt(np.exp(log_factor) * entropy))
        return float(np.mean((accepted - bound) ** 2))

    found: Any = minimize_scalar(loss, bounds=(np.log(1e-3), np.log(5.0)), method="bounded")
    return float(np.exp(found.x))


def _check_both(accepted: np.ndarray) -> None:
    if accepted.all() or not accepted.any():
        raise ValueError("a threshold needs accepted and rejected tokens; these are of one kind only")
