"""What a pair takes of a device's memory: its weights before they are loaded, and the caches of a row afterwards."""

from typing import NamedTuple

from specdec_jax.costs.dtypes import dtype_of
from specdec_jax.costs.machine import free_memory
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.load import SHARE_DRAFTER, weight_bytes
from specdec_jax.loading.precision import INT8
from specdec_jax.sharding import bytes_here, mesh_here
from specdec_jax.text.continuous_batching import cache_bytes, rows_that_fit
from specdec_jax.text.pair import Pair

SHOWN = ("float32", "bfloat16", INT8)
USUAL = "bfloat16"  # what weights are loaded in first, where the machine chooses
MOST_ROWS = 256


class Bytes(NamedTuple):
    """On one device."""

    target: int
    drafter: int

    @property
    def both(self) -> int:
        """Of the pair."""
        return self.target + self.drafter


class Weights(NamedTuple):
    """What the weights will take of each device, by dtype, and what one has free before they are loaded."""

    by_dtype: dict[str, Bytes]  # predicted
    dtype: str  # in which they are loaded first
    devices: int
    free: int | None  # measured; None: the device does not say

    @property
    def refusal(self) -> str:
        """Why they cannot be loaded, empty if they can."""
        needed = self.by_dtype[self.dtype].both
        if self.free is None or needed <= self.free:
            return ""
        each = f"each of {self.devices} devices" if self.devices > 1 else "the device"
        small = self.by_dtype[INT8].both
        hint = f"; in int8 they would take {size(small)}: --dtype int8" if small <= self.free else ""
        why = f"the weights take {size(needed)} in {self.dtype} (predicted), and {each} has {size(self.free)} free"
        return why + hint


class Caches(NamedTuple):
    """What a loaded pair has left for the caches of its rows, on one device."""

    dtype: str
    weights: Bytes  # measured
    context: int  # cache slots of a row
    row: int  # bytes of its caches, predicted
    free: int | None  # measured
    rows: int  # how many fit, MOST_ROWS or more as MOST_ROWS; predicted
    refusal: str  # why not one does, or empty


def weights_of(target: LoadedModel, drafter: LoadedModel, dtype: str) -> Weights:
    """Of two outlines (`loading.outline`); `dtype` as asked for, auto among them."""
    first = USUAL if dtype == "auto" else dtype
    by_dtype = {
        name: Bytes(weight_bytes(target.config, name), weight_bytes(drafter.config, name, SHARE_DRAFTER))
        for name in dict.fromkeys((*SHOWN, first))
    }
    mesh = mesh_here()
    return Weights(by_dtype, first, 1 if mesh is None else mesh.size, free_memory())


def caches_of(pair: Pair, context: int) -> Caches:
    """Of rows with so many cache slots."""
    loaded = Bytes(bytes_here(pair.target.params), bytes_here(pair.params.drafter))
    free, refusal = free_memory(), ""
    try:
        rows = rows_that_fit(pair, MOST_ROWS, context, free)
    except ValueError as error:
        rows, refusal = 0, str(error)
    return Caches(dtype_of(pair.target), loaded, context, cache_bytes(pair, 1, context), free, rows, refusal)


def size(count: int) -> str:
    """Bytes as people say them."""
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"
