"""The faster dtype of a target on this machine, from alternating passes in bfloat16 and float32; cached on disk."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from specdec_jax.costs.cost_model import agree
from specdec_jax.costs.step_cost import alternate, busy_doubts, spread_doubts, target_pass
from specdec_jax.costs.store import doubted, file_for, once, say, steadiest, where
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.new_folder import write_text
from specdec_jax.loading.precision import INT8

DTYPES = ("bfloat16", "float32")
PLAIN, WIDTH = 1, 4  # tokens of a pass of plain decoding, and of the pass that decides the dtype
SLOTS, PASSES = 512, 2
SECONDS, REPEATS = 4.0, 9  # limits on time and number of alternations of programs; at least three
LARGEST = 2e9  # maximum bytes of float32 weights that are loaded for the comparison


class Dtypes(NamedTuple):
    """Seconds of target passes by dtype: of plain decoding, and of WIDTH tokens."""

    passes: dict[str, tuple[float, float]]
    doubts: tuple[str, ...] = ()


def faster_dtype(target: LoadedModel, load: Callable[[str], LoadedModel]) -> str:
    """The faster of bfloat16, the dtype of `target`, and float32, in which `load` loads it.

    On an accelerator, and for models of over 2 GB in float32, bfloat16 without measuring.
    """
    small = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)) <= LARGEST
    if jax.default_backend() != "cpu" or not small:
        return "bfloat16"

    def measure(before: Dtypes | None) -> Dtypes:
        del before
        say(f"measuring {target.name} in bfloat16 and float32 on this machine, once")
        table = _measure_dtypes(target, load)
        passes = ", ".join(f"{1e3 * seconds[-1]:.1f} ms a pass in {dtype}" for dtype, seconds in table.passes.items())
        say(passes + doubted(table) + stored)
        return table

    path = _dtype_file(target)
    stored = where(path)
    passes = once(path, _read, _write, measure).passes
    return min(passes, key=lambda dtype: passes[dtype][-1])


def dtype_sentence(target: LoadedModel) -> str:
    """A line about the dtype of plain decoding: whether it is the faster one here, and by how much."""
    table, dtype = dtypes_of(target), dtype_of(target)
    if table is None or dtype not in DTYPES:
        return f"plain decoding in {dtype}; not measured beside another dtype here"
    other = DTYPES[dtype == DTYPES[0]]
    (plain, wide), (other_plain, other_wide) = table.passes[dtype], table.passes[other]
    faster = "the faster" if plain <= other_plain else "not the faster"
    line = f"plain decoding in {dtype}, {faster} here: a pass of 1 token takes {plain / other_plain:.2f} of {other}'s"
    return f"{line}, one of {WIDTH} tokens {wide / other_wide:.2f}{doubted(table)}"


def dtype_of(model: LoadedModel) -> str:
    """The dtype of a model's weights, as an argument of `load_model`."""
    dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(model.params)]
    return INT8 if INT8 in dtypes else dtypes[0]


def dtypes_of(target: LoadedModel) -> Dtypes | None:
    """The cached comparison of dtypes for this target, if there is one."""
    path = _dtype_file(target)
    with contextlib.suppress(OSError, ValueError):
        return None if path is None else _read(path)
    return None


def probe_doubts(target: LoadedModel, plain_pass: float) -> tuple[str, ...]:
    """A clause if a pass of plain decoding was much faster in the comparison of dtypes than `plain_pass` seconds.

    If it was much slower, the comparison of dtypes is marked as doubtful instead.
    """
    path, table, dtype = _dtype_file(target), dtypes_of(target), dtype_of(target)
    if path is None or table is None or dtype not in DTYPES or agree(before := table.passes[dtype][0], plain_pass):
        return ()
    clause = f"a pass of 1 token took {1e3 * before:.1f} ms when dtypes were compared, then {1e3 * plain_pass:.1f}"
    if before < plain_pass:
        return (clause,)
    if not table.doubts:
        with contextlib.suppress(OSError):
            _write(path, table._replace(doubts=(clause,)))
    return ()


def _measure_dtypes(target: LoadedModel, load: Callable[[str], LoadedModel]) -> Dtypes:
    busy, models = busy_doubts(), {DTYPES[0]: target, DTYPES[1]: load(DTYPES[1])}
    programs = {
        _called(dtype, width): target_pass(loaded.model, loaded.params, width, 1, SLOTS, passes=PASSES)
        for dtype, loaded in models.items()
        for width in (PLAIN, WIDTH)
    }

    def table() -> Dtypes:
        times = alternate(programs, REPEATS, dict.fromkeys(programs, PASSES), seconds=SECONDS)
        medians = {
            dtype: (times[_called(dtype, PLAIN)].median, times[_called(dtype, WIDTH)].median) for dtype in DTYPES
        }
        return Dtypes(medians, spread_doubts(times))

    steady = steadiest(table)
    return steady._replace(doubts=busy + steady.doubts)


def _called(dtype: str, width: int) -> str:
    return f"a pass of {width} tokens in {dtype}"


def _dtype_file(target: LoadedModel) -> Path | None:
    """The cache file of the comparison of dtypes, independent of the target's dtype."""
    shapes = [str(np.shape(leaf)) for leaf in jax.tree.leaves(target.params)]
    return file_for("dtype", [target.name], [shapes, SLOTS, PLAIN, WIDTH])


def _write(path: Path, table: Dtypes) -> None:
    write_text(path, json.dumps(table._asdict()))


def _read(path: Path) -> Dtypes:
    """Reads a comparison. Raises ValueError for other contents."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        passes = {dtype: (float(plain), float(wide)) for dtype, (plain, wide) in fields["passes"].items()}
        doubts = tuple(map(str, fields["doubts"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no seconds by dtype: {error!r}") from None
    if set(passes) != set(DTYPES) or not all(0 < time < np.inf for times in passes.values() for time in times):
        raise ValueError(f"{path} holds no seconds by dtype: {passes}")
    return Dtypes(passes, doubts)
