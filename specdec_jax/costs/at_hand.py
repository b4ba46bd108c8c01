"""The costs of the machine at hand: measured once a pair of models, and kept on disk.

What is kept goes by what a pass depends on: both models' names, shapes and dtypes, device, cores and their
instructions, and the version of jax. One process measures, others that want the same wait for it. A machine that was
busy then looks slower than it is, so a later process times one pass again, until one agrees: if it is much faster,
the pair's costs are measured a second time.
"""

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from filelock import FileLock

from specdec_jax.compilation_cache import cache_folder, shown
from specdec_jax.costs.cost_model import CostModel, cost_model, load_cost_model, save_cost_model
from specdec_jax.costs.machine import device, features
from specdec_jax.costs.step_cost import alternate, draft_round, target_pass, turns
from specdec_jax.decoding.one_graph import options_here
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.new_folder import replacing
from specdec_jax.loading.precision import INT8
from specdec_jax.models.adapters import with_vocabulary
from specdec_jax.sharding import are_shared, mesh_here
from specdec_jax.stopping.static import static

WIDTHS = (1, 2, 4, 6, 8, 12, 16)  # plain decoding is the first
DTYPE_WIDTH = 4  # of the pass by which dtypes are compared
DRAFTS, SLOTS, PASSES = 7, 512, 2
FEW = 128  # slots of a pass that tells what a slot costs in a batch; a row alone reads them for nothing
SECONDS, REPEATS = 4.0, 9  # programs alternate for so long, or so often; three times at least
LARGEST = 2e9  # bytes of float32 weights that are loaded to see whether they are faster
MOMENT = 600.0  # seconds that may pass for one busy moment
FASTER = 0.8  # of the kept time, that a pass must take less than for what is kept to be doubted
T = TypeVar("T")


def measured(target: LoadedModel, drafter: LoadedModel | None, batch: int = 1) -> CostModel:
    """c and V(k) of this pair on this machine, from disk or measured now: seconds, after compiling for as many.

    Args:
        drafter: None for one without a model: its step costs nothing.
        batch: rows that share the passes.
    """
    shapes = [_shapes(target), None if drafter is None else _shapes(drafter), SLOTS, WIDTHS]
    mesh = mesh_here()
    # Files of one row on one device are named as they always were; of several, those without "paired" told slots badly.
    shapes += [batch, FEW, "paired"] if batch > 1 else []
    shapes += [dict(mesh.shape), drafter is not None and are_shared(drafter.params)] if mesh else []
    names = [target.name] + ([] if drafter is None else [drafter.name])

    def measure() -> CostModel:
        rows = f" for {batch} rows" if batch > 1 else ""
        _say(f"measuring what passes of {' and '.join(names)} cost{rows} on this machine, once")
        found = _measure(target, drafter, batch)
        _say(sentence(found) + kept)
        return found

    path = _file("costs", names, shapes)
    kept = _kept(path)
    found = _once(path, load_cost_model, save_cost_model, measure)
    return found if path is None else _looked_at_again(path, found, lambda: _plain_pass(target, batch), measure)


def faster_dtype(target: LoadedModel, load: Callable[[str], LoadedModel]) -> str:
    """The faster of bfloat16, in which the target is given, and float32, which `load` gives it in.

    On an accelerator, and for models of over 2 GB in float32, bfloat16 without measuring.
    """
    small = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)) <= LARGEST
    if jax.default_backend() != "cpu" or not small:
        return "bfloat16"

    def measure() -> dict[str, float]:
        _say(f"measuring {target.name} in bfloat16 and float32 on this machine, once")
        models = {"bfloat16": target, "float32": load("float32")}
        programs = {
            dtype: target_pass(one.model, one.params, DTYPE_WIDTH, 1, SLOTS, passes=PASSES)
            for dtype, one in models.items()
        }
        found = alternate(programs, REPEATS, dict.fromkeys(programs, PASSES), seconds=SECONDS)
        seconds = {dtype: cost.median for dtype, cost in found.items()}
        _say(", ".join(f"{1e3 * time:.1f} ms a pass in {dtype}" for dtype, time in seconds.items()) + kept)
        return seconds

    path = _file("dtype", [target.name], [_shapes(target), SLOTS, DTYPE_WIDTH])
    kept = _kept(path)
    seconds = _once(path, _read, _write, measure)
    return min(seconds, key=seconds.__getitem__)


def sentence(costs: CostModel) -> str:
    """A line about a cost model."""
    plain = costs.plain_pass
    passes = [f"{time / plain:.2f} at {width}" for width, time in zip(costs.widths, costs.target_pass, strict=True)]
    drafts = f"a drafter step is {costs.ratio:.3f} of a pass of plain decoding ({1e3 * plain:.1f} ms)"
    if not costs.ratio:
        drafts = f"a pass of plain decoding takes {1e3 * plain:.1f} ms"
    slots = f"; every hundred cache slots {1e5 * costs.slot_time:.1f} ms" if costs.slot_time else ""
    return f"{costs.device}: {drafts}; verification by tokens: {', '.join(passes)}{slots}"


def _measure(target: LoadedModel, drafter: LoadedModel | None, batch: int) -> CostModel:
    programs: dict[str, Callable[[], Any]] = {
        str(width): target_pass(target.model, target.params, width, batch, SLOTS, passes=PASSES) for width in WIDTHS
    }
    share = _share_of_slots(target, batch, programs[str(WIDTHS[0])]) if batch > 1 else 0.0
    per = dict.fromkeys(programs, PASSES)
    if drafter is not None:
        one = drafter_of(with_vocabulary(drafter.model, target.model.spec.vocab_size), DRAFTS)
        options: dict[str, Any] = {
            "batch": batch,
            "slots": SLOTS,
            "temperature": 0.0,
            "keep_log_q": True,
            "measure": False,
        }
        programs["drafter"] = draft_round(one, drafter.params, static(draft_length=DRAFTS), **options)
        per["drafter"] = DRAFTS
    found = alternate(programs, REPEATS, per, seconds=SECONDS)
    step = found.pop("drafter").median if drafter is not None else 0.0
    passes = {int(width): cost.median for width, cost in found.items()}
    slot_time = share * passes[WIDTHS[0]] / (SLOTS - FEW)
    where = f"{device()}, {dtype_of(target)}, jax {jax.__version__}"
    return cost_model(step, passes, device=where, batch=batch, slots=SLOTS, slot_time=slot_time)


def _share_of_slots(target: LoadedModel, batch: int, many: Callable[[], Any]) -> float:
    """The share of a pass with SLOTS cache slots that one with FEW does without, by passes side by side.

    Among wide passes of many rows there is time for three turns, and noise of these told 32 rows to draft.
    """
    few = target_pass(target.model, target.params, WIDTHS[0], batch, FEW, passes=PASSES)
    found = turns({"many": many, "few": few}, REPEATS, {"many": PASSES, "few": PASSES}, seconds=2 * SECONDS)
    return max(1.0 - float(np.median(np.divide(found["few"], found["many"]))), 0.0)


def _plain_pass(target: LoadedModel, batch: int) -> float:
    """Seconds of a pass of plain decoding, now."""
    one = target_pass(target.model, target.params, WIDTHS[0], batch, SLOTS, passes=PASSES)
    return alternate({str(WIDTHS[0]): one}, REPEATS, {str(WIDTHS[0]): PASSES}, seconds=SECONDS / 4)["1"].median


def _looked_at_again(
    path: Path, found: CostModel, plain_pass: Callable[[], float], measure: Callable[[], CostModel]
) -> CostModel:
    """What was kept, or measured anew if one pass at another moment tells that the machine was busy then.

    Nobody looks again once it takes as long or all was measured twice; when it takes longer, the machine is busy now.
    """
    agreed = path.with_suffix(".agreed")
    with contextlib.suppress(OSError), FileLock(path.with_suffix(".lock")):
        kept = path.stat().st_mtime
        if time.time() - kept < MOMENT or (agreed.exists() and agreed.stat().st_mtime >= kept):
            return found
        share = plain_pass() / found.plain_pass
        if share < FASTER:
            _say("a pass takes less time than when costs were measured: the machine was busy then")
            found = measure()
            save_cost_model(path, found)
        if share <= 1 / FASTER:
            agreed.touch()
    return found


def _once(
    path: Path | None, read: Callable[[Path], T], write: Callable[[Path, T], None], measure: Callable[[], T]
) -> T:
    """What the file holds; measured and written where there is none. A file that cannot be read is measured again."""
    with nullcontext() if path is None else FileLock(path.with_suffix(".lock")):
        if path is not None and path.is_file():
            try:
                return read(path)
            except (ValueError, OSError) as error:
                _say(f"{error}: measuring again")
        found = measure()
        try:
            if path is not None:
                write(path, found)
        except OSError as error:
            _say(f"{error}; measured again next time")
        return found


def _file(kind: str, names: list[str], shapes: Any) -> Path | None:
    """Where something measured is kept; None where nothing can be."""
    try:
        folder = cache_folder("costs")
    except (OSError, RuntimeError):
        return None
    known = json.dumps([kind, shapes, device(), features(), jax.__version__, options_here()], sort_keys=True)
    label = re.sub(r"[^\w.@-]+", "_", "-".join(Path(name).name for name in names))[:80]
    return folder / f"{kind}-{label}-{hashlib.sha256(known.encode()).hexdigest()[:12]}.json"


def _kept(path: Path | None) -> str:
    return "; kept nowhere: measured again next time" if path is None else f"; kept in {shown(path.parent)}"


def _shapes(model: LoadedModel) -> list[str]:
    """Of all weights, with their dtypes: a name does not tell."""
    return [f"{np.shape(leaf)} {leaf.dtype}" for leaf in jax.tree.leaves(model.params)]


def dtype_of(model: LoadedModel) -> str:
    """Of its weights, as `load_model` is told it."""
    found = [str(leaf.dtype) for leaf in jax.tree.leaves(model.params)]
    return INT8 if INT8 in found else found[0]


def _read(path: Path) -> dict[str, float]:
    """Seconds by dtype. Raises ValueError where the file holds something else."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or set(found) != {"bfloat16", "float32"}:
        raise ValueError(f"{path} holds no seconds by dtype")
    for value in found.values():
        if not isinstance(value, float) or not 0 < value < np.inf:
            raise ValueError(f"{path} holds {value!r} where seconds belong")
    return found


def _write(path: Path, seconds: dict[str, float]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(seconds), encoding="utf-8")


def _say(line: str) -> None:
    """To the terminal: who calls `generate` for the first time waits for this."""
    print(f"specdec_jax: {line}", file=sys.stderr, flush=True)
