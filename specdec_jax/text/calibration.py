"""Calibrations: hyperparameters of policies, verifiers and monitors that were fitted to a pair of models.

`python -m experiments.calibrate` writes a calibration: a JSON file that identifies its pair. It is rejected for other
pairs, by the size and scale of both models' weights, because thresholds in nats depend on the pair.

A file's `hyperparameters` are for strategies with default static options, its `variants` for other options. Those that
hold for all options, such as the survival policy's prior, a property of the pair, are listed in `any_static_options`.
"""

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.drafters.draft_models.intersection import SharedParams
from specdec_jax.drafters.draft_models.reduced_head import ReducedParams
from specdec_jax.loading.builtin import DRAFTERS, drafter_file
from specdec_jax.models.int8 import Int8, as_float32, is_matrix
from specdec_jax.strategy import Strategy
from specdec_jax.text.pair import Pair
from specdec_jax.text.strategies import build, find_factory, names
from specdec_jax.types import Params

FORMAT = 2
FILE = "calibration.json"
BUILT_IN = "built-in"
KINDS = ("greedy", "sampled")
MODEL = ("name", "parameters", "scale")  # entries of a model, and of a variant
VARIANT = ("kind", "name", "static_options", "hyperparameters")
ANY_STATIC_OPTIONS = {"policy": ["survival"], "verifier": ["easd"]}  # default, for the first files without this entry
SCALE_TOLERANCE = 0.02  # bfloat16 and float32 weights of a model differ by less, those of other models by more


class Calibration(NamedTuple):
    """The contents of a file; `hyperparameters` is by kind of decoding, then policy, verifier or monitor, then name."""

    source: str
    target: dict[str, Any]  # name and fingerprint
    drafter: dict[str, Any]
    hyperparameters: dict[str, dict[str, dict[str, dict[str, Any]]]]
    figures: dict[str, Any]
    variants: dict[str, list[dict[str, Any]]]  # by kind of decoding; each has the entries of VARIANT
    any_static_options: dict[str, list[str]]  # by kind: names whose hyperparameters hold for all options


def fingerprint(params: Params) -> dict[str, Any]:
    """The number of parameters, the mean absolute value of the largest array, and the size of any draft vocabulary."""
    reduced = isinstance(params, (ReducedParams, SharedParams))
    leaves = jax.tree.leaves(params.model if reduced else params, is_leaf=is_matrix)
    largest = max(leaves, key=lambda leaf: leaf.size)
    array = largest.values if isinstance(largest, Int8) else largest
    scale = _scales.get(id(array))
    if scale is None or scale[0]() is not array:
        scale = _scales[id(array)] = (weakref.ref(array), float(_mean_size(largest)))
    size = {"parameters": int(sum(leaf.size for leaf in leaves)), "scale": scale[1]}
    return size | ({"draft_vocabulary": params.tokens.size} if reduced else {})


_mean_size = jax.jit(lambda leaf: jnp.mean(jnp.abs(as_float32(leaf))))  # without a float32 copy of the array
_scales: dict[int, tuple[Any, float]] = {}  # mean sizes, which every request needs, by id, and a reference to check it


def read_calibration(path: str | Path) -> Calibration:
    """A calibration from its file. Raises FileNotFoundError, or ValueError: not a calibration, or another format."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no calibration at {path}; python -m experiments.calibrate writes one")
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
        if text.get("format", FORMAT) != FORMAT:
            raise ValueError(f"format {text['format']!r}, and this version reads {FORMAT}")
        fields = {name: text[name] for name in ("target", "drafter", "hyperparameters", "figures")}
        parts = {"target": MODEL, "drafter": MODEL, "hyperparameters": KINDS}
        wanted = [(fields[part], key, f"{part}.{key}") for part, keys in parts.items() for key in keys]
        variants = [variant for several in text.get("variants", {}).values() for variant in several]
        wanted += [(variant, key, f"{key} of a variant") for variant in variants for key in VARIANT]
        if missing := [name for part, key, name in wanted if key not in part]:
            raise KeyError(missing[0])
    except KeyError as error:
        raise ValueError(f"{path} is no calibration: {error.args[0]} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no calibration: {type(error).__name__}: {error}") from None
    options = text.get("any_static_options", ANY_STATIC_OPTIONS)
    return Calibration(str(path), **fields, variants=text.get("variants", {}), any_static_options=options)


def calibration_of(source: str | Path | Calibration, pair: Pair) -> Calibration:
    """The calibration, checked against the pair; "built-in" finds the one that is distributed with the drafter.

    Raises FileNotFoundError, ValueError: as `read_calibration`, or a calibration of another pair.
    """
    if str(source) == BUILT_IN:
        files = [drafter_file(name).parent / FILE for name in DRAFTERS]
        for calibration in (read_calibration(path) for path in files if path.is_file()):
            if not _difference(calibration, pair):
                return calibration
        raise ValueError("this pair has no built-in calibration; python -m experiments.calibrate makes one")
    calibration = source if isinstance(source, Calibration) else read_calibration(source)
    if difference := _difference(calibration, pair):
        raise ValueError(f"calibration {calibration.source} belongs to another pair: {difference}")
    return calibration


def check_calibration(source: str | Path | Calibration) -> None:
    """Raises as `read_calibration` for a file that is not a calibration; the pair is not checked."""
    if not isinstance(source, Calibration) and str(source) != BUILT_IN:
        read_calibration(source)


def same_pass(calibration: Calibration, params: Params) -> bool:
    """Whether measurements of the calibrated drafter's pass apply to these weights: same model and draft vocabulary."""
    size = fingerprint(params).get("draft_vocabulary")
    return not _unlike(calibration.drafter, params) and calibration.drafter.get("draft_vocabulary") == size


def hyperparameters_for(calibration: Calibration, kind: str, strategy: Any, temperature: Any) -> dict[str, Any]:
    """The calibrated hyperparameters of a policy, verifier or monitor; empty if it was not calibrated.

    They are those for its static options: other variants have only the hyperparameters that hold for all options. A
    wrapper gets those of the wrapped strategies, under its own names, and those for the whole. Hyperparameters that
    were set explicitly, also in a wrapped strategy, are kept. `temperature` 0 in all rows selects the greedy
    hyperparameters, any other the sampled ones.
    """
    learnt: dict[str, Any] = {}
    for role, inner in strategy.options.items():
        if isinstance(inner, Strategy):
            for key, value in hyperparameters_for(calibration, kind, inner, temperature).items():
                learnt[key if key in strategy.hyperparameters else f"{role}_{key}"] = value
    decoding, name, call = KINDS[int(np.max(temperature) > 0)], strategy.name, strategy.call
    if call is not None and name in names(kind) and call.factory is find_factory(kind, name):
        if name in calibration.any_static_options.get(kind, []) or strategy.bare == build(kind, name, {}):
            learnt |= calibration.hyperparameters[decoding].get(kind, {}).get(name, {})
        else:
            for variant in calibration.variants.get(decoding, []):
                same = (variant["kind"], variant["name"]) == (kind, name)
                if same and strategy.bare == build(kind, name, variant["static_options"]):
                    learnt |= variant["hyperparameters"]
                    break
    return {key: learnt[key] for key in learnt.keys() & (strategy.hyperparameters.keys() - strategy.fixed)}


def _difference(calibration: Calibration, pair: Pair) -> str:
    """A description of how the calibrated pair differs from this one; empty if it does not."""
    weights = pair.params.drafter
    several = pair.decoder.parts.drafter.model is None and isinstance(weights, tuple)
    drafters = [params for params in (weights if several else [weights]) if jax.tree.leaves(params)]
    if target := _unlike(calibration.target, pair.params.target):
        return f"its target is {target}"
    if not drafters:
        return "its drafter is a model, and this pair's has none"
    differences = [_unlike(calibration.drafter, params) for params in drafters]
    return "" if "" in differences else f"its drafter is {differences[0]}"


def _unlike(model: Mapping[str, Any], params: Params) -> str:
    here = fingerprint(params)
    same = here["parameters"] == model["parameters"]
    if same and abs(here["scale"] - model["scale"]) <= SCALE_TOLERANCE * model["scale"]:
        return ""
    why = f"{here['parameters']:,} parameters" if not same else "other weights of that size"
    return f"{model['name']} of {model['parameters']:,} parameters, this one has {why}"
