"""What does a GPU make of it? The questions that compilers cannot answer.

Question:  bandwidth: how fast is a copy? graph: what do CUDA graphs save, with loops and without? profile: how long do
           the kernels of each part of a round take, and how long does the round wait for launches? smollm2, coder,
           coder-smollm2, coder-reading: what is each rule worth by batch, with the costs of that batch? trees, block:
           do siblings of drafts, and drafts of one pass, pay where a wide pass takes as long as a narrow one?
Command:   python -m experiments.gpu_suite [--only smollm2] [--batches 1 4] [--out runs/gpu] [--smoke]
Hardware:  an NVIDIA GPU with 40 GB of memory and CUDA 12.3 or newer; --smoke: any machine, tiny models
Time:      seven minutes a part at most if the last six have two batches a command, nearly all compiling; 2 with --smoke
Expected:  docs/accelerators.md, "On a GPU". Aim: plain decoding reads weights at 80 % of the bandwidth of a copy
Output:    runs/gpu_suite-<time>/: table.md, and results.jsonl with a line a measurement, of the first three parts; a
           folder for each of the others, with what `experiments.batches` writes

A stopped part goes on with the same command and --out, and measures nothing again; --only may name other parts then,
but other --batches take another --out. Parts without their models are skipped, and an error where --only names them;
coder's target is Qwen2.5-Coder 1.5B.
"""

import functools
import itertools
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.batches import Batches, batches
from experiments.lib.chips import INSTRUCTION, Operation, by_part, op_names
from experiments.lib.commands import Output, Served, Smoke, command
from experiments.lib.run_folder import RunFolder, write_text
from experiments.lib.tables import PARENTHESES, at_temperature, crossed, interval, publish
from specdec_jax.compilation_cache import compile_together, enable
from specdec_jax.costs.machine import device
from specdec_jax.costs.step_cost import clocked, summary
from specdec_jax.decoding import build_decoder
from specdec_jax.ranges import Between
from specdec_jax.text.generation import Pair, Request, build_pair, decode, prepare, start
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import NewTokens, SamplingParams

Part = Literal["bandwidth", "graph", "profile", "smollm2", "coder", "coder-smollm2", "coder-reading", "trees", "block"]
KEY = ("part", "temperature", "repeat", "what")
TEMPERATURES = (0.0, 0.7)
PROMPT = "Explain in a few sentences how a bicycle stays upright."
PROMPTS = Path(__file__).parent.parent / "configs" / "prompts"
KINDS = ("code", "math", "summarise", "german", "instructions", "mixed")
CODER = "runs/coder-1.5b.gguf"
COPIED, COPIES = 2**31, 16  # bytes; copies a call, or a device's 1 ms would have the dispatch in it
FLAG = "xla_gpu_enable_command_buffer"
BUILT, PLAIN, WITHOUT = "as built", "plain decoding", "without graphs"
OTHER_GRAPHS = {
    "loops captured": {FLAG: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"},
    WITHOUT: {FLAG: ""},
}
PRICE = "survival(signal=bound)"  # AdaEDL's bound, with the price of time in place of lambda
RULES = ("static(draft_length=4)", "adaedl(threshold=0.65, keep_checked_token=True)", "survival", PRICE)
SIBLINGS = ("survival", "survival_tree(siblings=3)", "comb")
CONTROL = re.compile(r" (while|conditional|call)\(")  # of instructions whose time is that of others
Key = tuple[str, float | None, int, str]  # KEY
Measurement = tuple[Key, dict[str, float]]  # and its figures


@dataclass(frozen=True)
class Suite(Output, Smoke, Served):
    """Measure a GPU."""

    drafter: str = "smollm2-drafter-reading@8192"
    """As target; both are those of graph, profile, smollm2 and trees."""
    only: tuple[Part, ...] = ()  # Names of parts; none: all.
    batches: Annotated[tuple[int, ...], Between(1)] = (1, 4, 16, 64)  # Rows decoded at once, in the last six parts.
    max_new_tokens: NewTokens = 128  # Tokens of a generation.
    repeats: Annotated[int, Between(1)] = 5  # Timed runs of each.


def suite(config: Suite, console: Console) -> None:
    """Runs what is missing of the parts, and writes tables."""
    folder = RunFolder.create("gpu_suite", config, config.out)
    enable()
    if jax.default_backend() == "cpu" and not config.smoke:
        raise ValueError("there is no accelerator here; --smoke tries the suite on a CPU")
    prompts = folder.path / "prompts.jsonl"  # kinds by turns, so that few rows have several
    kinds = [(PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines(True) for kind in KINDS]
    write_text(prompts, "".join(line for lines in zip(*kinds, strict=False) for line in lines))
    paired = {
        "smollm2": (config.target, config.drafter, RULES),
        "coder": (CODER, "runs/coder-0.5b.gguf", RULES),
        "coder-smollm2": (CODER, "smollm2", RULES),
        "coder-reading": (CODER, "runs/distill-coder-reading-gpu/drafter@8192", RULES),
        "trees": (config.target, config.drafter, SIBLINGS),
        "block": (config.target, "runs/distill-smollm2-block-gpu/drafter", RULES),
    }
    shared = {name: getattr(config, name) for name in ("dtype", "smoke", "batches", "max_new_tokens", "repeats")}
    skipped: list[str] = []
    for part in config.only or get_args(Part):
        console.print(part, style="bold")
        try:
            if part in paired:
                target, drafter, rules = paired[part]
                options = {"target": target, "drafter": drafter, "policies": rules, "prompts": str(prompts), **shared}
                batches(Batches(**options, out=str(folder.path / part)), console)
                continue
            measure, names, temperatures = MEASURED[part]
            wanted = folder.missing(KEY, itertools.product([part], temperatures, range(config.repeats), names))
            for key, figures in measure(config, wanted, console) if wanted else ():
                folder.append(dict(zip(KEY, key, strict=True)) | {"figures": figures, "at": time.time()})
        except (FileNotFoundError, jax.errors.JaxRuntimeError) as error:  # no such model, or too little memory
            skipped.append(f"{part} is skipped: {str(error).splitlines()[0]}")
            console.print(skipped[-1])
    tables = [f"{device()}, jax {jax.__version__}; medians (quartiles)."]
    for part in MEASURED:
        columns: dict[tuple[str, str], list[float]] = {}
        for row in (row for row in folder.rows() if row["part"] == part):
            name = row["what"] if row["temperature"] is None else f"{row['what']}, {at_temperature(row['temperature'])}"
            for column, value in row["figures"].items():
                columns.setdefault((name, column), []).append(value)
        cells = {at: interval(summary(values), ".4g", PARENTHESES) for at, values in columns.items()}
        tables += [crossed(part, cells)] if cells else []
    publish(folder, "\n\n".join([*tables, ""]), console)
    if config.only and skipped:
        raise ValueError("; ".join(skipped))


def requests_for(config: Suite, pair: Pair) -> dict[float, Request]:
    """By temperature, without an end of the text."""
    options = {"max_new_tokens": config.max_new_tokens, "stop_ids": ()}
    return {at: prepare(pair, [PROMPT], SamplingParams(temperature=at, **options)) for at in TEMPERATURES}


def with_options(pair: Pair, options: dict[str, Any]) -> Pair:
    """The pair with programs that are compiled with these options, which only a GPU's compiler has."""
    parts = pair.decoder.parts
    options = options if jax.default_backend() == "gpu" else {}
    return pair._replace(decoder=build_decoder(*parts[:4], verification_widths=parts.widths, compiler_options=options))


def bandwidth(config: Suite, wanted: Sequence[Key], console: Console) -> Iterator[Measurement]:
    """Bandwidth of a copy: bytes read and written over its time."""
    array = jnp.arange((2**20 if config.smoke else COPIED) // 4, dtype=jnp.float32)
    copy = jax.jit(lambda values: jax.lax.fori_loop(0, COPIES, lambda _, each: each + 1.0, values))
    timed = clocked(lambda: copy(array).block_until_ready())
    timed()  # compiles
    for key in wanted:
        yield key, {"GB/s": 2e-9 * COPIES * array.nbytes / timed()}


def graph(config: Suite, wanted: Sequence[Key], console: Console) -> Iterator[Measurement]:
    """A generation as it is built, with more and less in CUDA graphs, and without drafts."""
    target, drafter = config.load(console, encoders=True)
    built = measured_pair(target, drafter)
    pairs = {BUILT: built, PLAIN: build_pair(target, None)}
    pairs |= {name: with_options(built, options) for name, options in OTHER_GRAPHS.items()}
    pairs = {name: pairs[name] for name in dict.fromkeys([BUILT, *(key[-1] for key in wanted)])}
    requests = {name: requests_for(config, pair) for name, pair in pairs.items()}
    compile_together(functools.partial(start, pair, requests[name][0.0]) for name, pair in pairs.items())
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    for temperature, keys in itertools.groupby(wanted, lambda key: key[1]):
        at = temperature or 0.0
        texts = {name: decode(pair, requests[name][at]).results[0].tokens for name, pair in pairs.items()}
        for key in keys:
            name = key[-1]
            (result,), _ = decode(pairs[name], requests[name][at])
            read = 1e-9 * weights * result.statistics["num_rounds"] / result.seconds
            figures = {"ms": 1e3 * result.seconds, "tokens/s": len(result.tokens) / result.seconds}
            figures |= {"GB/s of the target's weights": read, "the same tokens": float(texts[name] == texts[BUILT])}
            yield key, figures


def profile(config: Suite, wanted: Sequence[Key], console: Console) -> Iterator[Measurement]:
    """Number and time of the kernels by part of a round, by JAX's profiler. In a CUDA graph they have no names, so the
    generation is compiled without; its own time is that of a run that is not profiled."""
    pair = with_options(measured_pair(*config.load(console, encoders=True)), OTHER_GRAPHS[WITHOUT])
    requests, options = requests_for(config, pair), jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    program = pair.decoder.jitted["run"]
    text = program.lower(pair.params, start(pair, requests[0.0]).state, np.int32(1), np.int32(1)).compile().as_text()
    for key in wanted:
        request = requests[key[1] or 0.0]
        decode(pair, request)
        (result,), _ = decode(pair, request)
        state = start(pair, request).state
        with tempfile.TemporaryDirectory() as place:
            with jax.profiler.trace(place, profiler_options=options):
                jax.block_until_ready(pair.decoder.run(pair.params, state))
            (file,) = Path(place).rglob("*.xplane.pb")
            kernels = kernels_of(file, text)
        rounds, passes = (result.statistics[name] for name in ("num_rounds", "drafter_passes"))
        for part, paths in by_part(kernels, pair.decoder.parts.widths).items():
            number, microseconds = paths["all"]["ops"] / rounds, 1e-3 * paths["all"]["cycles"] / rounds
            yield (*key[:-1], part), {"kernels a round": number, "µs a round": microseconds}
        yield key, {"µs a round": 1e6 * result.seconds / rounds, "drafter passes a round": passes / rounds}


def kernels_of(profile: Path, text: str) -> list[Operation]:
    """What the program of this optimised text ran in a profile: each kernel's `op_name` ("" without) and nanoseconds.
    Those of devices, where the profile has any; else, on a CPU, of the host's threads."""
    names, module = op_names(text), text.split(maxsplit=2)[1].rstrip(",")
    lines = [INSTRUCTION.match(line) for line in text.splitlines() if CONTROL.search(line)]
    control = {instruction[1] for instruction in lines if instruction}
    planes = list(jax.profiler.ProfileData.from_file(str(profile)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    kernels = []
    for event in (event for plane in devices or planes for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        instruction = str(stats.get("hlo_op", ""))
        if stats.get("hlo_module") == module and instruction not in control:
            kernels.append((names.get(instruction, ""), round(event.duration_ns)))
    return kernels


MEASURED: dict[str, tuple[Callable[..., Iterator[Measurement]], Sequence[str], Sequence[float | None]]] = {
    "bandwidth": (bandwidth, ("copy",), (None,)),
    "graph": (graph, (BUILT, *OTHER_GRAPHS, PLAIN), TEMPERATURES),
    "profile": (profile, ("by the clock",), TEMPERATURES),  # the line after those of a round's parts
}


main = command(Suite, suite, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
