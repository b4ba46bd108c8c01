"""The `generate-file` command: decodes requests from a JSONL file in a batch and appends results line by line."""

import functools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec_jax import __version__, kernels
from specdec_jax.app.settings import Settings, build, download_models
from specdec_jax.app.views.interrupts import interrupts_end_here
from specdec_jax.app.views.printing import progress
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.cost_model import cost_model_of
from specdec_jax.costs.machine import free_memory
from specdec_jax.loading.new_folder import check_file
from specdec_jax.meshes import check_rows
from specdec_jax.text.calibration import fingerprint
from specdec_jax.text.citations import citations
from specdec_jax.text.continuous_batching import Size, complete, rows_that_fit, size_of
from specdec_jax.text.escapes import ERROR_WIDTH, one_line
from specdec_jax.text.generation import Request
from specdec_jax.text.pair import Pair
from specdec_jax.text.request_file import Defaults, check_fields, error_line, read_line, request_of, result_line
from specdec_jax.text.result_file import ADVICE, SETTINGS, ResultFile, digest, numbered, opened
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.strategies import name_in

MEANS = 1e-4  # relative tolerance for means, whose order of summation may differ
PRINTED = 10  # refused lines that are printed; the output has all
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")


@dataclass
class _Run:
    """The options common to all lines."""

    settings: Settings
    batch: int
    with_tokens: bool
    console: Console
    cite: bool


@dataclass
class _Lines:
    """The input's lines and their counts; results wait here until all earlier lines are written."""

    lines: list[tuple[int, bytes]]  # `result_file.numbered`
    fields: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # fields of requests that are not finished
    ready: dict[int, bytes] = field(default_factory=dict)
    refused: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # of `statistics.summarise`, over finished requests
    compiling: float = 0.0  # seconds of compilation


def generate_file(
    source: Path,
    output: Path,
    settings: Settings,
    *,
    batch: int,
    with_tokens: bool = False,
    overwrite: bool = False,
    cite: bool = False,
) -> int:
    """Decode the lines that `output` does not have yet; returns the number of refused lines.

    `cite`: print the BibTeX of the parts used to standard error.

    Raises:
        ValueError, OSError: invalid options, an input that cannot be read, an output that cannot be written.
    """
    check_rows(batch)
    output = output.resolve()  # one lock for all names of a file
    if source.resolve() in (output, output.with_name(output.name + SETTINGS)):
        raise ValueError(f"the output would overwrite the input {str(source)!r}")
    content = source.read_bytes()
    check_file(output)
    # the settings that determine the output, including the contents of files of rules and settings
    wanted = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    for name in ("policy", "verifier", "drafter", "calibration", "costs"):
        path = Path(name_in(getattr(settings, name) or ""))
        if path.suffix in (".py", ".json") and path.is_file():
            wanted[f"{name} holds"] = digest(path.read_bytes())["sha256"]
    wanted |= {"with_tokens": with_tokens, "version": __version__}
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    run = _Run(settings, batch, with_tokens, console, cite)
    with opened(output, wanted, content, overwrite) as results:
        return _complete(run, _Lines(numbered(content)), results)


def _complete(run: _Run, lines: _Lines, results: ResultFile) -> int:
    """Decodes the missing lines. Returns the number of refused ones."""
    if results.lines >= len(lines.lines):
        run.console.print(f"{results.path} is complete: {results.lines} lines")
        return results.refused
    first = results.lines
    for index in range(first, len(lines.lines)):  # before any model is loaded
        try:
            lines.fields[index] = {}  # if the line is no object
            lines.fields[index] = read_line(lines.lines[index][1])
            check_fields(lines.fields[index])
        except ValueError as error:
            _refuse(lines, index, error, run.console)
    if not lines.fields:
        _write(lines, results)
        run.console.print(f"{results.lines - first} lines, all refused (error in {results.path.name})")
        return results.refused + lines.refused
    enable()
    with interrupts_end_here():  # lines are written atomically, so nothing is lost
        pair = _pair(run, results)
        if run.cite:
            run.console.print(citations(pair))
        _decode(run, pair, lines, results)
    return results.refused + lines.refused


def _refuse(lines: _Lines, index: int, error: ValueError, console: Console) -> None:
    """Makes the line of the output, and prints the line's number and the reason."""
    lines.ready[index] = error_line(lines.lines[index][0], lines.fields.pop(index), error)
    lines.refused += 1
    if lines.refused <= PRINTED:
        console.print(f"line {lines.lines[index][0]} refused: {one_line(str(error), ERROR_WIDTH)}")


def _pair(run: _Run, results: ResultFile) -> Pair:
    """The pair; choices of the machine are stored in the output's settings, from which a later run reads them."""
    decided, products = results.decided, kernels.products()
    settings, more = run.settings, {"batch": run.batch}
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
        results.decide(decided)
    return pair


def _decode(run: _Run, pair: Pair, lines: _Lines, results: ResultFile) -> None:
    settings, console = run.settings, run.console
    sampling = SamplingParams(**{name: getattr(settings, name) for name in SAMPLING})
    defaults = Defaults(sampling, settings.chat, settings.system, settings.parse_special, settings.calibration)
    request_of(pair, {"prompt": "?", "max_new_tokens": 1}, defaults, 0)  # raises for options that fail for all lines
    first, began = results.lines, time.perf_counter()
    indices: list[int] = []  # line index of each request
    free = free_memory()

    @functools.cache
    def fits(size: Size) -> None:
        rows_that_fit(pair, run.batch, size.slots, free, size.source)

    def requests() -> Iterator[Request]:
        for index, fields in list(lines.fields.items()):
            try:
                request = request_of(pair, fields, defaults, index)
                fits(size_of(pair, request))
            except ValueError as error:
                _refuse(lines, index, error, console)
                continue
            indices.append(index)
            yield request

    with progress(console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(lines.lines), completed=first)
        for done in complete(pair, requests(), run.batch):
            index = indices[done.index]
            if done.result.compile_seconds and done.rows < run.batch:
                console.print(f"{done.rows} of {run.batch} rows of {done.slots} slots fit in memory", style="dim")
            lines.counts.update({name: value for name, value in done.result.statistics.items() if name[:4] == "num_"})
            lines.compiling += done.result.compile_seconds
            fields = lines.fields.pop(index)
            lines.ready[index] = result_line(lines.lines[index][0], fields, done.result, run.with_tokens)
            _write(lines, results)
            bar.update(task, completed=results.lines, description=_progress_text(lines, time.perf_counter() - began))
        _write(lines, results)
    seconds = time.perf_counter() - began
    refused = f", {lines.refused} refused (error in {results.path.name})" if lines.refused else ""
    shapes = pair.decoder.num_programs("run")
    programs = f"{shapes} shape{'s' if shapes != 1 else ''} compiled in {lines.compiling:.1f} s"
    console.print(
        f"{results.lines - first} lines in {seconds:.1f} s{refused}: {_progress_text(lines, seconds)}; {programs}"
    )


def _write(lines: _Lines, results: ResultFile) -> None:
    """Writes results in order, up to the first missing line."""
    while results.lines in lines.ready:
        results.append(lines.ready.pop(results.lines))


def _progress_text(lines: _Lines, seconds: float) -> str:
    """Progress in tokens and tokens/s, without compilation."""
    tokens, drafted, accepted = (lines.counts[f"num_{name}_tokens"] for name in ("emitted", "draft", "accepted"))
    share = f", {accepted / drafted:.0%} of drafts accepted" if drafted else ""
    return f"{tokens:,} tokens, {tokens / max(seconds - lines.compiling, 1e-9):.1f} tokens/s{share}"
