"""How arrays lie on a mesh of devices: rows of a batch over its axis `data`, a target's weights over its axis `model`.

The mesh is JAX's own, `jax.set_mesh(make_mesh("data=2,model=4"))`; without one nothing changes. Nothing inside a
program names a device: models say with `constrain` which axis an intermediate value has where, and the compiler adds
the collectives, two all-reduces a layer as in Megatron-LM (arXiv 1909.08053, section 3).
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, MODEL = "data", "model"
CACHES = ("keys", "values", "cross_keys", "cross_values")  # of what has rows, heads, slots and width
ANY = PartitionSpec.UNCONSTRAINED
"""Sharding of an axis that the compiler may lay as it likes."""


def make_mesh(words: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `data=2,model=4` asks for, of the first devices; axes that are not named have size 1.

    Args:
        devices: None: those of this process.

    Raises:
        ValueError: something else than these axes with positive sizes, more devices than there are, or devices of
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
    """The mesh of the devices of all processes of a launch: each has that of `words`, rows are divided over all.

    Raises ValueError as `make_mesh`.
    """
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
    """From here on, in this thread, decode on that mesh (`make_mesh`); None: nothing changes. Raises ValueError."""
    if words is not None:
        jax.set_mesh(make_mesh(words, devices))


def mesh_here() -> Mesh | None:
    """The mesh that was set, None without. Raises ValueError for one of other axes or of explicit ones."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return None
    if set(mesh.axis_names) != {DATA, MODEL} or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(f"the mesh needs the axes {DATA} and {MODEL}, both automatic (make_mesh), got {mesh}")
    return mesh


def sharding(mesh: Mesh, shape: Sequence[int], *axes: Any) -> NamedSharding:
    """Where an array of that shape lies, its axes by name; those after the last name are whole everywhere."""
    return NamedSharding(mesh, _spec(mesh, shape, axes))


def weight_sharding(mesh: Mesh, weight: Any) -> NamedSharding:
    """Where a weight lies (`models.weights.Parameter`); it is whole everywhere if devices cannot share it evenly."""
    shape, split, units = weight.leaf_shape, weight.split, weight.units
    even = split is not None and (units is None or units % mesh.shape[MODEL] == 0)
    return sharding(mesh, shape, *[MODEL if even and axis == split else None for axis in range(len(shape))])


def placement(replicate: bool = False) -> Callable[[Any], NamedSharding] | None:
    """Where weights lie on the mesh that was set, None without; `replicate`: whole everywhere."""
    mesh = mesh_here()
    if mesh is None:
        return None
    return lambda weight: sharding(mesh, weight.leaf_shape) if replicate else weight_sharding(mesh, weight)


def caches_laid(mesh: Mesh, caches: Any, shared: bool) -> Any:
    """Where a model's state [B, ...] lies: rows over `data`, heads too where devices share the model's weights."""

    def where(path: Any, leaf: Any) -> NamedSharding:
        heads = shared and any(getattr(key, "name", None) in CACHES for key in path)
        return sharding(mesh, leaf.shape, *((DATA, MODEL) if heads else (DATA,)))

    return jax.tree.map_with_path(where, caches)


def are_shared(params: Any) -> bool:
    """Whether devices share a model's weights."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_replicated for leaf in jax.tree.leaves(params))


def bytes_here(tree: Any) -> int:
    """What arrays, or shapes with a sharding, take on one device."""

    def leaf_bytes(leaf: Any) -> int:
        where = getattr(leaf, "sharding", None)
        return math.prod(leaf.shape if where is None else where.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def bytes_of_caches(params: Any, caches: Any) -> int:
    """What shapes of a model's state [B, ...] take on one device (`caches_laid`)."""
    mesh = mesh_here()
    if mesh is None:
        return bytes_here(caches)
    places = caches_laid(mesh, caches, are_shared(params))
    laid = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
    return bytes_here(jax.tree.map(laid, caches, places))


def row_groups() -> int:
    """Groups of devices that rows are divided over, on the mesh that was set."""
    mesh = mesh_here()
    return 1 if mesh is None else mesh.shape[DATA]


def check_rows(batch: int) -> None:
    """Raises ValueError for a batch that those groups cannot share evenly: each would hold and compute all of it."""
    groups = row_groups()
    if batch % groups:
        raise ValueError(f"a batch of {batch} rows cannot be divided over {DATA}={groups}: give a multiple of {groups}")


def placed(tree: Any) -> Any:
    """Host arrays [B, ...] as arrays of devices, rows over `data`; always copies.

    Inside a function that JAX traces (`jit`, `vmap`) they are constrained to lie so.
    """
    try:
        jax.sharding.get_mesh()
    except ValueError:  # JAX refuses to say which mesh is set while it traces
        return by_rows(jax.tree.map(jax.numpy.array, tree))
    mesh = mesh_here()
    if mesh is None:
        return jax.tree.map(jax.numpy.array, tree)
    return jax.tree.map(lambda leaf: _put(leaf, sharding(mesh, leaf.shape, DATA)), tree)


def on_host(tree: Any) -> Any:
    """Arrays of devices as host arrays. Those of a mesh of several processes all of them must ask for."""

    def read(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(read, tree)


def spans_processes() -> bool:
    """Whether the mesh that was set has devices of other processes."""
    mesh = mesh_here()
    return mesh is not None and mesh.is_multi_process


def everywhere(tree: Any) -> Any:
    """Arrays whole on every device of the mesh that was set; as they are without one."""
    mesh = mesh_here()
    if mesh is None:
        return tree
    return jax.tree.map(lambda leaf: _put(leaf, NamedSharding(mesh, PartitionSpec())), tree)


def over_rows(function: Callable[..., Any], *by_row: Any) -> Callable[..., Any]:
    """The function on every device's own rows, and the sums over devices of what it gives, on the mesh that was set.

    Args:
        by_row: of each argument, what of it has rows to be divided: True, False, or a tree of them. Rows must divide.
    """
    mesh = mesh_here()
    if mesh is None:
        return function
    specs = jax.tree.map(lambda rows: PartitionSpec(DATA) if rows else PartitionSpec(), by_row)

    def rows_here(*arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, DATA), function(*arguments))

    return jax.shard_map(rows_here, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
    """Inside a program: the value with its axes laid by name, those after the last name whole everywhere."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # none, or `over_rows`, where every device sees its own
        return x
    return jax.lax.with_sharding_constraint(x, _spec(mesh, x.shape, axes))


def by_rows(tree: Any) -> Any:
    """Inside a program: arrays [B, ...] with rows over `data`, the rest as the compiler likes."""
    return jax.tree.map(lambda leaf: constrain(leaf, DATA, *[ANY] * (leaf.ndim - 1)), tree)


def _put(leaf: Any, where: NamedSharding) -> jax.Array:
    """A copy of an array that this process has, or all processes of a launch, on the devices of its sharding."""
    if where.is_fully_addressable:
        return jax.device_put(leaf, where, may_alias=False)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def _spec(mesh: Any, shape: Sequence[int], axes: Sequence[Any]) -> PartitionSpec:
    """Without names that do not divide their axis, that have size 1, or that a caller's own mesh lacks."""

    def fits(size: int, axis: Any) -> Any:
        parts = mesh.shape.get(axis, 1) if isinstance(axis, str) else 1
        return axis if axis is ANY or (parts > 1 and size % parts == 0) else None

    return PartitionSpec(*(fits(size, axis) for size, axis in zip(shape, axes, strict=False)))
