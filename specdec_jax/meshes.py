"""Meshes of devices from words such as `data=2,model=4`; how weights, caches and rows are divided over them."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specdec_jax.sharding import DATA, MODEL, mesh_here, put, sharding

CACHES = ("keys", "values", "cross_keys", "cross_values")  # names of caches [rows, heads, slots, width]


def make_mesh(words: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh for a text such as `data=2,model=4`, of the first of `devices` (None: those of this process); omitted
    axes have size 1.

    Raises ValueError: anything else than these axes with positive sizes, more devices than available, or devices of
    several processes of which one would have none in the mesh.
    """
    shape = mesh_sizes(words)
    needed, there = math.prod(shape), jax.local_devices() if devices is None else devices
    if needed > len(there):
        raise ValueError(f"mesh {words!r} needs {needed} devices, there are {len(there)} ({there[0].platform})")
    out = {device.process_index for device in there} - {device.process_index for device in there[:needed]}
    if out:
        raise ValueError(f"mesh {words!r} has no device of process {min(out) + 1}: there are {len(there)}, use all")
    return jax.make_mesh(shape, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=there[:needed])


def make_spanning_mesh(words: str | None) -> Mesh:
    """The mesh of all processes of a launch, each with that of `words`; rows are sharded over all (`make_mesh`)."""
    data, model = mesh_sizes(words or f"{DATA}=1")
    groups: dict[int, list[Any]] = {}
    for device in jax.devices():
        groups.setdefault(device.process_index, []).append(device)
    if short := [process for process, devices in groups.items() if len(devices) < data * model]:
        raise ValueError(f"mesh {words!r} needs {data * model} devices, process {short[0]} has {len(groups[short[0]])}")
    devices = [device for _, there in sorted(groups.items()) for device in there[: data * model]]
    return jax.make_mesh((data * len(groups), model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices)


def mesh_sizes(words: str) -> tuple[int, int]:
    """Sizes of `data` and `model` in `data=2,model=4`. Raises ValueError."""
    sizes: dict[str, int] = {}
    for part in words.split(","):
        match = re.fullmatch(rf"\s*({DATA}|{MODEL})\s*=\s*([1-9]\d*)\s*", part, re.ASCII)
        if not match or match[1] in sizes:
            raise ValueError(f"a mesh is {DATA}=N,{MODEL}=M with positive sizes, got {words!r}")
        sizes[match[1]] = int(match[2])
    return sizes.get(DATA, 1), sizes.get(MODEL, 1)


def use_mesh(words: str | None, devices: Sequence[Any] | None = None) -> None:
    """Sets the mesh (`make_mesh`) for decoding in this thread; None: no change. Raises ValueError."""
    if words is not None:
        jax.set_mesh(make_mesh(words, devices))


def weight_sharding(mesh: Mesh, weight: Any) -> NamedSharding:
    """The sharding of a weight (`models.weights.Parameter`); it is replicated if it cannot be divided evenly."""
    shape, split, units = weight.leaf_shape, weight.split, weight.units
    even = split is not None and (units is None or units % mesh.shape[MODEL] == 0)
    return sharding(mesh, shape, *[MODEL if even and axis == split else None for axis in range(len(shape))])


def placement(replicate: bool = False) -> Callable[[Any], NamedSharding] | None:
    """The sharding of weights on the current mesh, or None; `replicate`: replicated on all devices."""
    mesh = mesh_here()
    if mesh is None:
        return None
    return lambda weight: sharding(mesh, weight.leaf_shape) if replicate else weight_sharding(mesh, weight)


def bytes_here(tree: Any) -> int:
    """Number of bytes per device of arrays, or of shapes with a sharding."""

    def leaf_bytes(leaf: Any) -> int:
        where = getattr(leaf, "sharding", None)
        return math.prod(leaf.shape if where is None else where.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def bytes_of_caches(params: Any, caches: Any) -> int:
    """Number of bytes per device of a model's state [B, ...], given as shapes (`caches_laid`)."""
    mesh = mesh_here()
    if mesh is None:
        return bytes_here(caches)
    places = caches_laid(mesh, caches, are_shared(params))
    laid = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
    return bytes_here(jax.tree.map(laid, caches, places))


def row_groups() -> int:
    """Number of groups of devices over which rows are sharded on the current mesh."""
    mesh = mesh_here()
    return 1 if mesh is None else mesh.shape[DATA]


def check_rows(batch: int) -> None:
    """Raises ValueError for a batch that cannot be divided evenly, which would be computed whole by each group."""
    groups = row_groups()
    if batch % groups:
        raise ValueError(f"a batch of {batch} rows cannot be divided over {DATA}={groups}: give a multiple of {groups}")


def caches_laid(mesh: Mesh, caches: Any, shared: bool) -> Any:
    """The sharding of a model's state [B, ...]: rows over `data`, and heads over `model` if the weights are sharded."""

    def where(path: Any, leaf: Any) -> NamedSharding:
        heads = shared and any(getattr(key, "name", None) in CACHES for key in path)
        return sharding(mesh, leaf.shape, *((DATA, MODEL) if heads else (DATA,)))

    return jax.tree.map_with_path(where, caches)


def are_shared(params: Any) -> bool:
    """Whether a model's weights are sharded."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_replicated for leaf in jax.tree.leaves(params))


def spans_processes() -> bool:
    """Whether the current mesh has devices of other processes."""
    mesh = mesh_here()
    return mesh is not None and mesh.is_multi_process


def everywhere(tree: Any) -> Any:
    """Arrays replicated on every device of the current mesh; unchanged without a mesh."""
    mesh = mesh_here()
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: put(leaf, NamedSharding(mesh, PartitionSpec())), tree)


def over_rows(function: Callable[..., Any], *by_row: Any) -> Callable[..., Any]:
    """The function applied to each device's rows, with its results summed over devices, on the current mesh.

    `by_row`: for each argument, whether it has rows: True, False, or a tree of them. Rows must divide evenly.
    """
    mesh = mesh_here()
    if mesh is None:
        return function
    specs = jax.tree.map(lambda rows: PartitionSpec(DATA) if rows else PartitionSpec(), by_row)

    def rows_here(*arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, DATA), function(*arguments))

    return jax.shard_map(rows_here, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
