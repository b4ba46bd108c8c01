"""The `doctor` command: whether a pair of models works and pays here, on one page.

Values from this machine or from answers are called measured, values computed from them predicted.
"""

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from specdec_jax import kernels
from specdec_jax.app.commands import ENGINE_LOGS, Doctor
from specdec_jax.app.settings import Settings, build
from specdec_jax.app.views.printing import columns, interrupts_end_here, status
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.choices import ESTIMATED, MEASURED, costs_asked
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.costs.machine import free_memory
from specdec_jax.loading import LoadedModel, needs_translation, outline, refuse_encoders
from specdec_jax.loading.across import describe_join, probability_shared, way_for
from specdec_jax.loading.families import family_of
from specdec_jax.loading.load import SHARE_DRAFTER, weight_bytes
from specdec_jax.loading.new_folder import check_file, write_text
from specdec_jax.loading.precision import INT8
from specdec_jax.meshes import bytes_here
from specdec_jax.metrics.acceptance import by_draft
from specdec_jax.metrics.judging import answers
from specdec_jax.metrics.predicted import Predicted, as_fast, costs_counted, every_rule, predicted
from specdec_jax.models.weights import num_weights
from specdec_jax.ranges import Between
from specdec_jax.replay.trace import Trace
from specdec_jax.replay.tracing import trace_texts
from specdec_jax.sharding import mesh_here
from specdec_jax.text.calibration import calibration_of
from specdec_jax.text.continuous_batching import cache_bytes, rows_that_fit
from specdec_jax.text.generation import encode
from specdec_jax.text.json_lines import json_text
from specdec_jax.text.pair import Pair, check_pair, split_drafters, without_model
from specdec_jax.text.prompt_file import read_prompts
from specdec_jax.types import DraftModel

PROMPT = "Why is the sky blue?"  # prompt of the recommended command
DEFAULT_CONTEXT = 2048  # tokens per row for the memory of caches
MOST_ROWS = 256  # maximum number of rows considered
SHOWN_DRAFTS = 8  # columns of the acceptance by draft position, to fit 80 characters
SOURCES = {MEASURED: "measured", ESTIMATED: "predicted"}
DTYPES = ("float32", "bfloat16", INT8)
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
ALWAYS = ("target", "drafter", "policy")  # always in the recommended command; others if not the default
CHANGED = ("dtype", "costs", "mesh", "calibration", "max_draft_length", "system", *SAMPLING)
PROMPTS = Path(__file__).with_name("doctor_prompts.jsonl")  # eight kinds of text, because acceptance differs by kind


class Conclusion(NamedTuple):
    works: bool  # whether the pair can be decoded and fits in memory
    pays: bool
    why: str
    command: str | None = None


@dataclass
class Page:
    """The console, and the report of the sections so far."""

    console: Console
    report: dict[str, Any] = field(default_factory=dict)

    def section(self, title: str, about: str, *shown: Any) -> None:
        """Prints a heading and the content of a section."""
        self.console.print()
        self.console.print(Text(title, "bold").append(about, "not bold"))
        for each in shown:
            self.console.print(each)


def examine(command: Doctor, settings: Settings) -> Conclusion:
    """Prints the page to standard output, section by section.

    Raises ValueError, OSError: invalid input; a model or a file that cannot be read or written.
    """
    if command.json is not None:
        check_file(command.json)
    several = len(split_drafters(settings.drafter)) > 1
    if several or settings.drafter == "none" or without_model(settings.drafter):
        raise ValueError(f"doctor replays one drafter that is a model, got {settings.drafter!r}")
    texts = [prompt.turns[0] for prompt in read_prompts(command.prompts or PROMPTS)]
    enable()
    page = Page(Console(highlight=False))
    with interrupts_end_here():
        conclusion = _sections(page, settings, texts, command.context)
    page.console.print()
    why = conclusion.why if conclusion.works else f"This pair does not work here: {conclusion.why}."
    page.console.print(Text(why, "bold green" if conclusion.pays else "bold red"))
    if conclusion.command is not None:
        page.console.print(Text(conclusion.command), soft_wrap=True)
    if command.json is not None:
        page.report["conclusion"] = conclusion._asdict()
        write_text(command.json, json_text(page.report, indent=2) + "\n")
    return conclusion


def _sections(page: Page, settings: Settings, texts: Sequence[str], context: int | None) -> Conclusion:
    """The sections, up to the first one that fails."""
    refuse_encoders("doctor", settings.target)
    target, drafter = outline(settings.target), outline(settings.drafter)
    encoding = {name: getattr(settings, name) for name in ("chat", "system", "parse_special")}
    prompts = [encode(target, text, **encoding) for text in texts]
    longest, new, context_size = max(map(len, prompts)), settings.max_new_tokens, target.model.spec.context
    if longest + new > context_size:
        raise ValueError(f"a prompt of {longest} tokens and {new} new ones exceed the target's context, {context_size}")
    context = min(DEFAULT_CONTEXT, context_size) if context is None else context
    Between(1, context_size, whole=True).check("context", context)
    if refusal := show_pair(page, target, drafter):
        return Conclusion(False, False, refusal)
    dtype, mesh, free = "bfloat16" if settings.dtype == "auto" else settings.dtype, mesh_here(), free_memory()
    taken, devices = {}, 1 if mesh is None else mesh.size
    for name in dict.fromkeys((*DTYPES, dtype)):
        shared = weight_bytes(drafter.config, name, SHARE_DRAFTER)
        taken[name] = {"target": weight_bytes(target.config, name), "drafter": shared}
    page.report["memory"] = dict(predicted_weights=taken, dtype=dtype, devices=devices, measured_free=free)
    needed, small = sum(taken[dtype].values()), sum(taken[INT8].values())
    if free is not None and needed > free:
        _show_memory(page)
        each = f"each of {devices} devices" if devices > 1 else "the device"
        hint = f"; in int8 they would take {decimal(small)}: --dtype int8" if small <= free else ""
        why = f"the weights take {decimal(needed)} in {dtype} (predicted), and {each} has {decimal(free)} free{hint}"
        return Conclusion(False, False, why)
    with status(f"Loading {settings.target} and {settings.drafter}"):
        pair = build(settings)
    page.report["products"] = kernels.products()
    page.console.print(f"Products of few rows are computed by: {kernels.products()}.")
    # the memory of caches with `context` slots per row
    free, rows, refusal = free_memory(), 0, ""
    try:
        rows = rows_that_fit(pair, MOST_ROWS, context, free)
    except ValueError as error:
        refusal = str(error)
    weights = {"target": bytes_here(pair.target.params), "drafter": bytes_here(pair.params.drafter)}
    loaded = dict(dtype=pair.target.dtype, measured_weights=weights, measured_free=free, context=context)
    page.report["memory"]["loaded"] = loaded | {"predicted_row": cache_bytes(pair, 1, context), "predicted_rows": rows}
    _show_memory(page)
    if refusal:
        return Conclusion(False, False, refusal)
    costs, costs_source = costs_counted(pair), costs_asked(settings.costs)
    show_costs(page, costs, SOURCES[costs_source] if isinstance(costs_source, str) else "given")
    trace = _acceptance(page, settings, pair, prompts)
    calibration = None if settings.calibration is None else calibration_of(settings.calibration, pair)
    predictions: list[Predicted] = []
    longest_draft = pair.decoder.parts.drafter.max_draft_length
    for rule in every_rule(longest_draft):
        with status(f"Replaying {rule!r}"):
            predictions.append(predicted(pair, trace, rule, context, calibration))
    fast = as_fast(predictions)
    _rules(page, predictions, fast)
    logs = import_module(ENGINE_LOGS)
    static_length = int(logs.advise(logs.log_of_trace(trace), costs.at(context), longest_draft).best.setting)
    page.report["engines"] = options = logs.engine_options(static_length)  # for the same models, as in `advise`
    if options:
        lines = [Text(f"{engine}: {words}", overflow="fold") for engine, words in options.items()]
        page.section("Other engines", ", at these costs and the best static length", *lines)
    return conclude(settings, predictions, fast, costs)


def show_pair(page: Page, target: LoadedModel, drafter: LoadedModel) -> str:
    """Shows two outlines (`loading.outline`) and their vocabularies. Returns why they cannot be used together."""
    facts: list[dict[str, Any]] = [
        {
            "source": model.name,
            "family": (family := family_of(model.config)).__name__.rpartition(".")[2],
            "parameters": num_weights(family.parameter_table(model.config)),
            "tokens known": model.tokenizer.vocab_size,
            "embeddings": model.model.spec.vocab_size,
            "context": model.model.spec.context,
        }
        for model in (target, drafter)
    ]
    refusal = ""
    try:
        check_pair(target, drafter)
    except ValueError as error:
        refusal = str(error)
    table = columns("", "target", "drafter", texts=1, pad_edge=False)
    for name in facts[0]:
        table.add_row(name, *(f"{side[name]:,}" if isinstance(side[name], int) else side[name] for side in facts))
    page.section("The pair", "", table)
    if not refusal:
        joined = f"agree: {target.tokenizer.vocab_size:,} tokens"
        if needs_translation(target, drafter):
            joined = f"differ: {describe_join(way_for(target, drafter), target.tokenizer, drafter.tokenizer)}"
        page.console.print(f"The vocabularies {joined}.")
        if reading := DraftModel.of(drafter.model).reading:
            layers = ", ".join(map(str, reading.layers))
            page.console.print(f"The drafter reads the target's hidden states of layers {layers}.")
    page.report["pair"] = {"target": facts[0], "drafter": facts[1], "refusal": refusal}
    return refusal


def _show_memory(page: Page) -> None:
    memory = page.report["memory"]
    loaded, table = memory.get("loaded"), columns("", "target", "drafter", "both", texts=1, pad_edge=False)

    def add(name: str, taken: Mapping[str, int]) -> None:
        table.add_row(name, *map(decimal, (*taken.values(), sum(taken.values()))))

    for dtype, taken in memory["predicted_weights"].items():
        add(f"weights in {dtype}, predicted", taken)
    free, rows = memory["measured_free"], ""
    if loaded is not None:
        free = loaded["measured_free"]
        add(f"weights loaded in {loaded['dtype']}, measured", loaded["measured_weights"])
        row = f"caches of a row of {loaded['context']:,} tokens, predicted"
        table.add_row(row, "", "", decimal(loaded["predicted_row"]))
        more = " or more" if loaded["predicted_rows"] == MOST_ROWS else ""
        rows = f"; {loaded['predicted_rows']}{more} such rows fit, predicted" if loaded["predicted_rows"] else ""
    when = "before" if loaded is None else "after"
    text = "Free: not said by the device." if free is None else f"{decimal(free)} free {when} loading, measured{rows}."
    about = f" on each of {memory['devices']} devices" if memory["devices"] > 1 else ""
    page.section("Memory", about, table, text)


def show_costs(page: Page, costs: CostModel, how: str) -> None:
    """Shows times of passes; `how` they were obtained: measured, given or predicted."""
    page.report["costs"] = {"how": how, "ratio": costs.ratio, **costs._asdict()}
    if how == "predicted":
        text = f"A drafter step, by the bytes both models read: c = {costs.ratio:.3f} passes of plain decoding."
        page.section("Costs, predicted", "", text, "Verifying drafts is taken to cost no more than such a pass.")
        return
    table = columns("tokens verified in a pass", *map(str, costs.widths), texts=1, pad_edge=False)
    table.add_row("ms", *(f"{1e3 * time:.1f}" for time in costs.target_pass))
    table.add_row("V, in passes of plain decoding", *(f"{time / costs.plain_pass:.2f}" for time in costs.target_pass))
    plain_pass, step = f"{1e3 * costs.plain_pass:.1f} ms", f"{1e3 * costs.drafter_step:.2f} ms"
    text = f"A pass of plain decoding takes {plain_pass}, a drafter step {step}: c = {costs.ratio:.3f}."
    page.section(f"Costs, {how}", f": {costs.device}" if costs.device else "", table, text)
    if costs.doubts:
        page.console.print(Text(f"Doubtful, measured on a busy machine: {'; '.join(costs.doubts)}.", "yellow"))


def _acceptance(page: Page, settings: Settings, pair: Pair, prompts: Sequence[list[int]]) -> Trace:
    """The trace of the target's answers, and the acceptance of drafts along them."""
    drafter, limit = pair.decoder.parts.drafter, settings.max_new_tokens
    assert drafter.model is not None  # checked by examine
    warp = {name: getattr(settings, name) for name in SAMPLING}
    seeds = [(settings.seed + index) % 2**32 for index in range(len(prompts))]
    with status(f"Decoding {len(prompts)} answers, and drafting along them"):
        texts = answers(pair.target, prompts, max_new_tokens=limit, warp=warp, seed=seeds, batch=len(prompts))
        models, params = (pair.target.model, drafter.model), (pair.target.params, pair.params.drafter)
        options: dict[str, Any] = {"warp": warp, "seed": seeds, "max_draft_length": drafter.max_draft_length}
        trace = trace_texts(models, params, list(zip(prompts, texts, strict=True)), limit=limit, **options)
    accepted, shared = by_draft(trace), probability_shared(pair.target, pair.params.drafter)
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    shown = accepted[:SHOWN_DRAFTS]
    table = columns("draft of a round", *map(str, range(1, len(shown) + 1)), texts=1, pad_edge=False)
    table.add_row("accepted, if reached", *(f"{each.estimate:.2f}" for each in shown))
    table.add_row("95 %, from", *(_number(each.low) for each in shown))
    table.add_row("to", *(_number(each.high) for each in shown))
    about = f": {trace.num_texts} answers of the target, {trace.num_positions} tokens, {how}"
    page.section("Acceptance, measured", about, table)
    if shared is not None:
        held = f"The tokens that both have hold {shared:.1%} of the target's probability along a sample text."
        page.console.print(held)
        if pair.params.drafter.tables is not None:
            page.console.print("These are replayed; text that is tokenised again is measured by generate --compare.")
    facts = {"texts": trace.num_texts, "tokens": trace.num_positions}
    page.report["acceptance"] = facts | {"measured_by_draft": accepted, "measured_probability_shared": shared}
    return trace


def _rules(page: Page, predictions: Sequence[Predicted], fast: Sequence[bool]) -> None:
    """Shows all policies, fastest first; the table has the best static length, and a line all. `fast`: by `as_fast`."""
    static = [rule for rule in predictions if rule.policy.name == "static"]
    best = max(static, key=_speedup)
    table = columns("rule", "speed-up", "95 %", "tokens", "drafted", "accepted", texts=1, pad_edge=False)
    page.report["rules"] = []
    for rule, marked in sorted(zip(predictions, fast, strict=True), key=lambda both: -_speedup(both[0])):
        numbers = rule._asdict() | {"policy": repr(rule.policy), "as_fast_as_best": marked}
        numbers |= {f"predicted_{name}": numbers.pop(name) for name in ("speedup", "seconds")}
        page.report["rules"].append(numbers)
        if rule.policy.name != "static" or rule is best:
            name = Text(f"{'*' if marked else ' '} {rule.policy!r}", "bold" if marked else "")
            counts = f"{rule.tokens:.2f}", f"{rule.drafted:.2f}", _number(rule.acceptance_rate)
            table.add_row(name, f"{_speedup(rule):.2f}", _number(rule.speedup.low, rule.speedup.high), *counts)
    lengths = f"Static lengths of 1 to {len(static)}: {', '.join(f'{_speedup(rule):.2f}' for rule in static)}."
    legend = "* as fast as the best, as far as these answers tell. Tokens, drafted: a round."
    about = ": every rule replayed along these answers"
    page.section("Speed-up over plain decoding, predicted", about, table, lengths, legend)


def conclude(
    settings: Settings, predictions: Sequence[Predicted], fast: Sequence[bool], costs: CostModel
) -> Conclusion:
    """Recommends the default policy unless another one is faster (`fast`), with the command to decode with it."""
    best, default = max(predictions, key=_speedup), Settings()
    fast_rules = [rule for rule, marked in zip(predictions, fast, strict=True) if marked and _speedup(rule) > 1]
    chosen = next((rule for rule in fast_rules if rule.policy == default.rules[0]), best)
    pays = _speedup(chosen) > 1
    verdict = ("pays" if chosen.speedup.low > 1 else "may pay") if pays else "will not pay"
    limit = max((rule.break_even for rule in predictions if math.isfinite(rule.break_even)), default=0.0)
    otherwise = f" It would pay with c below {limit:.3f}." if not pays and limit > 0 else ""
    doubt = " The costs are doubtful: measure them again on a quiet machine." if costs.doubts else ""
    bounds = _number(chosen.speedup.low, chosen.speedup.high)
    speed = f"{chosen.policy!r}, predicted {_speedup(chosen):.2f} ({bounds}) times plain decoding."
    why = f"Drafting {verdict}: {speed}{otherwise}{doubt}"
    if not pays:
        return Conclusion(True, False, why)
    settings = dataclasses.replace(settings, policy=repr(chosen.policy))
    words = ["python", "-m", "specdec_jax", "generate", PROMPT]
    for name in (*ALWAYS, *CHANGED):
        value = getattr(settings, name)
        if name in ALWAYS or value != getattr(default, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--parse-special"] * settings.parse_special + ["--no-chat"] * (not settings.chat)
    return Conclusion(True, True, why, shlex.join(words))


def _speedup(rule: Predicted) -> float:
    return rule.speedup.estimate


def _number(*values: float) -> str:
    return "–" if math.isnan(values[0]) else "–".join(f"{value:.2f}" for value in values)
