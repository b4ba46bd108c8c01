"""Rules and their settings from a command line: `--rules adaedl my_rule.py --set threshold=0.1:0.9:9`."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.rules import RULES, Rule, rule
from experiments.lib.trace_runs import Variant, variant
from experiments.lib.trace_tables import number
from specdec_jax.strategy import nearest
from specdec_jax.text.strategies import choose, name_in, names


def variants_of(wanted: Sequence[str], settings: Sequence[str]) -> dict[str, Variant]:
    """The rules by name with their grids to choose from; those that --set tells of, a label and variant a setting.

    Raises:
        ValueError: an unknown rule, a --set that cannot be read, or one that no rule takes.
    """
    pairs = [parse_values(entry) for entry in settings]
    parsed, taken, found = dict(pairs), set(), {}
    if len(parsed) < len(pairs):
        raise ValueError(f"--set names a hyperparameter twice: {', '.join(name for name, _ in pairs)}")
    for words in dict.fromkeys(wanted):
        entry = _rule(words)
        if entry.name in found:
            raise ValueError(f"{words!r} is called {entry.name!r}, as another rule is: give it another name")
        grid = {key: values for key, values in parsed.items() if key in entry.policy.hyperparameters}
        taken |= grid.keys()
        for key, values in grid.items():
            entry.policy.init(len(values), **{key: np.array(values)})  # refuses what is out of range
        found |= _settings_of(entry, grid) if grid else {entry.name: variant(entry)}
    for key in parsed:
        if key not in taken:
            raise ValueError(f"--set {key}: none of {', '.join(wanted)} has a hyperparameter of that name")
    return found


def _settings_of(entry: Rule, grid: dict[str, list[Any]]) -> dict[str, Variant]:
    """Every combination of a grid, labelled, the other hyperparameters as published."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    labels = [" ".join([entry.name, *(f"{key}={number(value)}" for key, value in c.items())]) for c in combinations]
    published = dict(entry.policy.given)
    return {label: variant(entry, [published | chosen]) for label, chosen in zip(labels, combinations, strict=True)}


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
