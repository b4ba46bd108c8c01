"""Rules and their settings from a command line: `--rules adaedl my_rule.py --set threshold=0.1:0.9:9`."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.rules import RULES, Rule, rule
from experiments.lib.trace_tables import number
from specdec_jax.strategy import nearest
from specdec_jax.text.strategies import choose, name_in, names


def chosen_rules(wanted: Sequence[str], settings: Sequence[str]) -> dict[str, Rule]:
    """The rules by name, the hyperparameters of --set as their grids.

    Raises:
        ValueError: an unknown rule, a --set that cannot be read, or one that no rule takes.
    """
    parsed = dict(parse_values(entry) for entry in settings)
    rules, taken = {}, set()
    for name in dict.fromkeys(wanted):
        entry = _rule(name)
        grid = {key: values for key, values in parsed.items() if key in entry.policy.hyperparameters}
        taken |= grid.keys()
        rules[entry.name] = dataclasses.replace(entry, grid=grid)
        for key, values in grid.items():
            entry.policy.init(len(values), **{key: np.array(values)})
    for key in parsed:
        if key not in taken:
            raise ValueError(f"--set {key}: none of {', '.join(rules)} has a hyperparameter of that name")
    return rules


def _rule(words: str) -> Rule:
    """A rule of the list by its name, or one called in words: at_least(minimum=2), my_rule.py."""
    listed = {entry.name for entry in RULES}
    if words in listed:
        return rule(words)
    name = name_in(words)
    if not name.endswith(".py") and name not in names("policy"):
        files = {file for file in names("policy") if file.replace("_", "-") not in listed}
        raise ValueError(f"no rule {name!r}{nearest(name, listed | files)}")
    policy = choose("policy", words)
    return Rule(repr(policy) if policy.name in names("policy") else repr(policy).replace(name, Path(name).stem), policy)


def parse_values(text: str) -> tuple[str, list[Any]]:
    """'threshold=0.1:0.9:9' as a name and its values; whole numbers stay whole."""
    name, equals, right = text.partition("=")
    try:
        if not equals or not name.strip() or not right.strip():
            raise ValueError
        if ":" in right:
            low, high, count = right.split(":")
            values = np.linspace(float(low), float(high), int(count)).round(10).tolist()
        else:
            values = [_number(part) for part in right.split(",")]
    except ValueError:
        raise ValueError(f"--set reads NAME=VALUE, NAME=VALUE,VALUE or NAME=LOW:HIGH:COUNT, got {text!r}") from None
    if not values:
        raise ValueError(f"--set {text!r} has no values")
    return name.strip().replace("-", "_"), values


def _number(text: str) -> Any:
    """A whole number, a number, or what a factory may take."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()


def entry_settings(entry: Rule) -> list[tuple[str, dict[str, Any]]]:
    """Every setting of a rule with its label; without a grid the published one under the rule's name."""
    combinations = [dict(zip(entry.grid, values, strict=True)) for values in itertools.product(*entry.grid.values())]
    labels = [" ".join([entry.name, *(f"{key}={number(value)}" for key, value in c.items())]) for c in combinations]
    return [(label, dict(entry.policy.given) | c) for label, c in zip(labels, combinations, strict=True)]
