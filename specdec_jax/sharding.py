"""Sharding of arrays on a mesh of devices: rows of a batch over its axis `data`, a target's weights over axis `model`.

The mesh is set in JAX, `jax.set_mesh(make_mesh("data=2,model=4"))`; without one arrays are not sharded. Programs name
no devices: models constrain intermediate values by `constrain`, and the compiler adds the collectives, two all-reduces
per layer as in Megatron-LM (arXiv 1909.08053, section 3).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, MODEL = "data", "model"
ANY = PartitionSpec.UNCONSTRAINED  # the sharding of an axis that is left to the compiler


def mesh_here() -> Mesh | None:
    """The current mesh, or None. Raises ValueError for a mesh with other axes or with explicit ones."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return None
    if set(mesh.axis_names) != {DATA, MODEL} or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(f"the mesh needs the axes {DATA} and {MODEL}, both automatic (make_mesh), got {mesh}")
    return mesh


def sharding(mesh: Mesh, shape: Sequence[int], *axes: Any) -> NamedSharding:
    """The sharding of an array with this shape, by names of mesh axes; further axes are not sharded."""
    return NamedSharding(mesh, _spec(mesh, shape, axes))


def committed(tree: Any) -> Any:
    """Sharding of any array beside one committed to one device, or None. `run` compiles again for states elsewhere."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer))
    where = next((leaf.sharding for leaf in arrays if leaf.committed and len(leaf.sharding.device_set) == 1), None)
    return NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where


def placed(tree: Any, where: Any = None) -> Any:
    """Copies host arrays [B, ...] to devices, with rows over `data`; without a mesh to the sharding `where`, if given.

    Inside a traced function (`jit`, `vmap`) the sharding is a constraint.
    """
    try:
        jax.sharding.get_mesh()
    except ValueError:  # not available while JAX traces
        return by_rows(jax.tree.map(jax.numpy.array, tree))
    # `jax.numpy.array` compiles a program for every shape, `may_alias` is ignored for numpy arrays
    tree = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)
    if (mesh := mesh_here()) is None:
        return jax.device_put(tree, where, may_alias=False)
    return jax.tree.map(lambda leaf: put(leaf, sharding(mesh, leaf.shape, DATA)), tree)


def on_host(tree: Any) -> Any:
    """Copies device arrays to the host. For a mesh of several processes all of them must call it."""

    def read(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(read, tree)


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
    """Inside a program: constrains the sharding of a value by names of mesh axes; further axes are not sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # no mesh, or inside `over_rows`
        return x
    return jax.lax.with_sharding_constraint(x, _spec(mesh, x.shape, axes))


def by_rows(tree: Any) -> Any:
    """Arrays [B, ...] with rows over `data`; other axes are left as they are, inside a program to the compiler."""
    return jax.tree.map(lambda leaf: constrain(leaf, DATA, *[ANY] * (leaf.ndim - 1)), tree)


def put(leaf: Any, where: NamedSharding) -> jax.Array:
    """Copies an array, which all processes of a launch have, to the devices of a sharding."""
    if where.is_fully_addressable:
        return jax.device_put(leaf, where, may_alias=False)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def _spec(mesh: Any, shape: Sequence[int], axes: Sequence[Any]) -> PartitionSpec:
    """The PartitionSpec without names that do not divide their axis, have size 1, or are missing in the mesh."""

    def fits(size: int, axis: Any) -> Any:
        parts = mesh.shape.get(axis, 1) if isinstance(axis, str) else 1
        return axis if axis is ANY or (parts > 1 and size % parts == 0) else None

    return PartitionSpec(*(fits(size, axis) for size, axis in zip(shape, axes, strict=False)))
