"""Compiles one program for one chip, in an environment of that chip's compiler, and writes what it found as JSON.

`python -m experiments.accelerators` runs this in a process of its own: a compiler that dies ends no study.
"""

import json
import math
import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.lib import chip_reports
from experiments.lib.chip_jobs import Job, environment
from experiments.lib.chip_programs import PAIRS, bytes_of, placed, program, shapes_of, weights_read
from experiments.lib.chips import CHIPS
from specdec_jax.decoding.one_graph import OPTIONS
from specdec_jax.sharding import MODEL, make_mesh, mesh_sizes

SIZES = ("argument", "alias", "output", "temp")


def compile_for(job: Job) -> dict[str, Any]:
    """Compiles and reports; a compiler's refusal is a fact too."""
    chip = CHIPS[job.chip]
    options = OPTIONS if job.one_graph and chip.platform == "cuda" else {}
    mesh = make_mesh(job.mesh, chip.devices(math.prod(mesh_sizes(job.mesh))))
    pair = PAIRS[job.pair]._replace(int8=job.int8)
    shapes = placed(shapes_of(pair, job.batch, job.slots, job.max_draft_length, options), pair, mesh)
    function, arguments = program(job.program, shapes)
    arguments = jax.tree.map(lambda leaf: _everywhere(leaf, mesh), arguments)
    found: dict[str, Any] = {
        "device": str(mesh.devices.flat[0].device_kind),
        "jax": jax.__version__,
        "weights_read": weights_read(pair, mesh.shape[MODEL]),
        "caches": bytes_of((shapes.state.target_cache, shapes.state.drafter)),
    }
    watch = time.perf_counter()
    try:
        with jax.set_mesh(mesh) if mesh.size > 1 else nullcontext():  # here alone: nothing can run on such a mesh
            compiled = function.trace(*arguments).lower(lowering_platforms=(chip.platform,)).compile()
    except Exception as error:
        return found | {"error": re.sub(r"\s+", " ", str(error))[:600]}
    found |= {"seconds": time.perf_counter() - watch, "error": None}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    (Path(job.out) / "program.hlo").write_text(text, encoding="utf-8")
    found |= {name: getattr(memory, f"{name}_size_in_bytes") for name in SIZES}
    found["bytes_accessed"] = (compiled.cost_analysis() or {}).get("bytes accessed")
    return found | chip_reports.facts(chip, text, Path(job.out) / "dump", shapes.decoder.parts.widths)


def _everywhere(leaf: Any, mesh: Mesh) -> Any:
    """Whole on every chip, unless it lies somewhere already."""
    if isinstance(leaf, int) or getattr(leaf, "sharding", None) is not None:
        return leaf  # static, or placed
    place = NamedSharding(mesh, PartitionSpec())
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
