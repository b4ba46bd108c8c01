"""What a calibration learns from a trace: figures to look at, phases, and the best setting of every rule."""

from typing import Any

import numpy as np

from experiments.lib.rules import LENGTHS, RULES, Rule
from experiments.lib.trace_runs import replay_rule
from specdec_jax import stopping
from specdec_jax.costs.choices import weighs_costs
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.metrics.separation import acceptance_curve, fitted_entropy_factor, percentiles, separate
from specdec_jax.replay.phase_path import running_entropy
from specdec_jax.replay.trace import FEATURES, Trace
from specdec_jax.text.strategies import build

HYSTERESIS = 0.25  # in standard deviations of the running entropy, on either side of the threshold
UNCERTAIN = 90  # percentile of both entropies above which EASD is uncertain
PHASE = {"minimum_length": 8, "decay": 0.9}
CAPS = {"routine_length": LENGTHS, "reasoning_length": LENGTHS}


def positions_of(trace: Trace, raw_entropy: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(drafter entropy, target entropy, accepted, running entropy), [M] each: every position but texts' first ones.

    The first two are those of the distributions as sampled; the last is raw, as the monitor reads it, unless
    `raw_entropy` is False.
    """
    running = running_entropy(trace, PHASE["decay"], raw_entropy)
    there = np.isfinite(running)
    drafter = trace.path[..., FEATURES.index("entropy")]
    return drafter[there], trace.target_entropy[there], trace.accepted[there], running[there]


def figures_of(trace: Trace) -> dict[str, Any]:
    """Diagnostics: percentiles, separation, the map from entropy to acceptance."""
    drafter, target, accepted, running = positions_of(trace)
    return {
        "acceptance": float(accepted.mean()),
        "drafter_entropy": percentiles(drafter),
        "target_entropy": percentiles(target),
        "running_entropy": percentiles(running),
        "rejection": separate(drafter, accepted)._asdict(),
        "rejection_by_running_entropy": separate(running, accepted)._asdict(),
        "entropy_factor": fitted_entropy_factor(drafter, accepted),
        "acceptance_by_entropy": acceptance_curve(drafter, accepted)._asdict(),
        "acceptance_by_running_entropy": acceptance_curve(running, accepted)._asdict(),
    }


def phase_hyperparameters(trace: Trace, raw_entropy: bool = True) -> dict[str, float]:
    """enter and leave around the running entropy that best separates rejected tokens, for the monitor `phases`."""
    _, _, accepted, running = positions_of(trace, raw_entropy)
    middle, band = separate(running, accepted).threshold, HYSTERESIS * float(running.std())
    return {"enter": middle + band, "leave": max(middle - band, 0.0), **PHASE}


def hyperparameters_of(kind: str, trace: Trace, lenience: float, costs: CostModel, longest: int) -> dict[str, Any]:
    """Hyperparameters of `init` by policy, verifier and monitor, as they are built by default."""
    drafter, target, _, _ = positions_of(trace)
    phases = phase_hyperparameters(trace)
    policies: dict[str, Any] = {
        entry.policy.name: best_setting(trace, entry, costs, longest, phases)
        for entry in _searched()
        if _by_default(entry)
    }
    policies["survival"] = {kind: list(fit_prior(trace)), "drafter_cost": costs.ratio}
    uncertain = {"drafter_entropy": drafter, "target_entropy": target}
    return {
        "policy": policies,
        "verifier": {
            "lenience": {"lenience": lenience},
            "by_phase": {"lenience": lenience},
            "easd": {name: float(np.percentile(values, UNCERTAIN)) for name, values in uncertain.items()},
        },
        "monitor": {"phases": phases},
    }


def variants_of(
    kind: str, trace: Trace, hyperparameters: dict[str, Any], costs: CostModel, longest: int
) -> list[dict[str, Any]]:
    """The same for other static options, after the `hyperparameters` of the default ones."""
    phases, variants = hyperparameters["monitor"]["phases"], []

    def add(kind: str, name: str, static_options: dict[str, Any], values: dict[str, Any]) -> None:
        entry = {"kind": kind, "name": name, "static_options": static_options, "hyperparameters": values}
        variants.append(entry)

    for entry in _searched():
        if not _by_default(entry):
            defaults = build("policy", entry.policy.name, {}).options
            others = {key: value for key, value in entry.policy.options.items() if value != defaults[key]}
            add("policy", entry.policy.name, others, best_setting(trace, entry, costs, longest, phases))
    learnt = stopping.survival(**{kind: hyperparameters["policy"]["survival"][kind]})
    capped = Rule("survival-by-phase", stopping.phase_length(policy=learnt), CAPS)
    best = best_setting(trace, capped, costs, longest, phases)
    caps = {name: value for name, value in best.items() if name in CAPS}
    add("policy", "phase_length", {"policy": "survival"}, caps)
    add("monitor", "phases", {"raw_entropy": False}, phase_hyperparameters(trace, raw_entropy=False))
    return variants


def _by_default(entry: Rule) -> bool:
    return entry.policy.bare == build("policy", entry.policy.name, {})


def _searched() -> list[Rule]:
    """The rules whose setting is searched for; those that weigh costs are given them when they run."""
    return [entry for entry in RULES if entry.grid and not weighs_costs(entry.policy)]


def best_setting(trace: Trace, entry: Rule, costs: CostModel, longest: int, phases: dict[str, float]) -> dict[str, Any]:
    """The setting that is fastest in replays over all texts."""
    settings = entry.settings()
    seconds = replay_rule(trace, entry, costs, longest, settings, phases).seconds(costs).sum(axis=1)
    return settings[int(np.argmin(seconds))]
