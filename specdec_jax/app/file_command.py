"""The `generate-file` command: decodes requests from a JSONL file in a batch and appends results line by line.

A request is one JSON object, each checked separately, so that an invalid one stops no other.
"""

import functools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_jax import __version__, kernels
from specdec_jax.app.commands import GenerateFile
from specdec_jax.app.settings import Settings, build, download_models
from specdec_jax.app.views.printing import interrupts_end_here, progress
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.cost_model import cost_model_of
from specdec_jax.costs.machine import free_memory
from specdec_jax.decoding.state import fresh_state
from specdec_jax.loading.new_folder import check_file
from specdec_jax.meshes import check_rows
from specdec_jax.ranges import ranges_of, shortened
from specdec_jax.strategy import nearest
from specdec_jax.text.calibration import fingerprint
from specdec_jax.text.citations import citations
from specdec_jax.text.continuous_batching import Size, complete, rows_that_fit, size_of
from specdec_jax.text.escapes import ERROR_WIDTH, one_line
from specdec_jax.text.generation import Generation, Request, prepare
from specdec_jax.text.json_lines import json_text, json_value, numbered
from specdec_jax.text.pair import Pair
from specdec_jax.text.prompt_file import ID_KEYS, TEXT_KEYS, prompt_of
from specdec_jax.text.result_file import ADVICE, SETTINGS, ResultFile, files_in, opened
from specdec_jax.text.sampling_params import SamplingParams

MEANS = 1e-4  # relative tolerance for means, whose order of summation may differ
PRINTED = 10  # refused lines that are printed; the output has all
SAMPLING = (*ranges_of(SamplingParams), "stop")
HYPERPARAMETERS = ("policy", "verifier")
FIELDS = (*TEXT_KEYS, "system", *ID_KEYS, "category", "split", *SAMPLING, *HYPERPARAMETERS)
COUNTS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens")
LOG_PROBS = ("log_probs", "warped_log_probs", "tempered_log_probs")


@dataclass
class _Run:
    """The options of all lines, and the lines; results wait here until those of earlier lines are written."""

    command: GenerateFile
    settings: Settings
    console: Console
    results: ResultFile
    lines: list[tuple[int, bytes]]  # `json_lines.numbered`
    fields: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # fields of requests that are not finished
    ready: dict[int, bytes] = field(default_factory=dict)
    refused: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # of `statistics.summarise`, over finished requests
    compiling: float = 0.0  # seconds of compilation


def generate_file(command: GenerateFile, settings: Settings) -> int:
    """Decode the lines that the output does not have yet; returns the number of refused lines.

    Raises ValueError, OSError: invalid options, an input that cannot be read, an output that cannot be written.
    """
    check_rows(command.batch)
    output = command.output.resolve()  # one lock for all names of a file
    if command.input.resolve() in (output, output.with_name(output.name + SETTINGS)):
        raise ValueError(f"the output would overwrite the input {str(command.input)!r}")
    content = command.input.read_bytes()
    check_file(output)
    # the settings that determine the output, including the contents of files of rules and settings
    wanted = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    for name in ("policy", "verifier", "drafter", "calibration", "costs"):
        if files := files_in(getattr(settings, name) or ""):
            wanted[f"{name} holds"] = " ".join(files.values())
    wanted |= {"with_tokens": command.tokens, "version": __version__}
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with opened(output, wanted, content, command.overwrite) as results:
        run, first = _Run(command, settings, console, results, numbered(content)), results.lines
        if first >= len(run.lines):
            console.print(f"{output} is complete: {first} lines")
            return results.refused
        for index in range(first, len(run.lines)):  # before any model is loaded
            try:
                run.fields[index] = {}  # if the line is no object
                run.fields[index] = read_line(run.lines[index][1])
                check_fields(run.fields[index])
            except ValueError as error:
                _refuse(run, index, error)
        if run.fields:
            enable()
            with interrupts_end_here():  # lines are written atomically, so nothing is lost
                pair = _pair(run)
                if command.cite:
                    console.print(citations(pair))
                _decode(run, pair)
        else:
            _write(run)
            console.print(f"{results.lines - first} lines, all refused (error in {output.name})")
        return results.refused + run.refused


def _refuse(run: _Run, index: int, error: ValueError) -> None:
    """Makes the line of the output, and prints the line's number and the reason."""
    number, run.refused = run.lines[index][0], run.refused + 1
    run.ready[index] = _line(number, run.fields.pop(index), {"error": " ".join(str(error).split())})
    if run.refused <= PRINTED:
        run.console.print(f"line {number} refused: {one_line(str(error), ERROR_WIDTH)}")


def _pair(run: _Run) -> Pair:
    """The pair; choices of the machine are stored in the output's settings, from which a later run reads them."""
    results, products = run.results, kernels.products()
    decided, settings, more = results.decided, run.settings, {"batch": run.command.batch}
    if decided is not None:
        if (before := decided.get("products")) != products:
            hint = f"set {kernels.VARIABLE}, {ADVICE}"
            raise ValueError(f"{results.path} was written with products of {before}, not of {products}: {hint}")
        costs = decided["costs"]
        costs = costs and cost_model_of(costs)
        more |= {"dtype": decided["dtype"], "max_draft_length": decided["max_draft_length"]}
        more |= {"verification_widths": tuple(decided["verification_widths"]), "costs": costs or "estimated"}
    names = [settings.target] + ([] if settings.drafter == "none" else [settings.drafter])
    download_models(settings)
    with run.console.status(Text(f"Loading {' and '.join(names)}")):
        pair = build(settings, **more)
    weights = [fingerprint(params) for params in (pair.params.target, pair.first_drafter) if params is not None]
    if decided is not None:
        stored = decided.get("weights") or []
        both = list(zip(stored, weights, strict=False))  # their means differ slightly between devices
        near = all(math.isclose(first["scale"], other["scale"], rel_tol=MEANS) for first, other in both)
        if len(stored) != len(weights) or not near or any({**a, "scale": b["scale"]} != b for a, b in both):
            raise ValueError(f"{results.path} was written with other weights: {ADVICE}")
    else:
        parts = pair.decoder.parts
        decided = {
            "weights": weights,
            "products": products,
            "dtype": pair.target.dtype,
            "max_draft_length": parts.drafter.max_draft_length,
            "verification_widths": parts.widths,
            "costs": None if pair.costs is None else pair.costs._asdict(),
        }
        results.write_settings(decided=decided)
    return pair


def _decode(run: _Run, pair: Pair) -> None:
    settings, console, results, batch = run.settings, run.console, run.results, run.command.batch
    options = {name: getattr(settings, name) for name in ("chat", "system", "parse_special", "calibration")}
    shortest = {"prompt": "?", "max_new_tokens": 1}
    request_of(pair, shortest, settings, 0, **options)  # raises for options that fail for all lines
    first, began = results.lines, time.perf_counter()
    indices: list[int] = []  # line index of each request
    free = free_memory()

    @functools.cache
    def fits(size: Size) -> None:
        rows_that_fit(pair, batch, size.slots, free, size.source)

    def requests() -> Iterator[Request]:
        for index, fields in list(run.fields.items()):
            try:
                request = request_of(pair, fields, settings, index, **options)
                fits(size_of(pair, request))
            except ValueError as error:
                _refuse(run, index, error)
                continue
            indices.append(index)
            yield request

    with progress(console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(run.lines), completed=first)
        for done in complete(pair, requests(), batch):
            index = indices[done.index]
            if done.result.compile_seconds and done.rows < batch:
                console.print(f"{done.rows} of {batch} rows of {done.slots} slots fit in memory", style="dim")
            run.counts.update({name: value for name, value in done.result.statistics.items() if name[:4] == "num_"})
            run.compiling += done.result.compile_seconds
            fields = run.fields.pop(index)
            run.ready[index] = result_line(run.lines[index][0], fields, done.result, run.command.tokens)
            _write(run)
            bar.update(task, completed=results.lines, description=_progress_text(run, time.perf_counter() - began))
        _write(run)
    seconds = time.perf_counter() - began
    refused = f", {run.refused} refused (error in {results.path.name})" if run.refused else ""
    shapes = pair.decoder.num_programs("run")
    programs = f"{shapes} shape{'s' if shapes != 1 else ''} compiled in {run.compiling:.1f} s"
    console.print(
        f"{results.lines - first} lines in {seconds:.1f} s{refused}: {_progress_text(run, seconds)}; {programs}"
    )


def _write(run: _Run) -> None:
    """Writes results in order, up to the first missing line."""
    while run.results.lines in run.ready:
        run.results.append(run.ready.pop(run.results.lines))


def _progress_text(run: _Run, seconds: float) -> str:
    """Progress in tokens and tokens/s, without compilation."""
    tokens, drafted, accepted = (run.counts[f"num_{name}_tokens"] for name in ("emitted", "draft", "accepted"))
    share = f", {accepted / drafted:.0%} of drafts accepted" if drafted else ""
    return f"{tokens:,} tokens, {tokens / max(seconds - run.compiling, 1e-9):.1f} tokens/s{share}"


def read_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, its fields not yet checked. Raises ValueError for anything else."""
    fields = json_value(line)
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {type(fields).__name__}")
    return fields


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown fields, values of a wrong type, and a missing prompt."""
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"no field {shortened(name)}{nearest(name, FIELDS)}")
    stop, several = fields.get("stop", []), isinstance(fields.get("prompt"), list)
    for index, message in enumerate((fields["prompt"] or [None]) if several else ()):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f"message {index} of the prompt must have role and content, got {shortened(message)}")
    turns = prompt_of({**fields, **({"prompt": "messages"} if several else {})}).turns
    if len(turns) > 1 or len(fields.keys() & set(TEXT_KEYS)) > 1:
        raise ValueError(f"a request has one text, in one of {', '.join(TEXT_KEYS)}")
    texts = [text for message in fields["prompt"] for text in message.values()] if several else [*turns]
    texts += [fields["system"]] if "system" in fields else []
    for text in [*texts, *(stop if isinstance(stop, list) else [stop])]:
        if not isinstance(text, str):
            raise ValueError(f"messages, system and stop must be text, got {shortened(text)}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{shortened(text)} is not valid Unicode: it has half a surrogate pair")
    for kind in HYPERPARAMETERS:
        if not isinstance(fields.get(kind, {}), dict):
            raise ValueError(f"{kind} must be an object of hyperparameters, got {shortened(fields[kind])}")
    SamplingParams(**{name: fields[name] for name in SAMPLING if name in fields})


def request_of(pair: Pair, fields: Mapping[str, Any], sampling: SamplingParams, number: int, **options: Any) -> Request:
    """The checked request of a line's fields; `number` counts the requests of the file from 0.

    Missing fields have the values of `sampling`, with seed + `number`, and of `options`, those of `prepare`. The prompt
    is read as in files of prompts (`prompt_file`), of a single turn, or `prompt` has messages with role and content;
    `policy` and `verifier` are objects of hyperparameters. Raises ValueError: invalid fields.
    """
    check_fields(fields)
    changes = {name: fields[name] for name in SAMPLING if name in fields}
    changes.setdefault("seed", (sampling.seed + number) % 2**32)
    sampling = replace(sampling, **changes)
    prompts = [fields["prompt"]] if isinstance(fields.get("prompt"), list) else prompt_of(fields).turns
    options |= {"system": fields["system"]} if "system" in fields else {}
    request = prepare(pair, prompts, sampling, **options)
    for kind in HYPERPARAMETERS:
        name = f"{kind}_hyperparameters"
        if kind in fields:
            request.options[name] = {**request.options.get(name, {}), **fields[kind]}
    fresh_state(pair.decoder.parts, request.prompts, **request.options)
    return request


def result_line(number: int, fields: Mapping[str, Any], result: Generation, with_tokens: bool) -> bytes:
    """A line of the output: line number, id, text, finish reason, requested fields, and counts; no times."""
    counts = {name: result.statistics[name] for name in COUNTS}
    text = {"text": result.text, "finish_reason": result.finish_reason}
    tokens = {"tokens": result.tokens} if with_tokens else {}
    log_probs = {name: values for name in LOG_PROBS if (values := getattr(result, name)) is not None}
    sizes = {"num_prompt_tokens": len(result.prompt_tokens), "num_tokens": len(result.tokens)}
    return _line(number, fields, {**text, **tokens, **log_probs, **sizes, **counts})


def _line(number: int, fields: Mapping[str, Any], content: Mapping[str, Any]) -> bytes:
    ids = [fields[key] for key in ID_KEYS if isinstance(fields.get(key), (str, int, float))]
    named = {"line": number, **({"id": ids[0]} if ids else {}), **content}
    # a lone surrogate has no UTF-8 encoding and is written as a JSON escape
    return json_text(named).encode("utf-8", "backslashreplace") + b"\n"
