"""From named tensors, as checkpoints hold them, to a parameter tree and back, by a table a family writes down.

A name the table lacks, one that is missing or comes twice, and a wrong shape are errors: a checkpoint that is nearly
right decodes to fluent nonsense.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

SHOWN = 5  # names an error lists of each kind


class Parameter(NamedTuple):
    """Where one checkpoint tensor lives in the parameter tree."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # of the checkpoint's tensor
    leaf: tuple[int, ...] | None = None  # the shape of the leaf that it is a part of; None: it is the leaf
    at: tuple[slice | int, ...] = ()  # which part: the tensor has its numbers in that order
    split: int | None = None  # the leaf's axis that devices share (`sharding.MODEL`): none of `at`'s indices, and the
    # tensor's first or last; None: each device has all

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Of the leaf."""
        return self.shape if self.leaf is None else self.leaf


class Tensor(Protocol):
    """A checkpoint's tensor: an array, or one that is read from a file as its parts are asked for."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Table = Mapping[str, Parameter]
Ignored = Mapping[str, tuple[int, ...] | None]
Named = Mapping[str, Any] | Iterable[tuple[str, Any]]  # name -> Tensor
Place = Callable[[Sequence[int], int | None], jax.sharding.Sharding]  # by a leaf's shape and its shared axis


def params_from_named(
    table: Table, named: Named, dtype: Any, *, ignored: Ignored = MappingProxyType({}), place: Place | None = None
) -> Any:
    """The parameter tree, every leaf in `dtype`, on the default device or where `place` says.

    `named` may be a mapping or an iterable of (name, tensor); an iterable is read once, and a leaf is made when the
    last of its tensors has come. Of a tensor that is shared out, the parts that this process's devices have are read
    and no others. `ignored` maps names that may come and are dropped to the shape they must have (None: any). Raises
    ValueError naming the unknown, missing, duplicate, wrongly shaped and non-floating tensors.
    """
    waiting = Counter(parameter.path for parameter in table.values())
    parts: dict[tuple[str, ...], list[tuple[Parameter, Tensor]]] = defaultdict(list)
    leaves: dict[tuple[str, ...], jax.Array] = {}
    seen: set[str] = set()
    wrong: dict[str, list[str]] = {"unknown": [], "missing": [], "duplicate": [], "wrong shape": [], "not floating": []}
    for name, tensor in _pairs(named):
        kind, note = _fault(name, tensor, table, ignored, seen)
        seen.add(name)
        if kind:
            wrong[kind].append(note)
        if kind or name in ignored:
            continue
        path = table[name].path
        parts[path].append((table[name], tensor))
        waiting[path] -= 1
        if not waiting[path]:
            leaves[path] = _leaf(parts.pop(path), dtype, place)
    wrong["missing"] = [name for name in table if name not in seen]
    if any(wrong.values()):
        faults = [_listed(kind, names) for kind, names in wrong.items() if names]
        raise ValueError(f"weights do not fit the model: {'; '.join(faults)}")
    return _tree(leaves)


def named_from_params(table: Table, params: Any) -> dict[str, np.ndarray]:
    """Every tensor of the table as a host array in the parameters' own dtype, fused leaves cut into their parts."""
    named = {}
    for name, parameter in table.items():
        leaf = params
        for key in parameter.path:
            leaf = leaf[key]
        if np.shape(leaf) != parameter.leaf_shape:
            wrong = f"has shape {np.shape(leaf)} instead of {parameter.leaf_shape}"
            raise ValueError(f"parameter {'/'.join(parameter.path)}, {name}, {wrong}")
        named[name] = np.asarray(leaf)[parameter.at].reshape(parameter.shape)
    return named


def _leaf(parts: list[tuple[Parameter, Tensor]], dtype: Any, place: Place | None) -> jax.Array:
    """The leaf that these tensors make up."""
    shape, split = parts[0][0].leaf_shape, parts[0][0].split
    if place is None:
        return jnp.asarray(_block(parts, slice(None), dtype))
    where = place(shape, split)
    blocks: dict[tuple[Any, ...], np.ndarray] = {}  # replicas are read once

    def read(index: Any) -> np.ndarray:  # a slice an axis
        shared = slice(None) if split is None else index[split]
        key = shared.start, shared.stop
        if key not in blocks:
            blocks[key] = _block(parts, shared, dtype)
        return blocks[key]

    return jax.make_array_from_callback(shape, where, read)


def _block(parts: list[tuple[Parameter, Tensor]], shared: slice, dtype: Any) -> np.ndarray:
    """The leaf's part that has `shared` of its shared axis."""
    shape, split = list(parts[0][0].leaf_shape), parts[0][0].split
    if split is not None:
        shape[split] = len(range(*shared.indices(shape[split])))
    block = np.empty(shape, dtype)
    for parameter, tensor in parts:
        part = block[parameter.at]
        part[...] = np.asarray(_read(parameter, tensor, shared)).astype(dtype).reshape(part.shape)
    return block


def _read(parameter: Parameter, tensor: Tensor, shared: slice) -> Any:
    """The part of a tensor that goes into that part of the leaf's shared axis."""
    split, shape = parameter.split, list(parameter.leaf_shape)
    if split is None or shared == slice(None):
        return tensor[...]
    start, stop, _ = shared.indices(shape[split])
    if split == len(shape) - 1 and len(parameter.shape) > 1:
        return tensor[:, start:stop]
    each = int(tensor.shape[0]) // shape[split]  # rows of the tensor to an index of the axis
    return tensor[start * each : stop * each]


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
