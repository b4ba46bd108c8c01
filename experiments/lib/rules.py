"""Every stopping rule at its default setting, and the grid its best setting is looked for on.

One list for all experiments that compare rules. A default is the value of the rule's source, or ours where that leaves
it open. Rules that weigh time get the costs of the machine they are replayed for. AdaEDL, whose paper reports its best
lambda, has three readings: `adaedl`, as printed, which checks before the first token too; `adaedl-first`, which drafts
the first token in any case; `adaedl-keep`, ours, which drafts the token of the distribution that fails the check.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax import stopping
from specdec_jax.contrib.stopping.dspark import dspark
from specdec_jax.contrib.stopping.hazard_cost import hazard_cost
from specdec_jax.contrib.trees import comb, survival_tree
from specdec_jax.costs.choices import costs_for
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.strategy import nearest
from specdec_jax.text.strategies import choose, name_in, names
from specdec_jax.types import StoppingPolicy

THRESHOLDS = tuple(float(value) for value in np.round(np.linspace(0.0, 0.95, 20), 2))
LENGTHS = (0, 1, 2, 3, 4, 5, 7)
STATIC = "static"  # its best length is looked for like any other setting
ADAEDL = ("adaedl", "adaedl-first", "adaedl-keep")  # lambda chosen, first token always drafted, checked token kept
COMPARED = (STATIC, *ADAEDL, "max-confidence-keep", "cumulative-confidence", "survival")
SHORT_NAMES = {STATIC: "best static", "adaedl-first": "adaedl first", "adaedl-keep": "adaedl keep"}  # a heading wraps
SHORT_NAMES |= {"max-confidence-keep": "max conf. keep", "cumulative-confidence": "cumul. conf."}


@dataclass(frozen=True)
class Rule:
    """A stopping rule as experiments compare it."""

    name: str
    policy: StoppingPolicy  # At its default setting.
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of each hyperparameter to try; all combinations are tried."""

    def settings(self) -> list[dict[str, Any]]:
        """The default setting first, then the grid's."""
        default = dict(self.policy.given)
        combinations = itertools.product(*self.grid.values())
        tried = [default | dict(zip(self.grid, values, strict=True)) for values in combinations]
        return [default] + (tried if self.grid else [])

    def hyperparameters(self, settings: Sequence[Mapping[str, Any]], costs: CostModel, longest: int) -> dict[str, Any]:
        """Several settings as arrays [S] for `replay`; a hyperparameter that a setting leaves out has its default."""
        names = sorted({name for setting in settings for name in setting})
        defaults = self.policy.hyperparameters
        columns = {name: np.array([setting.get(name, defaults[name]) for setting in settings]) for name in names}
        decided = costs_for(self.policy, costs, longest)
        # a vector has a row for every setting, or a replay takes its entries for settings
        machines = {name: np.asarray(value)[None] if np.ndim(value) else value for name, value in decided.items()}
        return machines | columns  # a setting overrules the machine's


RULES: tuple[Rule, ...] = (
    Rule("static-3", stopping.static(draft_length=3)),
    Rule("static-7", stopping.static(draft_length=7)),
    Rule("static-16", stopping.static(draft_length=16)),
    Rule("static", stopping.static(draft_length=7), {"draft_length": tuple(range(17))}),
    Rule("adaedl", stopping.adaedl(), {"threshold": THRESHOLDS}),
    Rule("adaedl-fixed", stopping.adaedl(step=0.0), {"threshold": THRESHOLDS}),
    Rule("adaedl-first", stopping.at_least(1, stopping.adaedl()), {"threshold": THRESHOLDS}),
    Rule("adaedl-keep", stopping.adaedl(keep_checked_token=True), {"threshold": THRESHOLDS}),
    Rule("max-confidence", stopping.max_confidence(), {"threshold": THRESHOLDS}),
    Rule("max-confidence-fixed", stopping.max_confidence(adaptive=False), {"threshold": THRESHOLDS}),
    Rule("max-confidence-keep", stopping.max_confidence(keep_checked_token=True), {"threshold": THRESHOLDS}),
    Rule("draft-and-verify", stopping.draft_and_verify(), {"threshold": THRESHOLDS}),
    Rule("svip", stopping.svip(), {"threshold": THRESHOLDS}),
    Rule("hf-heuristic", stopping.hf_heuristic(), {"draft_length": (1, 2, 3, 5, 7)}),
    Rule("hf-confidence", stopping.hf_confidence(), {"threshold": THRESHOLDS}),
    Rule("gamma-tuning", stopping.gamma_tuning(), {"high": (0.6, 0.7, 0.8, 0.9), "low": (0.3, 0.4, 0.5, 0.6)}),
    Rule("accepted-length-ema", stopping.accepted_length_ema(), {"weight": (0.1, 0.2, 0.4), "interval": (1, 2, 5)}),
    Rule("goodput", stopping.goodput(), {"decay": (0.9, 0.95, 0.99)}),
    Rule("bandit", stopping.bandit(), {"exploration": (0.03, 0.1, 0.3)}),
    Rule("policy-bandit", stopping.policy_bandit()),
    Rule("policy-bandit-thompson", stopping.policy_bandit(method="thompson")),
    Rule("cumulative-confidence", stopping.cumulative_confidence(), {"threshold": THRESHOLDS}),
    Rule("survival", stopping.survival()),
    Rule("dspark", dspark(), {"exponent": (0.5, 0.7, 1.0, 1.5)}),
    Rule("hazard-cost", hazard_cost(), {"least": (0, 1, 2), "weight": (0.05, 0.2)}),
    Rule("comb", comb()),
    Rule("survival-siblings", survival_tree(siblings=3)),
    Rule("adaptive-gamma", stopping.adaptive_gamma(), {"threshold": THRESHOLDS}),
    Rule("phase-length", stopping.phase_length(), {"routine_length": LENGTHS, "reasoning_length": LENGTHS}),
)


def rule(words: str) -> Rule:
    """A rule of the list by its name, or one called in words: at_least(minimum=2), my_rule.py. Raises ValueError naming
    the nearest."""
    listed = {entry.name: entry for entry in RULES}
    if words in listed:
        return listed[words]
    name = name_in(words)
    if not name.endswith(".py") and name not in names("policy"):
        files = {file for file in names("policy") if file.replace("_", "-") not in listed}
        raise ValueError(f"no rule {name!r}{nearest(name, listed.keys() | files)}")
    policy = choose("policy", words)
    return Rule(repr(policy) if policy.name in names("policy") else repr(policy).replace(name, Path(name).stem), policy)
