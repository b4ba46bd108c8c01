"""What was learnt once for a pair of models, as numbers for policies, verifiers and monitors.

`python -m experiments.calibrate` writes a calibration: one JSON file that names the pair it belongs to. A file of
another pair is refused, by the size and scale of both models' weights: thresholds in nats mean nothing elsewhere.
"""

import inspect
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.loading.builtin import DRAFTERS, drafter_file
from specdec_jax.pairs import Pair
from specdec_jax.types import Params

FORMAT = 1
FILE = "calibration.json"
BUILT_IN = "built-in"
KINDS = ("greedy", "sampled")
SCALE_TOLERANCE = 0.02  # bfloat16 and float32 of one model differ by less, other models by more


class Calibration(NamedTuple):
    """A calibration as read; `numbers` is by kind of decoding, then policy, verifier or monitor, then name."""

    source: str
    target: dict[str, Any]  # name and fingerprint
    drafter: dict[str, Any]
    numbers: dict[str, dict[str, dict[str, dict[str, Any]]]]
    figures: dict[str, Any]


def fingerprint(params: Params) -> dict[str, Any]:
    """The number of parameters and the mean size of those in the largest array."""
    leaves = jax.tree.leaves(params)
    largest = max(leaves, key=lambda leaf: leaf.size)
    return {"parameters": int(sum(leaf.size for leaf in leaves)), "scale": _scale(largest)}


_scales: dict[int, tuple[Any, float]] = {}  # by the array's id, with a weak reference that says whether it is still it


def _scale(array: Any) -> float:
    """Mean size, once an array: it is asked for with every request."""
    known = _scales.get(id(array))
    if known is None or known[0]() is not array:
        value = float(jnp.mean(jnp.abs(jnp.asarray(array).astype(jnp.float32))))
        known = _scales[id(array)] = (weakref.ref(array), value)
    return known[1]


def read_calibration(path: str | Path) -> Calibration:
    """A calibration from its file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no calibration, or of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no calibration at {path}; python -m experiments.calibrate writes one")
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(text, dict):
            raise ValueError(f"a JSON object is wanted, this is a {type(text).__name__}")
        if text.get("format", FORMAT) != FORMAT:
            raise ValueError(f"format {text['format']!r}, and this version reads {FORMAT}")
        known = {name: text[name] for name in ("target", "drafter", "numbers", "figures")}
        wanted = [(model, key) for model in ("target", "drafter") for key in ("name", "parameters", "scale")]
        missing = [f"{part}.{key}" for part, key in [*wanted, *(("numbers", kind) for kind in KINDS)]
                   if key not in known[part]]  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no calibration: {type(error).__name__}: {error}") from None
    if missing:
        raise ValueError(f"{path} is no calibration: {missing[0]} is missing")
    return Calibration(str(path), **known)


def calibration_of(source: str | Path | Calibration, pair: Pair) -> Calibration:
    """The calibration asked for, checked against the pair; "built-in" finds the one that came with the drafter.

    Raises:
        FileNotFoundError, ValueError: as `read_calibration`, or it belongs to another pair.
    """
    if isinstance(source, Calibration):
        return _checked(source, pair)
    if str(source) != BUILT_IN:
        return _checked(read_calibration(source), pair)
    files = [drafter_file(name).parent / FILE for name in DRAFTERS]
    for found in (read_calibration(path) for path in files if path.is_file()):
        if not _difference(found, pair):
            return found
    raise ValueError("this pair has no built-in calibration; python -m experiments.calibrate makes one")


def check_calibration(source: str | Path | Calibration) -> None:
    """Raises as `read_calibration` for a file that is none; whose it is does not matter."""
    if not isinstance(source, Calibration) and str(source) != BUILT_IN:
        read_calibration(source)


def numbers_for(calibration: Calibration, kind: str, strategy: Any, temperature: Any) -> dict[str, Any]:
    """The learnt numbers of a policy, verifier or monitor; none if it was not calibrated.

    The strategy is known by the file its `init` stands in: one that wraps another and leaves its `init` alone gets the
    other's, one with an `init` of its own its own file's, and a variant by structure those of the default structure.
    Numbers that its `init` does not take are left out. `temperature` 0 in all rows takes the greedy numbers, any other
    the sampled ones.
    """
    decoding = KINDS[int(float(jnp.max(jnp.asarray(temperature))) > 0)]
    name = strategy.init.__module__.rpartition(".")[2]
    taken = inspect.signature(strategy.init).parameters
    learnt = calibration.numbers[decoding].get(kind, {}).get(name, {})
    return {key: value for key, value in learnt.items() if key in taken}


def _checked(calibration: Calibration, pair: Pair) -> Calibration:
    difference = _difference(calibration, pair)
    if difference:
        raise ValueError(f"calibration {calibration.source} belongs to another pair: {difference}")
    return calibration


def _difference(calibration: Calibration, pair: Pair) -> str:
    """What tells the calibrated pair from this one; empty if nothing does."""
    own = pair.params.drafter
    several = pair.decoder.parts.drafter.model is None and isinstance(own, tuple)
    drafters = [params for params in (own if several else [own]) if jax.tree.leaves(params)]
    target = _unlike(calibration.target, pair.params.target)
    if target:
        return f"its target is {target}"
    if not drafters:
        return "its drafter is a model, and this pair's has none"
    found = [_unlike(calibration.drafter, params) for params in drafters]
    return "" if "" in found else f"its drafter is {found[0]}"


def _unlike(model: Mapping[str, Any], params: Params) -> str:
    here = fingerprint(params)
    same = here["parameters"] == model["parameters"]
    if same and abs(here["scale"] - model["scale"]) <= SCALE_TOLERANCE * model["scale"]:
        return ""
    why = f"{here['parameters']:,} parameters" if not same else "other weights of that size"
    return f"{model['name']} of {model['parameters']:,} parameters, this one has {why}"
