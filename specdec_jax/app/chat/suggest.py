"""Suggestions after an answer by its acceptance rate: above 0.8 longer drafts, below 0.5 shorter or adaptive ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec_jax.app.settings import Settings
from specdec_jax.text.strategies import choose, name_in

HIGH, LOW = 0.8, 0.5  # common thresholds of manual tuning
MOST = 16  # maximum suggested length; longer drafts are rarely accepted completely
STEP = 0.2  # step of lambda
LOW_THRESHOLD = 0.3  # the smallest lambda of the paper's grid (arXiv 2410.18351)


def same_drafts(before: Settings, now: Settings) -> bool:
    """Whether the two settings draft in the same way, so that statistics of one apply to the other."""
    without = {"max_new_tokens": 1, "seed": 0, "stop": (), "phases": False}
    return dataclasses.replace(before, **without) == dataclasses.replace(now, **without)


class Suggestion(NamedTuple):
    """`command` is the line that implements `advice`; `/gamma auto` runs it."""

    advice: str
    command: str


def suggest(settings: Settings, longest: int, figures: Mapping[str, Any]) -> Suggestion | None:
    """The suggestion after an answer with these statistics (`statistics.summarise`); None: no change, or no drafts.

    Args:
        longest: maximum draft length, also if it is not in the settings.

    For static policies the length is changed, for AdaEDL lambda, or `max_draft_length` if drafts reach it. Drafts of
    other policies are limited, or replaced by longer static ones.
    """
    rate, mean = figures["draft_acceptance_rate"], figures["mean_draft_length"]
    if rate is None:
        if not figures["drafter_passes"]:
            return None
        if name_in(settings.policy) == "adaedl" and _hyperparameter(settings, "threshold") > LOW_THRESHOLD:
            return Suggestion("a lower lambda, since nothing was drafted", f"/lambda {LOW_THRESHOLD}")
        return Suggestion("drafts of a fixed length, since nothing was drafted", "/gamma 3")
    if LOW <= rate <= HIGH:
        return None
    if name_in(settings.policy) == "static":
        return _static(settings, longest, rate > HIGH)
    if rate > HIGH and mean > 0.8 * longest:
        limit = min(2 * longest, MOST)
        return None if limit <= longest else Suggestion("longer drafts", f"/max-draft-length {limit}")
    if name_in(settings.policy) == "adaedl":
        return _adaedl(settings, rate > HIGH)
    if rate > HIGH:
        return Suggestion("longer drafts", f"/gamma {min(round(mean) + 2, MOST)}")
    return Suggestion("shorter drafts", f"/max-draft-length {max(round(mean) - 1, 1)}") if mean > 1.5 else None


def _static(settings: Settings, longest: int, high: bool) -> Suggestion | None:
    length = min(int(_hyperparameter(settings, "draft_length")), longest)
    if high:
        return Suggestion("longer drafts", f"/gamma {min(length + 2, MOST)}") if length < MOST else None
    if length > 2:
        return Suggestion("shorter drafts, or an adaptive policy (/policy adaedl)", f"/gamma {length // 2}")
    return Suggestion("an adaptive policy", "/policy adaedl")


def _adaedl(settings: Settings, high: bool) -> Suggestion | None:
    threshold = _hyperparameter(settings, "threshold")
    changed = round(max(threshold - STEP, 0.0) if high else min(threshold + STEP, 0.95), 2)
    if changed == threshold:
        return None
    return Suggestion("longer drafts" if high else "shorter drafts", f"/lambda {changed:g}")


def _hyperparameter(settings: Settings, name: str) -> float:
    return float(choose("policy", settings.policy).hyperparameters[name])
