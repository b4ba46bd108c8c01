"""Compiles one program for one chip, in an environment of that chip's compiler, and writes what it found as JSON.

`python -m experiments.accelerators` runs this in a process of its own: a compiler that dies ends no study.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import SingleDeviceSharding

from experiments.lib import chip_reports
from experiments.lib.chip_jobs import Job, environment
from experiments.lib.chip_programs import PAIRS, bytes_of, program, shapes_of, weights_read
from experiments.lib.chips import CHIPS
from specdec_jax.decoding.one_graph import OPTIONS

SIZES = ("argument", "alias", "output", "temp")


def compile_for(job: Job) -> dict[str, Any]:
    """Compiles and reports; a compiler's refusal is a fact too."""
    chip = CHIPS[job.chip]
    options = OPTIONS if job.one_graph and chip.platform == "cuda" else {}
    shapes = shapes_of(PAIRS[job.pair], job.batch, job.slots, job.max_draft_length, options)
    function, arguments = program(job.program, shapes)
    device = chip.device()
    arguments = jax.tree.map(lambda leaf: _placed(leaf, SingleDeviceSharding(device)), arguments)
    found: dict[str, Any] = {
        "device": str(device.device_kind),
        "jax": jax.__version__,
        "weights_read": weights_read(PAIRS[job.pair]),
        "caches": bytes_of((shapes.state.target_cache, shapes.state.drafter)),
    }
    watch = time.perf_counter()
    try:
        compiled = function.trace(*arguments).lower(lowering_platforms=(chip.platform,)).compile()
    except Exception as error:
        return found | {"error": re.sub(r"\s+", " ", str(error))[:600]}
    found |= {"seconds": time.perf_counter() - watch, "error": None}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    (Path(job.out) / "program.hlo").write_text(text, encoding="utf-8")
    found |= {name: getattr(memory, f"{name}_size_in_bytes") for name in SIZES}
    found["bytes_accessed"] = (compiled.cost_analysis() or {}).get("bytes accessed")
    return found | chip_reports.facts(chip, text, Path(job.out) / "dump", shapes.decoder.parts.widths)


def _placed(leaf: Any, place: SingleDeviceSharding) -> Any:
    if isinstance(leaf, int):
        return leaf  # static
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=place)


def main() -> int:
    """Runs one job; its facts go to facts.json in its folder."""
    job = tyro.cli(Job)
    Path(job.out).mkdir(parents=True, exist_ok=True)
    missing = {name: value for name, value in environment(job).items() if os.environ.get(name) != value}
    if missing:
        raise SystemExit(f"start with {missing}: jax reads them when it starts")
    (Path(job.out) / "facts.json").write_text(json.dumps(compile_for(job), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
