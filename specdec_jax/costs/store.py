"""The cache of measurements of this machine.

A table that may be wrong has a clause for each doubt. A process keeps to the first table that it had, and says once
what is doubtful; the next one measures a doubtful table again, unless the machine is busy then, too.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
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

tables: dict[Path, CostModel] = {}  # by file, those that this process goes by


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
            table = measure()
            try:
                save_cost_model(path, table)
            except OSError as error:
                say(f"{error}; measured again next time")
        tables[path] = table
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
