"""The cache of measurements of this machine, and the conditions for measuring again.

A table that may be wrong has a clause for each doubt. The process that measured it uses it anyway; the next one
measures again, unless the machine is busy then, too.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock

from specdec_jax import kernels
from specdec_jax.compilation_cache import cache_folder, shown
from specdec_jax.costs.cost_model import CostModel, load_cost_model, save_cost_model
from specdec_jax.costs.machine import device, features
from specdec_jax.costs.step_cost import busy_doubts
from specdec_jax.kernels.compiled import say as say

measured_here: set[Path] = set()  # files that this process wrote and uses even if doubtful
doubtful_here: set[Path] = set()  # files of others that this process uses although they are doubtful


def once(path: Path | None, measure: Callable[[CostModel | None], CostModel]) -> CostModel:
    """The contents of the file; measured and written if it is missing, or was left doubtful by another process.

    A file that cannot be read is measured again. A doubtful one is used unchanged while the machine is busy: a second
    measurement would be as doubtful, and every process would wait for one.
    """
    with nullcontext() if path is None else FileLock(path.with_suffix(".lock")):
        before = None
        if path is not None and path.is_file():
            try:
                before = load_cost_model(path)
                if not before.doubts or path in measured_here | doubtful_here:
                    return before
                doubtful = f"the cached costs are doubtful ({', '.join(before.doubts)})"
                if busy_doubts():
                    if not doubtful_here:  # one line per process
                        say(f"{doubtful}; used, since this machine is busy now")
                    doubtful_here.add(path)
                    return before
                say(f"{doubtful}: measuring again")
            except (ValueError, OSError) as error:
                say(f"{error}: measuring again")
        table = measure(before)
        try:
            if path is not None:
                save_cost_model(path, table)
                measured_here.add(path)
        except OSError as error:
            say(f"{error}; measured again next time")
        return table


def file_for(names: Sequence[str], shapes: Any) -> Path | None:
    """The cache file of a measurement; None if the cache cannot be written."""
    try:
        folder = cache_folder("costs")
    except (OSError, RuntimeError):
        return None
    here = device(), features(), jax.__version__, kernels.path(), kernels.compiled.SOURCE.read_text(encoding="utf-8")
    identity = json.dumps(["costs", shapes, *here], sort_keys=True)
    label = re.sub(r"[^\w.@-]+", "_", "-".join(Path(name).name for name in names))[:80]
    return folder / f"costs-{label}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"


def where(path: Path | None) -> str:
    """The end of a message about a table: where it is cached."""
    return "; kept nowhere: measured again next time" if path is None else f"; kept in {shown(path.parent)}"


def doubted(table: CostModel) -> str:
    """The end of a message about a table: its doubts."""
    return f"; doubtful: {', '.join(table.doubts)}" if table.doubts else ""


def steadiest(measure: Callable[[], CostModel]) -> CostModel:
    """A measured table, or, if it is doubtful, the less doubtful of two: short bursts of load end before the second."""
    first = measure()
    return min(first, measure(), key=lambda table: len(table.doubts)) if first.doubts else first
