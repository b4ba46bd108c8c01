"""The costs of the machine at hand: measured once a pair of models, and kept on disk.

A file is identified by what a pass depends on: both models' names, shapes and dtypes, device, cores and their
instructions, and the version of jax. One process measures, others that need the same costs wait. A machine that is
busy meanwhile gives wrong costs. So whatever looks doubtful is measured a second time at once, what remains of the
doubts stands in `CostModel.doubts`, and doubtful costs are measured again by the next process, or by this one as soon
as decoding disagrees with them (`look_at`). A later process times one pass again, until one agrees: if it is much
faster, the pair's costs are measured anew.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from filelock import FileLock

from specdec_jax.compilation_cache import cache_folder
from specdec_jax.costs.cost_model import CostModel, cost_model, disagreement, load_cost_model, save_cost_model
from specdec_jax.costs.dtypes import dtype_of, probe_doubts
from specdec_jax.costs.machine import device
from specdec_jax.costs.step_cost import (
    alternate,
    busy_doubts,
    draft_round,
    shape_doubts,
    spread_doubts,
    target_pass,
    turns,
)
from specdec_jax.costs.store import doubted, file_for, measured_here, once, say, steadiest, where
from specdec_jax.drafters.draft_models import with_vocabulary
from specdec_jax.loading import LoadedModel
from specdec_jax.sharding import are_shared, mesh_here
from specdec_jax.stopping.static import static
from specdec_jax.types import Drafter, LanguageModel, Statistics

WIDTHS = (1, 2, 4, 6, 8, 12, 16)  # plain decoding is the first
DRAFTS, SLOTS, PASSES = 7, 512, 2
MANY_PASSES = 32  # on accelerators, where a call costs a millisecond and a pass hardly more
FEW = 128  # slots of the second pass by which a slot's cost in a batch is measured; for one row they cost nothing
SECONDS, REPEATS = 4.0, 9  # programs alternate for so long, or so often; three times at least
FASTER = 0.8  # of the kept time, that a pass must take less than for what is kept to be doubted
SAME = 0.1  # of a pass, by which a second measurement may differ and still confirm the first
_disagreed: set[Path] = set()  # files that were measured again because decoding disagreed, once a process


def measured(
    target: LoadedModel,
    drafter: LoadedModel | None,
    batch: int = 1,
    *,
    drafter_of: Callable[[LanguageModel, int], Drafter],
) -> CostModel:
    """c and V(k) of this pair on this machine, from disk or measured now: seconds, after compiling for as many.

    Args:
        drafter: None for one without a model: its step costs nothing.
        drafter_of: (language model, most drafts a round) -> the drafter whose rounds are measured.
        batch: rows that share the passes.
    """
    # Earlier files, without "doubts", say nothing of a busy machine: they are not read.
    shapes = [_shapes(target), None if drafter is None else _shapes(drafter), SLOTS, WIDTHS, "doubts"]
    mesh = mesh_here()
    shapes += [batch, FEW] if batch > 1 else []
    shapes += [dict(mesh.shape), drafter is not None and are_shared(drafter.params)] if mesh else []
    names = [target.name] + ([] if drafter is None else [drafter.name])

    def measure(before: CostModel | None) -> CostModel:
        rows = f" for {batch} rows" if batch > 1 else ""
        say(f"measuring what passes of {' and '.join(names)} cost{rows} on this machine, once")
        table = _measure(target, drafter, batch, before, drafter_of)
        say(sentence(table) + path_of)
        return table

    path = file_for("costs", names, shapes)
    path_of = where(path)
    table = once(path, load_cost_model, save_cost_model, measure)
    return table if path is None else _confirmed(path, table, target, measure)


def look_at(costs: CostModel, counts: Statistics, seconds: float) -> bool:
    """Compares a row's rounds with what measured costs predict; where they disagree, the kept costs become doubtful.

    Then they are measured again at once: by the next `measured` of this process, which happens once, or another's.

    Args:
        counts: of the row, decoded alone in so many seconds.

    Returns:
        Whether kept costs became doubtful.
    """
    doubt = disagreement(costs, counts, seconds)
    path = None if doubt is None else _file_of(costs)
    if doubt is None or path is None or path in _disagreed:
        return False
    # The process that holds the lock is measuring: a text that is done does not wait for it.
    with contextlib.suppress(OSError, ValueError), FileLock(path.with_suffix(".lock"), timeout=0):
        table = load_cost_model(path)
        if not _same(table, costs):  # measured anew meanwhile
            return False
        save_cost_model(path, table._replace(doubts=(*table.doubts, doubt)))
        _disagreed.add(path)
        measured_here.discard(path)
        return True
    return False


def sentence(costs: CostModel) -> str:
    """A line about a cost model."""
    plain = costs.plain_pass
    passes = [f"{time / plain:.2f} at {width}" for width, time in zip(costs.widths, costs.target_pass, strict=True)]
    drafts = f"a drafter step is {costs.ratio:.3f} of a pass of plain decoding ({1e3 * plain:.1f} ms)"
    if not costs.ratio:
        drafts = f"a pass of plain decoding takes {1e3 * plain:.1f} ms"
    slots = f"; every hundred cache slots {1e5 * costs.slot_time:.1f} ms" if costs.slot_time else ""
    return f"{costs.device}: {drafts}; verification by tokens: {', '.join(passes)}{slots}{doubted(costs)}"


def _measure(
    target: LoadedModel,
    drafter: LoadedModel | None,
    batch: int,
    before: CostModel | None,
    drafter_of: Callable[[LanguageModel, int], Drafter],
) -> CostModel:
    """`before`: an earlier table, which confirms passes of a strange shape if they are the same."""
    busy = busy_doubts()
    programs: dict[str, Callable[[], Any]] = {
        str(width): target_pass(target.model, target.params, width, batch, SLOTS, passes=_passes()) for width in WIDTHS
    }
    share = _share_of_slots(target, batch, programs[str(WIDTHS[0])]) if batch > 1 else 0.0
    per = dict.fromkeys(programs, _passes())
    if drafter is not None:
        by_model = drafter_of(with_vocabulary(drafter.model, target.model.spec.vocab_size), DRAFTS)
        options: dict[str, Any] = {"batch": batch, "slots": SLOTS, "temperature": 0.0}
        policy = static(draft_length=DRAFTS)
        programs["drafter"] = draft_round(by_model, drafter.params, policy, keep_log_q=True, measure=False, **options)
        per["drafter"] = DRAFTS
    about = f"{device()}, {dtype_of(target)}, jax {jax.__version__}"

    def table() -> CostModel:
        times = alternate(programs, REPEATS, per, seconds=SECONDS)
        named = {f"a pass of {name} tokens" if name.isdigit() else f"a {name} step": times[name] for name in times}
        doubts = spread_doubts(named)
        step = times.pop("drafter").median if drafter is not None else 0.0
        passes = {int(width): cost.median for width, cost in times.items()}
        slot_time = share * passes[WIDTHS[0]] / (SLOTS - FEW)
        costs = cost_model(step, passes, device=about, batch=batch, slots=SLOTS, slot_time=slot_time)
        confirmed = before is not None and np.allclose(costs.target_pass, before.target_pass, rtol=SAME)
        return costs._replace(doubts=doubts if confirmed else doubts + shape_doubts(passes))

    steady = steadiest(table)
    alone = batch == 1 and mesh_here() is None  # as when dtypes were compared
    return steady._replace(doubts=busy + steady.doubts + (probe_doubts(target, steady.plain_pass) if alone else ()))


def _passes() -> int:
    """Passes of one call."""
    return PASSES if jax.default_backend() == "cpu" else MANY_PASSES


def _share_of_slots(target: LoadedModel, batch: int, many: Callable[[], Any]) -> float:
    """The share of a pass with SLOTS cache slots that one with FEW does without, by passes side by side.

    Wide passes of many rows leave time for three turns only, in whose noise 32 rows were made to draft.
    """
    few = target_pass(target.model, target.params, WIDTHS[0], batch, FEW, passes=_passes())
    times = turns({"many": many, "few": few}, REPEATS, {"many": _passes(), "few": _passes()}, seconds=2 * SECONDS)
    return max(1.0 - float(np.median(np.divide(times["few"], times["many"]))), 0.0)


def _confirmed(
    path: Path, costs: CostModel, target: LoadedModel, measure: Callable[[CostModel | None], CostModel]
) -> CostModel:
    """The costs that another process measured, or new ones if a plain pass is so much faster now that it was busy.

    `look_at` cannot see this for batches and for lookups. Once a pass takes as long, or all is measured anew, no later
    process times one; a slower pass says that the machine is busy now.
    """
    agreed = path.with_suffix(".agreed")
    with contextlib.suppress(OSError), FileLock(path.with_suffix(".lock")):
        if path in measured_here or (agreed.exists() and agreed.stat().st_mtime >= path.stat().st_mtime):
            return costs
        plain_pass = target_pass(target.model, target.params, WIDTHS[0], costs.batch, SLOTS, passes=_passes())
        times = alternate({"1": plain_pass}, REPEATS, {"1": _passes()}, seconds=SECONDS / 4)
        share = times["1"].median / costs.plain_pass
        if share < FASTER:
            say("a pass takes less time than when costs were measured: the machine was busy then")
            costs = measure(costs)
            save_cost_model(path, costs)
        measured_here.add(path)
        if share <= 1 / FASTER:
            agreed.touch()
    return costs


def _file_of(costs: CostModel) -> Path | None:
    """The file that such costs are kept in, by their times, whatever widths they have by now."""
    with contextlib.suppress(OSError, RuntimeError):
        for path in cache_folder("costs").glob("costs-*.json"):
            with contextlib.suppress(OSError, ValueError):
                table = load_cost_model(path)
                if _same(table, costs):
                    return path
    return None


def _same(table: CostModel, costs: CostModel) -> bool:
    return (table.plain_pass, table.drafter_step) == (costs.plain_pass, costs.drafter_step)


def _shapes(model: LoadedModel) -> list[str]:
    """Shapes and dtypes of all weights: a name does not identify them."""
    return [f"{np.shape(leaf)} {leaf.dtype}" for leaf in jax.tree.leaves(model.params)]
