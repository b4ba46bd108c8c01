"""Programs of a pair of models, from shapes alone, compiled for a chip that need not be here, and what they hold.

No weights are loaded; programs are those of a generation. `python -m experiments.accelerators` runs this in a process
of its own, in an environment of that chip's compiler: a compiler that dies ends no study. It writes facts as JSON:
operations, kernels and estimated cycles by part of a round, and host round trips.

`CHIPS` are the accelerators, with what is publicly known of them and their topologies. A TPU's clock is not published.
Here it is the public peak of bfloat16 products over the operations a cycle that the compiler itself estimates for a
large product (131,072 on v5e, 262,144 on v5p, 524,288 on v6e, to within 4 to 13 %).

A part is recognised by the decoder's name scopes, which the compilers keep as `op_name`. Parts of a round have paths:
`greedy` runs when no row is sampled, `sampled` when some are and none is cut (top-k, top-p, min-p), `all` is everything
that is compiled.
"""

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec_jax import stopping, verification
from specdec_jax.contrib.trees import survival_tree
from specdec_jax.decoding import Decoder, build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.state import fresh_state
from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.drafters.draft_models.reduced_head import reduce_params, with_reduced_head
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading.families import family_of
from specdec_jax.loading.load import SHARE_DRAFTER
from specdec_jax.meshes import caches_laid, make_mesh, mesh_sizes, weight_sharding
from specdec_jax.models import llama
from specdec_jax.models.weights import placed_shapes
from specdec_jax.sharding import DATA, MODEL, sharding

TARGETS = Path(__file__).resolve().parents[2] / "configs" / "chips"


class Chip(NamedTuple):
    """A kind of accelerator. Sources: Google Cloud's TPU pages; NVIDIA's data sheets (configs/chips/*.txtpb)."""

    name: str
    platform: str  # tpu or cuda
    topologies: dict[int, str]  # slices that the compiler takes, by how many chips they have
    bandwidth: float  # of its memory, bytes a second
    memory: float  # bytes
    clock: float = 0.0  # Hz, of a TPU's cycles

    @property
    def packages(self) -> str:
        """The requirements file whose environment compiles for it."""
        return f"requirements-{'tpu' if self.platform == 'tpu' else 'gpu'}.txt"

    def devices(self, count: int) -> list[Any]:
        """Those of the smallest slice with so many, in that environment. Raises ValueError where none has as many."""
        from jax.experimental import topologies

        sizes = [size for size in sorted(self.topologies) if size >= count]
        if not sizes:
            largest = max(self.topologies)
            raise ValueError(f"{count} chips of {self.name} are more than {largest}, the most that is served")
        topology = self.topologies[sizes[0]]
        options: dict[str, Any] = {"topology_name": topology}
        if self.platform == "cuda":
            target = (TARGETS / f"{self.name}.txtpb").read_text(encoding="utf-8")
            options = {"target_config": target, "topology": topology}
        return list(topologies.get_topology_desc(platform=self.platform, **options).devices)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("tpu-v5e", "tpu", {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}, 819e9, 16e9, 1.5e9),
        Chip("tpu-v5p", "tpu", {4: "v5p:2x2x1", 8: "v5p:2x2x2"}, 2765e9, 95e9, 1.75e9),
        Chip("tpu-v6e", "tpu", {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"}, 1640e9, 32e9, 1.75e9),
        Chip("h100", "cuda", {1: "1x1x1", 8: "1x1x8"}, 3352e9, 85e9),
        Chip("b200", "cuda", {1: "1x1x1", 8: "1x1x8"}, 7672e9, 192e9),
    )
}

SMOLLM2 = llama.LlamaConfig(49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192, tie_word_embeddings=True)
SMALL_DRAFTER = llama.LlamaConfig(49152, 224, 640, 4, 4, 2, 56, max_position_embeddings=8192, tie_word_embeddings=True)
READING_DRAFTER = llama_reading.reading_config(SMALL_DRAFTER, (16, 22, 26), SMOLLM2.hidden_size)
LLAMA_1B = llama.LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, max_position_embeddings=8192, tie_word_embeddings=True)
LLAMA_8B = llama.LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_position_embeddings=8192)
LLAMA_70B = llama.LlamaConfig(128256, 8192, 28672, 80, 64, 8, 128, max_position_embeddings=8192)


class Pair(NamedTuple):
    """Shapes of a target and a drafter."""

    target: llama.LlamaConfig
    drafter: llama.LlamaConfig
    draft_vocabulary: int | None = None
    int8: bool = False  # whether both models' matrices are int8 (models/int8.py)
    siblings: int = 0  # maximum number that `survival` verifies per draft


PAIRS = {
    "smollm2-reading": Pair(SMOLLM2, READING_DRAFTER, 8192),  # the built-in one as `generate` uses it
    "smollm2-combs": Pair(SMOLLM2, READING_DRAFTER, 8192, siblings=3),
    "smollm2": Pair(SMOLLM2, SMALL_DRAFTER, 8192),
    "smollm2-whole": Pair(SMOLLM2, SMALL_DRAFTER),
    "8b-1b": Pair(LLAMA_8B, LLAMA_1B),
    "70b-8b": Pair(LLAMA_70B, LLAMA_8B),
    "tiny": Pair(replace(SMOLLM2, num_hidden_layers=2), replace(SMALL_DRAFTER, num_hidden_layers=1), 8192),
}
PROGRAMS = ("prefill", "run", "step", "extend")


class Shapes(NamedTuple):
    """Arguments with which the programs of a pair are compiled."""

    decoder: Decoder
    params: ModelParams  # leaves are jax.ShapeDtypeStruct, as in all fields below
    reader: Any  # the drafter's parameters for a prefill whose hidden states it reads, else None
    request: Any
    state: Any


def shapes_of(pair: Pair, batch: int, slots: int, max_draft_length: int) -> Shapes:
    """The decoder of a pair with `survival` and token rejection in bfloat16, and the shapes of a generation of it."""
    target = llama.language_model(pair.target, jnp.bfloat16)
    drafter = family_of(pair.drafter).language_model(pair.drafter, jnp.bfloat16)
    drafter_params = _weights(pair.drafter, pair.int8)
    if pair.draft_vocabulary is not None:
        tokens, whole = np.arange(pair.draft_vocabulary), drafter
        drafter = with_reduced_head(whole)
        drafter_params = jax.eval_shape(lambda tree: reduce_params(whole, tree, tokens), drafter_params)
    policy = survival_tree(siblings=pair.siblings) if pair.siblings else stopping.survival()
    decoder = build_decoder(target, drafter_of(drafter, max_draft_length), policy, verification.rejection())
    params = ModelParams(_weights(pair.target, pair.int8), drafter_params)
    request, _ = fresh_state(decoder.parts, [[1, 2, 3]] * batch, max_new_tokens=slots // 4, slots=slots)
    prompt, reader = (request.tokens, request.length), params.drafter if decoder.parts.drafter.layers else None
    cache, reads = jax.eval_shape(decoder.jitted["prefill"], params.target, reader, *prompt)
    drafted = jax.eval_shape(decoder.jitted["prefill_drafter"], params.drafter, *prompt, reads)
    return Shapes(decoder, params, reader, request, request._replace(target_cache=cache, drafter=drafted))


def placed(shapes: Shapes, pair: Pair, mesh: Mesh) -> Shapes:
    """The same on a mesh: chips share rows, the weights and heads of caches; a small drafter is whole on each."""

    def laid(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=place)

    def put(leaf: Any, *axes: Any) -> Any:
        return laid(leaf, sharding(mesh, np.shape(leaf), *axes))

    def weights(config: llama.LlamaConfig, tree: Any) -> Any:
        return placed_shapes(family_of(config).parameter_table(config), tree, lambda axes: weight_sharding(mesh, axes))

    def caches(tree: Any, shared: bool) -> Any:
        return jax.tree.map(laid, tree, caches_laid(mesh, tree, shared))

    shared, whole, caches_of = is_shared(pair), shapes.params.drafter, shapes.state
    drafter = weights(pair.drafter, whole) if shared else jax.tree.map(put, whole)
    request, state = (jax.tree.map(lambda leaf: put(leaf, DATA), tree) for tree in (shapes.request, shapes.state))
    state = state._replace(target_cache=caches(caches_of.target_cache, True), drafter=caches(caches_of.drafter, shared))
    params = ModelParams(weights(pair.target, shapes.params.target), drafter)
    return Shapes(shapes.decoder, params, drafter if shapes.reader is not None else None, request, state)


def is_shared(pair: Pair) -> bool:
    """Whether chips share the drafter's weights, as `load_drafter` has it; those with a vocabulary are small here."""
    return pair.draft_vocabulary is None and bytes_of(_weights(pair.drafter, pair.int8)) >= SHARE_DRAFTER


def _weights(config: llama.LlamaConfig, int8: bool) -> Any:
    family = family_of(config)
    shapes = jax.eval_shape(lambda key: family.init_params(config, key, jnp.bfloat16), jax.random.key(0))
    return placed_shapes(family.parameter_table(config), shapes, int8=int8)


def weights_read(pair: Pair, shares: int = 1) -> dict[str, int]:
    """Bytes of weights that a pass of either model reads; `shares`: chips that share those of large models."""
    read = {}
    for role, config, rows in (("target", pair.target, None), ("drafter", pair.drafter, pair.draft_vocabulary)):
        weights = dict(_weights(config, pair.int8))
        embedding = bytes_of(weights.pop("embedding"))
        head = embedding * (rows or config.vocab_size) // config.vocab_size if config.tie_word_embeddings else 0
        read[role] = (bytes_of(weights) + head) // (shares if role == "target" or is_shared(pair) else 1)
    return read


def bytes_of(tree: Any) -> int:
    """Bytes of all leaves of shapes."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def program(name: str, shapes: Shapes) -> tuple[Any, tuple[Any, ...]]:
    """(jitted function, arguments) of one of PROGRAMS."""
    decoder, params, reader, request, state = shapes
    arguments: dict[str, tuple[Any, ...]] = {
        "prefill": (params.target, reader, request.tokens, request.length),
        "run": (params, state, *2 * [jax.ShapeDtypeStruct((), jnp.int32)]),
        "step": (params, state),
        "extend": (params, state, request),
    }
    return decoder.jitted[name], arguments[name]


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
LARGE_PARTS = {"verify": "/verify/", "prefill": "/prefill/"}  # what is in none of these, nor in a width's branch
ON_HOST = {"kWhile": "whiles", "kConditional": "conditionals"}  # thunks that wait for a predicate on the host
THUNK = re.compile(r"^(\s*)(\d+): (k\w+)")
Operation = tuple[str, int]  # an instruction's or kernel's name, which says where in a round it belongs, and cycles


def by_part(operations: Iterable[Operation], widths: Sequence[int]) -> dict[str, dict[str, dict[str, int]]]:
    """part -> path -> {"ops": ..., "cycles": ...}; branches of the verification are called by their `widths`."""
    parts: dict[str, dict[str, Counter[str]]] = {}
    of_width = re.compile(r"/verify/cond/branch_(\d+)_fun" if len(widths) > 1 else "(?!)")  # one width has no branch
    for op_name, cycles in operations:
        name = re.sub(r"by_platform/cond/branch_\d+_fun/", "", op_name)  # chosen when it is compiled: no branch
        verified = of_width.search(name)
        branch = {f"verify {widths[int(verified[1])]} tokens": verified[0]} if verified else {}
        marks = PARTS | branch | LARGE_PARTS
        part, mark = next(((part, mark) for part, mark in marks.items() if mark in name), ("other", ""))
        branches = [int(branch) for branch in BRANCH.findall(name.partition(mark)[2] if mark else name)]
        paths = {
            "greedy": branches[:1] in ([], [0]),
            "sampled": not branches or branches[0] == 1 and not any(branches[1:]),
        }
        for path in PATHS:
            if paths.get(path, True):
                parts.setdefault(part, {}).setdefault(path, Counter()).update(ops=1, cycles=cycles)
    return {part: {path: dict(counts) for path, counts in paths.items()} for part, paths in parts.items()}


def op_names(text: str) -> dict[str, str]:
    """The `op_name` of each instruction of an optimised program's text that has one."""
    lines = [(INSTRUCTION.match(line), OP_NAME.search(line)) for line in text.splitlines()]
    return {instruction[1]: name[1] for instruction, name in lines if instruction and name}


def facts_of(platform: str, text: str, dump: Path, widths: Sequence[int]) -> dict[str, Any]:
    """All that is read off a compiled program, of a GPU off its dump: XLA's text of the thunks as they run, and what
    each is named after. Raises ValueError for no thunks.
    `instructions` and `collectives`, which pass values between chips: how often the optimised program has them;
    `thunks`, a GPU's: counts of kernels, copies, command_buffers, and those of ON_HOST; `parts`: as `by_part`, of a
    TPU's instructions with an estimate of cycles or a GPU's kernels."""
    names = ("while", "conditional", "copy", "fusion")
    report: dict[str, Any] = {"instructions": {name: len(re.findall(rf" {name}\(", text)) for name in names}}
    report["collectives"] = dict(sorted(Counter(COLLECTIVE.findall(text)).items()))
    if platform == "tpu":
        matches = [(OP_NAME.search(line), CYCLES.search(line)) for line in text.splitlines()]
        operations = [(name[1] if name else "", int(cycles[1])) for name, cycles in matches if cycles]
        return report | {"parts": by_part(operations, widths)}
    ending = ".thunk_sequence_after_thunk_passes.txt"
    sequences = sorted(dump.glob(f"*{ending}"))
    if not sequences:
        raise ValueError(f"the compiler wrote no thunk sequence to {str(dump)!r}")
    stem = sequences[-1].name.removesuffix(ending)
    optimized = next(dump.glob(f"{stem}.*gpu_after_optimizations.txt")).read_text(encoding="utf-8")
    metadata = (dump / f"{stem}.thunk_metadata.txt").read_text(encoding="utf-8")
    pairs = re.findall(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)', metadata)
    scopes = op_names(optimized)
    annotations = {int(number): name for name, number in pairs}
    kernels, counts, inside = [], Counter[str](), []
    for match in filter(None, map(THUNK.match, sequences[-1].read_text(encoding="utf-8").splitlines())):
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
            kernels.append((scopes.get(annotations.get(number, ""), ""), 0))
    return report | {"thunks": dict(counts), "parts": by_part(kernels, widths)}


COMMAND = "experiments.lib.chips"
SLOTS = 512  # cache slots per row
SIZES = ("argument", "alias", "output", "temp")


class Job(NamedTuple):
    """What to compile, and the folder for the program's text, the compiler's dump and facts.json."""

    chip: str
    pair: str
    program: str
    out: str
    batch: int = 1
    max_draft_length: int = 7
    mesh: str = "data=1,model=1"  # numbers of chips, as `--mesh` elsewhere
    int8: bool = False  # the matrices of both models in eight bits


def environment(job: Job) -> dict[str, str]:
    """Environment variables that the process needs before jax starts."""
    # The lock is for programs that run on a TPU; the one of a killed process would stop every compilation after it.
    variables = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    variables["SPECDEC_JAX_KERNELS"] = "off"  # branches of a CPU's kernels, which no chip has, hide products
    if CHIPS[job.chip].platform == "cuda":
        flags = ["--xla_gpu_autotune_level=0", f"--xla_dump_to={job.out}/dump", "--xla_dump_hlo_module_re=.*"]
        variables["XLA_FLAGS"] = " ".join(flags)
    return variables


def compile_for(job: Job) -> dict[str, Any]:
    """Compiles and reports; a compiler's refusal is a fact too."""
    chip = CHIPS[job.chip]
    mesh = make_mesh(job.mesh, chip.devices(math.prod(mesh_sizes(job.mesh))))
    pair = PAIRS[job.pair]._replace(int8=job.int8)
    shapes = placed(shapes_of(pair, job.batch, SLOTS, job.max_draft_length), pair, mesh)
    function, arguments = program(job.program, shapes)
    whole = NamedSharding(mesh, PartitionSpec())  # on every chip, what is not placed
    arguments = jax.tree.map(lambda leaf: leaf if leaf.sharding else leaf.update(sharding=whole), arguments)
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
    return facts | facts_of(chip.platform, text, Path(job.out) / "dump", shapes.decoder.parts.widths)


if __name__ == "__main__":  # the job is JSON; its facts go to facts.json in its folder
    job = Job(**json.loads(sys.argv[1]))
    Path(job.out).mkdir(parents=True, exist_ok=True)
    (Path(job.out) / "facts.json").write_text(json.dumps(compile_for(job), indent=1), encoding="utf-8")
