"""Spread over prompts: bootstrap intervals, in numpy.

Prompts are resampled: rounds and tokens of one prompt are dependent, and an interval over them would be too narrow.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Values = Sequence[float] | np.ndarray  # one per prompt
RESAMPLES, LEVEL = 4999, 0.95  # resamples, and confidence level of all intervals


class Interval(NamedTuple):
    """An estimate and its confidence bounds, which are NaN for a single prompt."""

    estimate: float
    low: float
    high: float


def mean_interval(values: Values) -> Interval:
    """Mean and its bootstrap interval of one value per prompt. Raises ValueError: no values, or one not finite."""
    return bootstrap((_checked("values", values),), lambda x, axis=-1: np.mean(x, axis=axis))


def ratio_of_totals(numerator: Values, denominator: Values) -> Interval:
    """sum(numerator) / sum(denominator) with a bootstrap interval; entry i of both belongs to prompt i.

    Raises ValueError: as `mean_interval`, different lengths, or a denominator that is not positive.
    """
    return bootstrap(_paired(numerator, denominator), lambda x, y, axis=-1: np.sum(x, axis=axis) / np.sum(y, axis=axis))


def total_speedup(tokens: Values, seconds: Values, baseline_tokens: Values, baseline_seconds: Values) -> Interval:
    """Ratio of total tokens/s to the baseline's; entry i of all four belongs to prompt i. Raises as above."""
    tokens, seconds = _paired(tokens, seconds)
    baseline_tokens, baseline_seconds = _paired(baseline_tokens, baseline_seconds)
    if len(tokens) != len(baseline_tokens):
        raise ValueError(f"prompts must pair up: {len(tokens)} against {len(baseline_tokens)} of the baseline")

    def ratio(n: np.ndarray, s: np.ndarray, bn: np.ndarray, bs: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.sum(n, axis=axis) * np.sum(bs, axis=axis) / (np.sum(s, axis=axis) * np.sum(bn, axis=axis))

    return bootstrap((tokens, seconds, baseline_tokens, baseline_seconds), ratio)


def bootstrap(samples: tuple[np.ndarray, ...], statistic: Callable[..., Any], *, paired: bool = True) -> Interval:
    """Percentile bootstrap over prompts; BCa is undefined for resamples without variation, frequent here due to ties.

    `statistic(*samples, axis)` works along an axis. Entry i of every sample belongs to prompt i; unless `paired`,
    samples are groups of prompts that are resampled separately.
    """
    estimate = float(statistic(*samples))
    if min(map(len, samples)) < 2:
        return Interval(estimate, float("nan"), float("nan"))
    rng, groups = np.random.default_rng(0), samples[:1] if paired else samples
    drawn = [rng.integers(0, len(group), (RESAMPLES, len(group))) for group in groups]
    resampled = [sample[rows] for sample, rows in zip(samples, itertools.cycle(drawn), strict=False)]
    low, high = np.percentile(statistic(*resampled, axis=-1), [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Interval(estimate, float(low), float(high))


def _checked(name: str, values: Values) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) == 0 or not np.all(np.isfinite(numbers)):
        raise ValueError(f"{name} must be one finite number a prompt and at least one, got {values!r}")
    return numbers


def _paired(numerator: Values, denominator: Values) -> tuple[np.ndarray, np.ndarray]:
    top, bottom = _checked("numerator", numerator), _checked("denominator", denominator)
    if len(top) != len(bottom):
        raise ValueError(f"prompts must pair up: {len(top)} numerators, {len(bottom)} denominators")
    if np.any(bottom <= 0):
        raise ValueError(f"denominators must be positive, got {bottom.min():g}")
    return top, bottom
