"""Conversion between the named tensors of checkpoints and parameter trees, by a table of each family.

Unknown, missing and duplicate names and wrong shapes are errors: a checkpoint that is nearly right decodes to fluent
nonsense.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from specdec_jax.models.int8 import Int8, rounded

SHOWN = 5  # maximum number of names of each kind in an error
CHECKED = 1 << 16  # numbers checked at a time, to stay in a core's cache


class Fused(NamedTuple):
    """The rows of a tensor in a fused leaf."""

    rows: tuple[int, int, int]  # layout of the leaf's rows: units, parts per unit, rows per part
    at: tuple[slice | int, ...]  # the tensor's parts in each unit; it has the first part of all units first


class Parameter(NamedTuple):
    """The place of a checkpoint's tensor in the parameter tree."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # in the checkpoint
    fused: Fused | None = None  # for leaves with another order of rows, or with the rows of several tensors
    split: int | None = None  # the leaf's sharded axis (`sharding.MODEL`); None: replicated
    units: int | None = None  # number of equal parts in which it may be sharded; None: its length
    turned: bool = False  # stored as [in, out] in the checkpoint
    stacked: tuple[int, int] | None = None  # (index, size) on the leaf's first axis, for stacks of tensors
    precise: bool = False  # never int8: a table of positions, a router, norms of several streams

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """The shape of the leaf in the parameter tree."""
        shape = self.shape[::-1] if self.turned else self.shape
        shape = shape if self.fused is None else (math.prod(self.fused.rows), *shape[1:])
        return shape if self.stacked is None else (self.stacked[1], *shape)

    @property
    def is_matrix(self) -> bool:
        """Whether the tensor can be int8."""
        return len(self.shape) > 1 and not self.precise

    @property
    def scale(self) -> "Parameter":
        """The place of the scales of an int8 matrix; devices that share its inputs have the scales of all rows."""
        rows, split = self.shape[-1 if self.turned else 0], self.split
        split = split if split == len(self.leaf_shape) - 2 else None
        return self._replace(shape=(rows,), split=split, turned=False)

    def unstacked(self, leaf: np.ndarray) -> np.ndarray:
        """This tensor's matrix in a stack, as a view; without a stack the leaf."""
        return leaf if self.stacked is None else leaf[self.stacked[0]]


Table = Mapping[str, Parameter]
Ignored = Mapping[str, tuple[int, ...] | None]
Tensor = Any  # an array, or a lazy one whose parts are read from a file when it is indexed
Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Read = Callable[[slice, slice], Any]  # rows and columns of a tensor, as [out, in]
Part = tuple[str, "Parameter", Read]  # a tensor's name, its place in a leaf, and a function that reads it
Place = Callable[[Parameter], jax.sharding.Sharding]  # the leaf's sharding
Layout = Callable[[Table], Place | None]  # the sharding of each leaf of a model; None: on the default device


def params_from_named(
    table: Table,
    named: Named,
    dtype: Any,
    *,
    ignored: Ignored = MappingProxyType({}),
    place: Place | None = None,
    int8: bool = False,
) -> Any:
    """The parameter tree, every leaf in `dtype` (`int8`: matrices in int8), on the default device or placed by `place`.

    `named` may be a mapping or an iterable of (name, tensor); an iterable is read once, and a leaf is created when the
    last of its tensors was read. Only the parts of a sharded tensor that this process's devices hold are read.
    `ignored` maps names that are dropped to their required shape (None: any). Raises ValueError naming the unknown,
    missing, duplicate, wrongly shaped and non-floating tensors, or the first one that is not finite. Rows of int8
    matrices are read with all of their inputs, because they share a scale.
    """
    waiting = Counter(parameter.path for parameter in table.values())
    parts: dict[tuple[str, ...], list[Part]] = defaultdict(list)
    leaves: dict[tuple[str, ...], Any] = {}
    seen: set[str] = set()
    wrong: dict[str, list[str]] = {"unknown": [], "missing": [], "duplicate": [], "wrong shape": [], "not floating": []}
    for name, tensor in pairs(named):
        parameter = table.get(name)
        shape = ignored.get(name) if parameter is None else parameter.shape
        if name in seen:
            wrong["duplicate"].append(name)
        elif parameter is None and name not in ignored:
            wrong["unknown"].append(name)
        elif shape is not None and tuple(tensor.shape) != shape:
            wrong["wrong shape"].append(f"{name} {tuple(tensor.shape)} instead of {shape}")
        elif parameter is not None and not jnp.issubdtype(tensor.dtype, jnp.floating):
            wrong["not floating"].append(f"{name} {tensor.dtype}")
        elif parameter is not None:
            parts[path := parameter.path].append((name, parameter, functools.partial(_read, parameter, tensor)))
            waiting[path] -= 1
            if not waiting[path]:
                whole = parts.pop(path)
                leaves[path] = _int8(whole, place) if int8 and parameter.is_matrix else _leaf(whole, dtype, place)
        seen.add(name)
    wrong["missing"] = [name for name in table if name not in seen]
    if any(wrong.values()):
        more = {kind: f" and {len(names) - SHOWN} more" * (len(names) > SHOWN) for kind, names in wrong.items()}
        faults = [f"{kind}: {', '.join(names[:SHOWN])}{more[kind]}" for kind, names in wrong.items() if names]
        raise ValueError(f"weights do not fit the model: {'; '.join(faults)}")
    return unflatten_dict(leaves)


def num_weights(table: Table) -> int:
    """The number of weights in all leaves."""
    return sum(map(math.prod, {parameter.path: parameter.leaf_shape for parameter in table.values()}.values()))


def num_bytes(table: Table, dtype: Any, place: Place | None = None, int8: bool = False) -> int:
    """Number of bytes per device of the parameters that `params_from_named` creates."""
    whole = {parameter.path: jax.ShapeDtypeStruct(parameter.leaf_shape, dtype) for parameter in table.values()}
    leaves = jax.tree.leaves(placed_shapes(table, unflatten_dict(whole), place, int8=int8))
    shapes = [leaf.shape if place is None else leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    return sum(leaf.dtype.itemsize * math.prod(shape) for leaf, shape in zip(leaves, shapes, strict=True))


def placed_shapes(table: Table, shapes: Any, place: Place | None = None, *, int8: bool = False) -> Any:
    """A parameter tree's shapes and dtypes, with shardings if `place` is given; `int8`: matrices in int8."""
    by_path = {parameter.path: parameter for parameter in table.values()}

    def placed(parameter: Parameter, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place(parameter) if place else None)

    def leaf_shape(path: tuple[str, ...], leaf: Any) -> Any:
        parameter = by_path[path]
        if isinstance(leaf, Int8) or (int8 and parameter.is_matrix):
            values, scale = placed(parameter, leaf.shape, jnp.int8), parameter.scale
            return Int8(values, placed(scale, leaf.shape[:-1], jnp.float32))
        return placed(parameter, leaf.shape, leaf.dtype)

    return unflatten_dict({path: leaf_shape(path, leaf) for path, leaf in flatten_dict(shapes).items()})


def named_from_params(table: Table, params: Any) -> dict[str, np.ndarray]:
    """Every tensor of the table as a host array in the parameters' dtype, with fused leaves split."""
    named, leaves = {}, flatten_dict(params)
    for name, parameter in table.items():
        leaf = leaves[parameter.path]
        if np.shape(leaf) != parameter.leaf_shape:
            wrong = f"has shape {np.shape(leaf)} instead of {parameter.leaf_shape}"
            raise ValueError(f"parameter {'/'.join(parameter.path)}, {name}, {wrong}")
        array = parameter.unstacked(np.asarray(leaf))
        parts = [view.reshape(-1, *array.shape[1:]) for view, _ in _sections(parameter, array, slice(None))]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        named[name] = whole.T if parameter.turned else whole
    return named


def _sections(parameter: Parameter, leaf: np.ndarray, rows: slice) -> Iterator[tuple[np.ndarray, slice]]:
    """Views of the tensor's parts in a leaf, or in some of its rows (whole units), with the tensor's rows of each."""
    if parameter.fused is None:
        yield leaf, rows
        return
    units, *unit = parameter.fused.rows
    first, last = (row // math.prod(unit) for row in rows.indices(units * math.prod(unit))[:2])
    begin = 0
    for at in parameter.fused.at:
        view = leaf.reshape(-1, *unit, *leaf.shape[1:])[:, at]
        in_unit = math.prod(view.shape[1:]) // math.prod(leaf.shape[1:])  # rows of the tensor in each unit
        yield view, slice(begin + first * in_unit, begin + last * in_unit)
        begin += units * in_unit


def _leaf(parts: list[Part], dtype: Any, place: Place | None) -> jax.Array:
    """The leaf that consists of these tensors."""
    _, first, _ = parts[0]
    if place is None:
        return jax.device_put(_block(parts, slice(None), dtype))
    blocks: dict[tuple[Any, ...], np.ndarray] = {}  # replicas are read once

    def read(index: Any) -> np.ndarray:  # a slice per axis
        shared = slice(None) if first.split is None else index[first.split]
        key = shared.start, shared.stop
        if key not in blocks:
            blocks[key] = _block(parts, shared, dtype)
        return blocks[key]

    return jax.make_array_from_callback(first.leaf_shape, place(first), read)


def _int8(parts: list[Part], place: Place | None) -> Int8:
    """The matrix that consists of these tensors. Rows are read and rounded once for all devices."""
    values: list[Part] = []
    scales: list[Part] = []
    for name, parameter, read in parts:
        made = functools.cache(functools.partial(_rounded, name, read))
        values.append((name, parameter, lambda rows, columns, made=made: made(rows.start, rows.stop)[0][:, columns]))
        scales.append((name, parameter.scale, lambda rows, _, made=made: made(rows.start, rows.stop)[1]))
    return Int8(_leaf(values, np.int8, place), _leaf(scales, np.float32, place))


def _rounded(name: str, read: Read, first: int | None, last: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Int8 values and scales of these rows. Raises ValueError naming the tensor."""
    try:
        return rounded(np.asarray(read(slice(first, last), slice(None))))
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from None


def _block(parts: list[Part], shared: slice, dtype: Any) -> np.ndarray:
    """The leaf's part with the slice `shared` of its sharded axis."""
    _, first, _ = parts[0]
    shape = list(first.leaf_shape)
    if first.split is not None:
        shape[first.split] = len(range(*shared.indices(shape[first.split])))
    block = np.empty(shape, dtype)
    axes = (0, 1) if first.stacked is None else (1, 2)
    rows, columns = (shared if first.split == axis else slice(None) for axis in axes)
    for name, parameter, read in parts:
        for view, tensor_rows in _sections(parameter, parameter.unstacked(block), rows):
            numbers = np.asarray(read(tensor_rows, columns)).astype(dtype, order="C")
            # The bits without the sign are largest for NaN and infinity; comparing them costs less than reading a file.
            if jnp.issubdtype(numbers.dtype, jnp.floating):
                bits = f"u{numbers.dtype.itemsize}"
                least, flat = int(np.array(np.inf, numbers.dtype).view(bits)) << 1, numbers.reshape(-1).view(bits)
                for begin in range(0, flat.size, CHECKED):
                    if (flat[begin : begin + CHECKED] << 1).max() >= least:
                        raise ValueError(f"tensor {name} has NaN or infinity in {numbers.dtype}")
            view[...] = numbers.reshape(view.shape)
    return block


is_finite = jax.jit(lambda leaf: jnp.isfinite(jnp.sum(leaf * 0)) if jnp.issubdtype(leaf.dtype, jnp.floating) else True)


def check_finite(params: Any, where: Any) -> None:
    """Raises ValueError with `where` and the name of the first leaf that has NaN or infinity. Reads devices once."""
    finite = jax.device_get(jax.tree.map(is_finite, params))  # on a CPU 2.6 times as fast as all(isfinite)
    for (path, leaf), good in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(finite), strict=True):
        if not good:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"{where}: {name} has NaN or infinity in {leaf.dtype}")


def _read(parameter: Parameter, tensor: Tensor, rows: slice, columns: slice) -> Any:
    """These rows and columns of a tensor, as [out, in]."""
    if len(parameter.shape) == 1:
        return tensor[rows]
    return tensor[columns, rows].T if parameter.turned else tensor[rows, columns]


def pairs(named: Named) -> Iterable[tuple[str, Any]]:
    """Pairs of name and tensor, also from a mapping."""
    return cast(Mapping[str, Any], named).items() if isinstance(named, Mapping) else named
