"""Compiles one program for one chip, in an environment of that chip's compiler, and writes its facts as JSON.

`python -m experiments.accelerators` runs this in a process of its own: a compiler that dies ends no study.
"""

import json
import math
import os
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.lib import chip_reports
from experiments.lib.chip_programs import PAIRS, bytes_of, placed, program, shapes_of, weights_read
from experiments.lib.chips import CHIPS
from specdec_jax.sharding import MODEL, make_mesh, mesh_sizes

COMMAND = "experiments.lib.chip_compile"
SIZES = ("argument", "alias", "output", "temp")


@dataclass(frozen=True)
class Job:
    """What to compile, and the folder for the program's text, the compiler's dump and facts.json."""

    chip: str
    pair: str
    program: str
    out: str
    batch: int = 1
    slots: int = 512
    max_draft_length: int = 7
    mesh: str = "data=1,model=1"
    """Numbers of chips, as `--mesh` elsewhere."""
    int8: bool = False
    """The matrices of both models in eight bits."""


def environment(job: Job) -> dict[str, str]:
    """Environment variables that the process needs before jax starts."""
    # The lock is for programs that run on a TPU; the one of a killed process would stop every compilation after it.
    variables = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if CHIPS[job.chip].platform == "cuda":
        flags = ["--xla_gpu_autotune_level=0", f"--xla_dump_to={job.out}/dump", "--xla_dump_hlo_module_re=.*"]
        variables["XLA_FLAGS"] = " ".join(flags)
    return variables


def compile_for(job: Job) -> dict[str, Any]:
    """Compiles and reports; a compiler's refusal is a fact too."""
    chip = CHIPS[job.chip]
    mesh = make_mesh(job.mesh, chip.devices(math.prod(mesh_sizes(job.mesh))))
    pair = PAIRS[job.pair]._replace(int8=job.int8)
    shapes = placed(shapes_of(pair, job.batch, job.slots, job.max_draft_length), pair, mesh)
    function, arguments = program(job.program, shapes)
    whole = NamedSharding(mesh, PartitionSpec())  # on every chip, what is neither static nor placed
    arguments = jax.tree.map(
        lambda leaf: (
            leaf
            if isinstance(leaf, int) or getattr(leaf, "sharding", None) is not None
            else jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=whole)
        ),
        arguments,
    )
    facts: dict[str, Any] = {
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
        return facts | {"error": re.sub(r"\s+", " ", str(error))[:600]}
    facts |= {"seconds": time.perf_counter() - watch, "error": None}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    (Path(job.out) / "program.hlo").write_text(text, encoding="utf-8")
    facts |= {name: getattr(memory, f"{name}_size_in_bytes") for name in SIZES}
    facts["bytes_accessed"] = (compiled.cost_analysis() or {}).get("bytes accessed")
    return facts | chip_reports.facts(chip.platform, text, Path(job.out) / "dump", shapes.decoder.parts.widths)


def main() -> int:
    """Compiles the job that the command line holds as JSON; its facts go to facts.json in its folder."""
    job = Job(**json.loads(sys.argv[1]))
    Path(job.out).mkdir(parents=True, exist_ok=True)
    missing = {name: value for name, value in environment(job).items() if os.environ.get(name) != value}
    if missing:
        raise SystemExit(f"start with {missing}: jax reads them when it starts")
    (Path(job.out) / "facts.json").write_text(json.dumps(compile_for(job), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
