"""What does a GPU make of it? The questions that compilers cannot answer.

Question:  What do CUDA graphs save: a generation as it is built here, with loops captured as well, and without graphs?
           What are c and V(k) of a pair of 8B's and 1B's shapes, and how near does its plain decoding come to the
           memory's bandwidth? What is speculation worth by batch?
Command:   python -m experiments.gpu_suite [--parts graph ballast] [--smoke]
Hardware:  an NVIDIA GPU with 40 GB of memory and CUDA 12.3 or newer; --smoke: any machine, tiny shapes
Time:      4 minutes on an H200 with 16 cores, nearly all of it compiling; 2 minutes with --smoke on 2 cores
Expected:  docs/accelerators.md, "On a GPU". Aim: plain decoding reads weights at 80 % of the bandwidth of a copy
Output:    runs/gpu_suite-<time>/, with costs.json; results.jsonl has a line a measurement, part by part

The pair of large shapes is the built-in one with ballast: each of its passes is followed by a pass of a random model in
the shape of Llama 8B or 1B over the same tokens, whose result changes nothing. Text and acceptance are the small
models', bytes read and operations are real. Rows say so. Against transformers on a GPU: `python -m experiments.peers
--only transformers` there, with a torch for its CUDA in the environment.
"""

import functools
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from rich.console import Console

from experiments.lib.chips import LLAMA_1B, LLAMA_8B, weights_read
from experiments.lib.chips import Pair as Shapes
from experiments.lib.commands import LoadedPair, Output, Served, Smoke, command
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import tiny_pair
from experiments.lib.tables import PARENTHESES, interval, markdown, publish
from specdec_jax.compilation_cache import compile_together, enable
from specdec_jax.costs.at_hand import measured, sentence
from specdec_jax.costs.machine import device
from specdec_jax.costs.step_cost import clocked, summary, turns
from specdec_jax.decoding import build_decoder
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading import LoadedModel
from specdec_jax.models import llama
from specdec_jax.ranges import Between, check_fields
from specdec_jax.text.generation import Pair, Request, build_pair, decode, prepare, start
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import NewTokens, SamplingParams
from specdec_jax.types import Array, Cache, DraftModel, LanguageModel

Part = Literal["bandwidth", "graph", "ballast"]
PROMPT = "Explain in a few sentences how a bicycle stays upright."
COPIED = 2**31  # bytes
TINY = llama.LlamaConfig(64, 32, 48, 2, 2, 2, 16, max_position_embeddings=1024)
FLAG = "xla_gpu_enable_command_buffer"
OTHER_GRAPHS = {
    "loops captured": {FLAG: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"},
    "without graphs": {FLAG: ""},
}
NEVER = 3e38  # no logit of the ballast is larger
Measurement = dict[str, Any]


@dataclass(frozen=True)
class Suite(Output, Smoke, Served):
    """Measure a GPU."""

    parts: tuple[Part, ...] = get_args(Part)  # Which.
    batches: Annotated[tuple[int, ...], Between(1)] = (1, 8, 64)  # Rows of the generations with ballast.
    max_new_tokens: NewTokens = 128  # Tokens of a generation.
    repeats: Annotated[int, Between(1)] = 5  # Timed runs of each.

    def __post_init__(self) -> None:
        check_fields(self)


def suite(config: Suite, console: Console) -> None:
    """Runs the parts, keeps each when it is over, and writes the table."""
    folder = RunFolder.create("gpu_suite", config, config.out)
    enable()
    if jax.default_backend() == "cpu" and not config.smoke:
        raise ValueError("there is no accelerator here; --smoke tries the suite on a CPU")
    models = tiny_pair() if config.smoke else config.load(console, encoders=True)
    functions = {"bandwidth": bandwidth, "graph": graph, "ballast": ballast}
    for (part,) in folder.missing(("part",), [(part,) for part in config.parts]):
        rows = []  # appended together: a part that was stopped is measured again
        for row in functions[part](config, models, folder, console):
            rows.append({"part": part, **row})
            console.print(f"{row['what']}: {row['value']:.4g} {row['unit']} {row['note']}")
        for row in rows:
            folder.append(row)
    lines, values = [], {row["what"]: row["value"] for row in folder.rows()}
    for row in folder.rows():
        figures = interval([row["value"], row["low"], row["high"]], ".3g", PARENTHESES)
        lines.append([row["what"], figures, row["unit"], row["note"]])
    read, copied = values.get("ballast: weights read by plain passes"), values.get("bandwidth of a copy")
    if read and copied:
        lines.append(["plain decoding, of a copy's bandwidth", f"{read / copied:.0%}", "", "aim: 80 %"])
    about = f"{device()}, jax {jax.__version__}; medians (quartiles)."
    publish(folder, f"{about}\n\n{markdown(['', 'measured', 'unit', ''], lines)}\n", console)


def bandwidth(config: Suite, *_: Any) -> Iterator[Measurement]:
    """Bandwidth of a copy: bytes read and written over its time."""
    array = jnp.arange((2**20 if config.smoke else COPIED) // 4, dtype=jnp.float32)
    copy = jax.jit(lambda values: values + 1.0)
    times = summary(turns({0: clocked(lambda: copy(array).block_until_ready())}, 3 * config.repeats)[0])
    yield measurement("bandwidth of a copy", [2e-9 * array.nbytes / seconds for seconds in reversed(times)], "GB/s")


def graph(config: Suite, models: LoadedPair, *_: Any) -> Iterator[Measurement]:
    """A generation as it is built here, and with more and less in CUDA graphs, in turns."""
    built = measured_pair(*models)
    parts, captures = built.decoder.parts, jax.default_backend() == "gpu"
    pairs = {"as built": built}
    for name, options in OTHER_GRAPHS.items():
        options = options if captures else {}
        other = build_decoder(*parts[:4], verification_widths=parts.widths, compiler_options=options)
        pairs[name] = built._replace(decoder=other)
    requests = requests_for(config, pairs, 1)
    refused = {}

    def compiles(name: str) -> None:
        try:
            start(pairs[name], requests[name])
        except jax.errors.JaxRuntimeError as error:
            if name not in OTHER_GRAPHS:
                raise
            refused[name] = str(error).partition("\n")[0]

    compile_together(functools.partial(compiles, name) for name in pairs)
    for name, reason in refused.items():  # an older driver captures no loops
        del pairs[name]
        yield measurement(f"graph: generation, {name}", [math.nan], "s", f"does not run here: {reason}")
    seconds, tokens = in_turns(config, pairs, requests)
    for name, times in seconds.items():
        yield measurement(f"graph: generation, {name}", times, "s", "" if captures else "nothing is captured here")
        if name != "as built":
            ratio = [a / b for a, b in zip(times, seconds["as built"], strict=True)]
            yield measurement(f"graph: times as long {name}", ratio, "")
            yield measurement(f"graph: the same tokens {name}", [float(tokens[name] == tokens["as built"])], "")


def ballast(config: Suite, models: LoadedPair, folder: RunFolder, console: Console) -> Iterator[Measurement]:
    """c and V(k) of the large shapes, plain decoding against bandwidth, and speculation by batch."""
    shapes = (TINY, TINY) if config.smoke else (LLAMA_8B, LLAMA_1B)
    dtype = "float32" if config.smoke else config.dtype
    target, drafter = (with_ballast(model, shape, dtype) for model, shape in zip(models, shapes, strict=True))
    costs = measured(target, drafter, drafter_of=drafter_of)
    note = "tiny shapes" if config.smoke else "8B and 1B shapes"
    folder.write_json("costs.json", costs._asdict())
    console.print(sentence(costs))
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(models[0].params))
    read = real + weights_read(Shapes(*shapes))["target"]
    yield measurement("ballast: c", [costs.ratio], "", note)
    yield measurement("ballast: weights read by plain passes", [1e-9 * read / costs.plain_pass], "GB/s", note)
    pairs = {"plain": build_pair(target, None), "survival": build_pair(target, drafter, costs=costs)}
    requests = {batch: requests_for(config, pairs, batch) for batch in config.batches}
    jobs = [(pairs[name], request) for each in requests.values() for name, request in each.items()]
    compile_together(functools.partial(start, *job) for job in jobs)
    for batch in config.batches:
        seconds, tokens = in_turns(config, pairs, requests[batch])
        about = note if batch == 1 else f"{note}; given V(k) of batch 1"
        for name, times in seconds.items():
            speeds = [sum(map(len, tokens[name])) / each for each in times]
            yield measurement(f"ballast: batch {batch}, {name}", speeds, "tokens/s", about)
        ratio = [a / b for a, b in zip(seconds["plain"], seconds["survival"], strict=True)]
        yield measurement(f"ballast: batch {batch}, survival over plain", ratio, "", about)


class BallastCache(NamedTuple):
    """Both caches; they have one length, [B] int32."""

    real: Any
    ballast: Any
    length = property(lambda self: self.real.length)


def with_ballast(loaded: LoadedModel, config: llama.LlamaConfig, dtype: Any) -> LoadedModel:
    """The loaded model with a random model of that shape as ballast; parameters are a pair, theirs and the ballast's.
    Raises ValueError for a drafter with a draft vocabulary, whose pass cannot be left whole."""
    if DraftModel.of(loaded.model).head is not None:
        raise ValueError(f"{loaded.name!r} has a draft vocabulary: ballast goes with whole models")
    model = ballasted(loaded.model, llama.language_model(config, jnp.dtype(dtype)))
    extra = jax.jit(functools.partial(llama.init_params, config, dtype=jnp.dtype(dtype)))(jax.random.key(0))
    return loaded._replace(model=model, params=(loaded.params, extra), name=f"{loaded.name} with ballast")


def ballasted(real: LanguageModel, ballast: LanguageModel) -> LanguageModel:
    """Both passes, one after the other."""

    def init_cache(params, batch, slots, source=None):
        first, second = params if params is not None else (None, None)
        return BallastCache(real.init_cache(first, batch, slots, source), ballast.init_cache(second, batch, slots))

    def apply(params, tokens, cache, positions=None, mask=None):
        logits, real_cache = real.apply(params[0], tokens, cache.real, positions, mask)
        tokens = tokens % ballast.spec.vocab_size
        extra, ballast_cache = ballast.apply(params[1], tokens, cache.ballast, positions, mask)
        # zero, which no compiler can know
        weight = jnp.where(jnp.max(extra, axis=-1, keepdims=True) > NEVER, 1.0, 0.0).astype(logits.dtype)
        return logits + weight, BallastCache(real_cache, ballast_cache)

    def with_length(cache: Cache, length: Array) -> Cache:
        return BallastCache(real.with_length(cache.real, length), ballast.with_length(cache.ballast, length))

    return LanguageModel(init_cache, apply, with_length, real.spec._replace(by_position=False))


def requests_for(config: Suite, pairs: Mapping[str, Pair], batch: int) -> dict[str, Request]:
    """The prompt in every row, without an end of the text."""
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens, stop_ids=())
    return {name: prepare(pair, [PROMPT] * batch, sampling) for name, pair in pairs.items()}


def in_turns(
    config: Suite, pairs: Mapping[str, Pair], requests: Mapping[str, Request]
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Seconds of each pair's generations, one of each in turn after an untimed one, and their tokens."""
    turns = range(config.repeats + 1)
    _, *runs = [{name: decode(pair, requests[name]).results for name, pair in pairs.items()} for _ in turns]
    seconds = {name: [run[name][0].seconds for run in runs] for name in pairs}
    return seconds, {name: [result.tokens for result in runs[0][name]] for name in pairs}


def measurement(name: str, values: list[float], unit: str, note: str = "") -> Measurement:
    """A row: the median, the quartiles, and when."""
    median, low, high = summary(values)
    return {"what": name, "value": median, "low": low, "high": high, "unit": unit, "note": note, "at": time.time()}


main = command(Suite, suite, __doc__)

if __name__ == "__main__":
    sys.exit(main())
