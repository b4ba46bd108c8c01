"""The costs of the current machine: measured once per pair of models, and cached on disk.

A file is identified by everything that determines the time of a pass: both models' names, shapes and dtypes, device,
cores and their instructions, and the version of jax. One process measures, others that need the same costs wait. Costs
measured on a busy machine are wrong. Signs of it are stored in `CostModel.doubts`. A process keeps to the first costs
that it had; the next one measures doubtful ones again, unless the machine is busy then, too.
"""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from filelock import FileLock

from specdec_jax import kernels
from specdec_jax.compilation_cache import cache_folder, shown
from specdec_jax.costs.cost_model import CostModel, load_cost_model, save_cost_model
from specdec_jax.costs.machine import device
from specdec_jax.costs.step_cost import (
    DrafterOf,
    busy_doubts,
    costs_of,
    pass_programs,
    spread_doubts,
    time_policy,
    timed_rounds,
    turns,
)
from specdec_jax.kernels.compiled import cpu_info, say
from specdec_jax.loading import LoadedModel
from specdec_jax.meshes import are_shared
from specdec_jax.sharding import mesh_here
from specdec_jax.stopping.static import static
from specdec_jax.types import StoppingPolicy

WIDTHS = (1, 2, 4, 6, 8, 12, 16)  # measured widths
SLOTS, ROUNDS = 512, 4
MANY_ROUNDS = 16  # on accelerators, where a call costs a millisecond and a round hardly more; more do not fit into FEW
FEW = 128  # slots of the second pass that measures the cost of a slot in a batch; for one row it is negligible
SECONDS, REPEATS = 8.0, 9  # limits on time and number of alternations of programs; at least three

tables: dict[Path, CostModel] = {}  # by file, those that this process goes by


def measured(
    target: LoadedModel,
    drafter: LoadedModel | None,
    batch: int = 1,
    *,
    drafter_of: DrafterOf,
    policy: StoppingPolicy | None = None,
) -> CostModel:
    """c and V(k) of this pair on this machine, from disk or measured now, which takes seconds and as many to compile.

    `drafter` is None for one without a model, whose steps cost nothing; `drafter_of`(language model, maximum draft
    length) gives the drafter whose rounds of `batch` rows are measured. The own computation of a `policy` is measured
    too, unless the drafter has no model or drafts are not chains.
    """
    # Files of earlier versions, which timed passes outside decoders at temperature 0 alone, are not read.
    shapes = [_shapes(target), None if drafter is None else _shapes(drafter), SLOTS, WIDTHS, "rounds - empty"]
    mesh = mesh_here()
    shapes += [batch, FEW] if batch > 1 else []
    shapes += [dict(mesh.shape), drafter is not None and are_shared(drafter.params)] if mesh else []
    names = [target.name] + ([] if drafter is None else [drafter.name])
    rows, path = f" for {batch} rows" if batch > 1 else "", file_for(names, shapes)
    rounds = ROUNDS if jax.default_backend() == "cpu" else MANY_ROUNDS
    options: dict[str, Any] = {"batch": batch, "slots": SLOTS, "rounds": rounds}

    def measure() -> CostModel:
        say(f"measuring what passes of {' and '.join(names)} cost{rows} on this machine, once")
        busy, share = busy_doubts(), 0.0  # the share of a pass's time that its SLOTS - FEW slots take
        if batch > 1:  # apart, because wide passes of many rows allow only three repeats, which are too noisy
            plain = partial(timed_rounds, target, drafter_of(None, 0), None, static(), (1,))
            both = {name: plain(**options | {"slots": size})(0.0) for name, size in (("many", SLOTS), ("few", FEW))}
            spent = turns(both, REPEATS, 2 * SECONDS)
            share = max(1.0 - float(np.median(spent["few"]) / np.median(spent["many"])), 0.0)
        programs, seconds_of = pass_programs(target, drafter, WIDTHS, drafter_of=drafter_of, **options)
        times = seconds_of(turns(programs, REPEATS, SECONDS))
        slot_time = share * times["0 plain pass"].median / (SLOTS - FEW)
        about = {"device": f"{device()}, {target.dtype}, jax {jax.__version__}", "batch": batch, "slots": SLOTS}
        named = {"a {2} at temperature {0}".format(*name.partition(" ")): cost for name, cost in times.items()}
        costs = costs_of(times, slot_time=slot_time, doubts=busy + spread_doubts(named), **about)
        place = "; kept nowhere: measured again next time" if path is None else f"; kept in {shown(path.parent)}"
        say(sentence(costs) + place)
        return costs

    costs = once(path, measure)
    measured_rules = {repr(static()), *(rule.policy for rule in costs.rules)}
    if policy is None or not policy.drafts_chains or drafter is None or repr(policy.bare) in measured_rules:
        return costs
    say(f"measuring what {policy.bare} costs{rows} with {' and '.join(names)}, once")
    rule = time_policy(target, drafter, policy, drafter_of=drafter_of, repeats=REPEATS, seconds=SECONDS, **options)[0]
    doubts = tuple(dict.fromkeys(costs.doubts + busy_doubts()))
    return _stored(path, costs._replace(rules=(*costs.rules, rule), doubts=doubts))


def sentence(costs: CostModel) -> str:
    """A one-line description of a cost model."""
    plain = costs.plain_pass
    passes = [f"{time / plain:.2f} at {width}" for width, time in zip(costs.widths, costs.target_pass, strict=True)]
    drafts = f"a drafter step is {costs.ratio:.3f} of a pass of plain decoding ({1e3 * plain:.1f} ms)"
    if not costs.ratio:
        drafts = f"a pass of plain decoding takes {1e3 * plain:.1f} ms"
    sampled = f"; sampled, {costs.sampled_step / (costs.sampled_plain or 1):.3f} of {1e3 * costs.sampled_plain:.1f} ms"
    sampled = sampled if costs.sampled_pass else "; at other temperatures taken to be the same"
    doubts = f"; doubtful: {', '.join(costs.doubts)}" if costs.doubts else ""
    slots = f"; every hundred cache slots {1e5 * costs.slot_time:.1f} ms" if costs.slot_time else ""
    return f"{costs.device}: {drafts}; verification by tokens: {', '.join(passes)}{sampled}{slots}{doubts}"


def _shapes(model: LoadedModel) -> list[str]:
    """Shapes and dtypes of all weights, because a name does not identify them."""
    return [f"{np.shape(leaf)} {leaf.dtype}" for leaf in jax.tree.leaves(model.params)]


def once(path: Path | None, measure: Callable[[], CostModel]) -> CostModel:
    """The contents of the file; measured and written if it is missing, cannot be read, or is doubtful.

    A doubtful file is used unchanged while the machine is busy: a second measurement would be as doubtful, and every
    process would wait for one.
    """
    if path is None:
        return measure()
    with FileLock(path.with_suffix(".lock")):
        if path in tables:
            return tables[path]
        table = None
        try:
            table = load_cost_model(path) if path.is_file() else None
        except (ValueError, OSError) as error:
            say(f"{error}: measuring again")
        if table is not None and table.doubts:
            busy = busy_doubts()
            then = "; used, since this machine is busy now" if busy else ": measuring again"
            say(f"the cached costs are doubtful ({', '.join(table.doubts)}){then}")
            table = table if busy else None
        if table is None:
            table = _stored(path, measure())
        tables[path] = table
        return table


def _stored(path: Path | None, table: CostModel) -> CostModel:
    """The table, which this process goes by from now on, written to the file but for rules of users' files, which they
    may edit."""
    if path is not None:
        tables[path] = table
        try:
            save_cost_model(path, table._replace(rules=tuple(rule for rule in table.rules if ".py" not in rule.policy)))
        except OSError as error:
            say(f"{error}; measured again next time")
    return table


def file_for(names: Sequence[str], shapes: Any) -> Path | None:
    """The cache file of a measurement; None if the cache cannot be written."""
    try:
        folder = cache_folder("costs")
    except (OSError, RuntimeError):
        return None
    instructions = cpu_info("flags") or platform.machine()  # the name of a virtual CPU does not determine them
    here = device(), instructions, jax.__version__, kernels.path(), kernels.compiled.SOURCE.read_text(encoding="utf-8")
    identity = json.dumps(["costs", shapes, *here], sort_keys=True)
    label = re.sub(r"[^\w.@-]+", "_", "-".join(Path(name).name for name in names))[:80]
    return folder / f"costs-{label}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"
