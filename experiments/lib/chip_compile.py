"""Compiles one program for one chip, in an environment of that chip's compiler, and writes its facts as JSON.

`python -m experiments.accelerators` runs this in a process of its own: a compiler that dies ends no study.
The facts are operations, kernels and estimated cycles by part of a round, and host round trips.

A part is recognised by the decoder's name scopes, which the compilers keep as `op_name`. Parts of a round have paths:
`greedy` runs when no row is sampled, `sampled` when some are and none is cut (top-k, top-p, min-p), `all` is everything
that is compiled.
"""

import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.lib.chip_programs import CHIPS, PAIRS, bytes_of, placed, program, shapes_of, weights_read
from specdec_jax.meshes import make_mesh, mesh_sizes
from specdec_jax.sharding import MODEL

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
BRANCH = re.compile(r"cond/branch_(\d+)_fun")
PATHS = ("greedy", "sampled", "all")
PARTS = {  # part of a round: what the names of its operations hold; the first that is there
    "draft feed": "/draft/draft_feed/",
    "draft step": "/draft/while/body",
    "draft": "/draft/",
    "commit": "/commit/",
}
ON_HOST = {"kWhile": "whiles", "kConditional": "conditionals"}  # thunks that wait for a predicate on the host
THUNK = re.compile(r"^(\s*)(\d+): (k\w+)")


class Operation(NamedTuple):
    """An instruction, or a GPU's kernel, and where in a round it belongs."""

    op_name: str
    cycles: int = 0


def part_of(op_name: str) -> tuple[str, str]:
    """(part of the round, what is left of the name after it). A verification's part says its width's place."""
    op_name = re.sub(r"by_platform/cond/branch_\d+_fun/", "", op_name)  # chosen when it is compiled: no branch
    for part, mark in PARTS.items():
        if mark in op_name:
            return part, op_name.split(mark, 1)[1]
    match = re.search(r"/verify/cond/branch_(\d+)_fun(.*)", op_name)
    if match:
        return f"verify {match[1]}", match[2]
    for part in ("verify", "prefill"):
        if f"/{part}/" in op_name:
            return part, op_name.split(f"/{part}/", 1)[1]
    return "other", op_name


def on_path(rest: str, path: str) -> bool:
    """Whether an operation runs on that path, by the branches that its name still goes through."""
    branches = [int(branch) for branch in BRANCH.findall(rest)]
    if path == "all" or not branches:
        return True
    if path == "greedy":
        return branches[0] == 0
    return branches[0] == 1 and not any(branches[1:])


def by_part(operations: Iterable[Operation]) -> dict[str, dict[str, dict[str, int]]]:
    """part -> path -> {"ops": ..., "cycles": ...}."""
    parts: dict[str, dict[str, Counter[str]]] = {}
    for operation in operations:
        part, rest = part_of(operation.op_name)
        for path in PATHS:
            if on_path(rest, path):
                counts = parts.setdefault(part, {}).setdefault(path, Counter())
                counts.update(ops=1, cycles=operation.cycles)
    return {part: {path: dict(counts) for path, counts in paths.items()} for part, paths in parts.items()}


def hlo_operations(text: str) -> list[Operation]:
    """Every instruction of a TPU's program that has an estimate of cycles."""
    matches = [(OP_NAME.search(line), CYCLES.search(line)) for line in text.splitlines()]
    return [Operation(name[1] if name else "", int(cycles[1])) for name, cycles in matches if cycles]


class Thunks(NamedTuple):
    """Kernels and other operations launched by a GPU program."""

    kernels: list[Operation]
    counts: dict[str, int]  # kernels, copies, command_buffers, and on the host whiles and conditionals


def thunks(sequence: str, annotations: Mapping[int, str], names: Mapping[str, str]) -> Thunks:
    """Reads XLA's dump of the thunks as they run, and what each is named after.

    A while or conditional that no command buffer holds reads its predicate on the host.
    """
    kernels, counts, inside = [], Counter[str](), []
    for line in sequence.splitlines():
        match = THUNK.match(line)
        if not match:
            continue
        depth, number, kind = len(match[1]), int(match[2]), match[3]
        inside = [at for at in inside if at < depth]
        if kind == "kCommandBuffer":
            inside.append(depth)
            counts["command_buffers"] += 1
        elif kind in ON_HOST and not inside:
            counts[ON_HOST[kind]] += 1
        elif kind == "kCopy":
            counts["copies"] += 1
        elif kind not in ON_HOST:
            counts["kernels"] += 1
            kernels.append(Operation(names.get(annotations.get(number, ""), "")))
    return Thunks(kernels, dict(counts))


def read_thunks(dump: Path) -> Thunks:
    """The thunks of the one program that was dumped. Raises ValueError where the compiler wrote none."""
    ending = ".thunk_sequence_after_thunk_passes.txt"
    sequences = sorted(dump.glob(f"*{ending}"))
    if not sequences:
        raise ValueError(f"the compiler wrote no thunk sequence to {str(dump)!r}")
    stem = sequences[-1].name.removesuffix(ending)
    optimized = next(dump.glob(f"{stem}.*gpu_after_optimizations.txt")).read_text(encoding="utf-8")
    metadata = (dump / f"{stem}.thunk_metadata.txt").read_text(encoding="utf-8")
    pairs = re.findall(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)', metadata)
    lines = [(INSTRUCTION.match(line), OP_NAME.search(line)) for line in optimized.splitlines()]
    names = {instruction[1]: name[1] for instruction, name in lines if instruction and name}
    annotations = {int(number): name for name, number in pairs}
    return thunks(sequences[-1].read_text(encoding="utf-8"), annotations, names)


def counts_of(text: str) -> dict[str, int]:
    """How often the optimised program has these instructions."""
    return {name: len(re.findall(rf" {name}\(", text)) for name in ("while", "conditional", "copy", "fusion")}


def collectives_of(text: str) -> dict[str, int]:
    """How often the optimised program passes values between chips, by instruction."""
    return dict(sorted(Counter(COLLECTIVE.findall(text)).items()))


def facts_of(platform: str, text: str, dump: Path, widths: Sequence[int]) -> dict[str, Any]:
    """All that is read off a compiled program; its branches of the verification are called by their widths."""
    report: dict[str, Any] = {"instructions": counts_of(text), "collectives": collectives_of(text)}
    if platform == "tpu":
        operations = hlo_operations(text)
    else:
        operations, report["thunks"] = read_thunks(dump)
    names = {f"verify {place}": f"verify {width} tokens" for place, width in enumerate(widths)}
    return report | {"parts": {names.get(part, part): counts for part, counts in by_part(operations).items()}}


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
    whole = NamedSharding(mesh, PartitionSpec())  # on every chip, what is not placed
    arguments = jax.tree.map(
        lambda leaf: (
            leaf
            if getattr(leaf, "sharding", None) is not None
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
    return facts | facts_of(chip.platform, text, Path(job.out) / "dump", shapes.decoder.parts.widths)


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
