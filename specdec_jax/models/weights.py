"""From named tensors, as checkpoints hold them, to a parameter tree and back, by a table a family writes down.

A name the table lacks, one that is missing or comes twice, and a wrong shape are errors: a checkpoint that is nearly
right decodes to fluent nonsense.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SHOWN = 5  # names an error lists of each kind


class Parameter(NamedTuple):
    """Where one checkpoint tensor lives in the parameter tree."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # of the checkpoint's tensor
    part: tuple[int, int] | None = None  # rows [start, stop) of a fused leaf; None: the whole leaf


Table = Mapping[str, Parameter]
Ignored = Mapping[str, tuple[int, ...] | None]
Named = Mapping[str, Any] | Iterable[tuple[str, Any]]  # name -> host or device array


def leaf_shapes(table: Table) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The shape of every leaf of the parameter tree; fused leaves are as long as their parts together."""
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
    for parameter in table.values():
        rows = parameter.shape[0] if parameter.part is None else parameter.part[1]
        known = shapes.get(parameter.path, (0,))[0]
        shapes[parameter.path] = (max(rows, known), *parameter.shape[1:])
    return shapes


def params_from_named(table: Table, named: Named, dtype: Any, *, ignored: Ignored = MappingProxyType({})) -> Any:
    """The parameter tree, every leaf in `dtype` on the default device.

    `named` may be a mapping or an iterable of (name, array); an iterable is read once, one tensor at a time, so a
    loader can dequantise lazily. `ignored` maps names that may come and are dropped to the shape they must have
    (None: any). Raises ValueError naming the unknown, missing, duplicate, wrongly shaped and non-floating tensors.
    """
    shapes, unfilled = leaf_shapes(table), {path: 0 for path in leaf_shapes(table)}
    for parameter in table.values():
        unfilled[parameter.path] += 1
    host: dict[tuple[str, ...], np.ndarray] = {}
    leaves: dict[tuple[str, ...], jax.Array] = {}
    seen: set[str] = set()
    wrong: dict[str, list[str]] = {"unknown": [], "missing": [], "duplicate": [], "wrong shape": [], "not floating": []}
    for name, array in _pairs(named):
        kind, note = _fault(name, array, table, ignored, seen)
        seen.add(name)
        if kind:
            wrong[kind].append(note)
        if kind or name in ignored:
            continue
        path, _, part = table[name]
        if path not in host:
            host[path] = np.empty(shapes[path], dtype)
        host[path][slice(None) if part is None else slice(*part)] = np.asarray(array).astype(dtype)
        unfilled[path] -= 1
        if not unfilled[path]:
            leaves[path] = jnp.asarray(host.pop(path))
    wrong["missing"] = [name for name in table if name not in seen]
    if any(wrong.values()):
        faults = [_listed(kind, names) for kind, names in wrong.items() if names]
        raise ValueError(f"weights do not fit the model: {'; '.join(faults)}")
    return _tree(leaves)


def named_from_params(table: Table, params: Any) -> dict[str, np.ndarray]:
    """Every tensor of the table as a host array in the parameters' own dtype, fused leaves cut into their parts."""
    named = {}
    for name, (path, shape, part) in table.items():
        leaf = params
        for key in path:
            leaf = leaf[key]
        array = np.asarray(leaf)[slice(None) if part is None else slice(*part)]
        if array.shape != shape:
            raise ValueError(f"parameter {'/'.join(path)}, {name}, has shape {array.shape} instead of {shape}")
        named[name] = array
    return named


def _pairs(named: Any) -> Iterable[tuple[str, Any]]:
    return named.items() if isinstance(named, Mapping) else named


def _fault(name, array, table: Table, ignored, seen) -> tuple[str, str]:
    """(kind of the fault or "", how to name it)."""
    if name in seen:
        return "duplicate", name
    if name not in table and name not in ignored:
        return "unknown", name
    shape = table[name].shape if name in table else ignored[name]
    if shape is not None and tuple(array.shape) != shape:
        return "wrong shape", f"{name} {tuple(array.shape)} instead of {shape}"
    if name in table and not jnp.issubdtype(array.dtype, jnp.floating):
        return "not floating", f"{name} {array.dtype}"
    return "", ""


def _listed(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{kind}: {', '.join(names[:SHOWN])}{more}"


def _tree(leaves: Mapping[tuple[str, ...], jax.Array]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
