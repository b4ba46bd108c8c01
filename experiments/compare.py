"""Methods side by side: plain decoding against static lengths and adaptive rules, on one set of prompts.

Question:  How much faster is each method than plain decoding of the same target, and is its greedy output the same?
Command:   python -m experiments.compare configs/demo.py [--out runs/mine] [--max-new-tokens 32] [--repeats 3] ...
           python -m experiments.compare configs/lossy.py   (what lossy verifiers gain in speed and lose in likelihood)
Time:      the config says; a first run compiles each method once, before its first row
Output:    a run folder; results.jsonl has a line a prompt, method, temperature and repeat

Methods take turns inside every prompt, on a CPU some 8 tokens at a time, so that a slow second of the machine hits all
of them. Each is compiled, and decodes a prompt untimed, before its first turn; the results of a prompt are lines on the
screen as soon as all are measured. Seconds are decoding only: prompt processing is reported apart, compilation is left
out.

Measured costs (the default, or --costs FILE) predict the seconds of every row; table.md has predicted over measured
ones by method and temperature. With --rule-costs what each rule's own computation takes is measured, too, once.

Costs that the machine was too busy to measure are called doubtful, on the screen, in table.md and in the manifest, and
so are those of several drafters with different passes of the one target. If plain decoding disagrees with costs before
the first result, the next process measures them again.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from configs.base import CompareConfig
from experiments.lib import tables
from experiments.lib.commands import config_command
from experiments.lib.plots import Point, dots_figure
from experiments.lib.prompts import Prompt, load_prompts
from experiments.lib.run_folder import RunFolder, read_manifest
from experiments.lib.tables import NONE, Row, at_temperature, interval, markdown, speedups, summarise
from experiments.lib.turns import in_turns
from specdec_jax.app.views.printing import interrupts_end_here, progress
from specdec_jax.compilation_cache import describe_cache, enable
from specdec_jax.costs.cost_model import cost_model_of, decoding_seconds, passes_disagree
from specdec_jax.costs.this_machine import sentence
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import readable, slots_for
from specdec_jax.loading import download
from specdec_jax.metrics.agreement import compare_outputs
from specdec_jax.metrics.deviation import DISTRIBUTIONS, deviations
from specdec_jax.metrics.intervals import mean_interval
from specdec_jax.metrics.repetition import repeated_share
from specdec_jax.text.escapes import shown
from specdec_jax.text.generation import Generation, Pair, Request, decode, encode, finish, prepare, start
from specdec_jax.text.pair import measured_pair, split_drafters
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import Statistics, Verifier

Result = dict[str, Any]
KEY = ("temperature", "prompt_id", "repeat", "method")
SLICE = 8  # tokens, about, that a method decodes before the next one has its turn
CLOSE_GAP = 0.1  # logits; a greedy flip below it is rounding in bfloat16
BOUNDS = "[{}, {}]"  # some are negative
MEANS = ("log_likelihood", "total_variation", "divergence", "first_choice")
NOTE_QUALITY = (
    "Log-likelihood: mean over prompts of a token's under the target at temperature 1, in nats, and its difference to "
    "the reference's on the same prompts, with a 95 % bootstrap interval. It is no score to "
    "maximise: text that repeats itself has a high one. TV: mean total variation between the distribution of a token "
    "drafted at a position and the target's, along the text; KL likewise, in nats; unknown for by_phase. First choice: "
    "share of tokens that are the target's most probable one. Before diverging: share of tokens before the first one "
    "that differs from plain decoding."
)


def compare(config: CompareConfig, console: Console) -> RunFolder:
    """Measures all results of the config that are still missing, and writes the run folder. Raises ValueError,
    FileNotFoundError for invalid input, before anything is written or compiled."""
    prompts = load_prompts(config.prompts, config.limit, config.split)
    cache = enable()
    named = [config.drafter, *(method.drafter for method in config.chosen_methods())]
    each = [drafter for some in named for drafter in (some if isinstance(some, (list, tuple)) else [some])]
    download(config.target, *(name for entry in each if isinstance(entry, str) for name in split_drafters(entry)))
    with console.status("Loading the models"):
        pairs = load_pairs(config)
    slots = _slots(config, pairs, prompts)
    judges = [pair for pair in pairs.values() if pair.decoder.parts.drafter.model is not None]
    if config.quality and not judges:
        raise ValueError("quality is measured with the drafter's distributions: a method must draft with a model")
    judge, verifiers = judges[0] if config.quality else None, {m.name: m.verifier for m in config.chosen_methods()}
    folder = RunFolder.create(config.name, config, config.out)
    costs_by_method = {name: pair.costs for name, pair in pairs.items() if pair.costs is not None}
    folder.update_manifest(dtype=next(iter(pairs.values())).target.dtype)
    if costs_by_method and not folder.rows():  # a run that goes on has decoded by those that are there
        folder.write_json("costs.json", {name: costs._asdict() for name, costs in costs_by_method.items()})
    passes = {name: costs._replace(doubts=(), rules=()) for name, costs in costs_by_method.items()}
    for shared in dict.fromkeys(passes.values()):
        names = [name for name, costs in passes.items() if costs == shared]
        console.print(f"{', '.join(names)}: {sentence(shared)}", style="dim")
    console.print(f"compiled programs are {describe_cache(cache)}", style="dim")
    by_id = {prompt.id: prompt for prompt in prompts}
    keys = list(itertools.product(config.temperatures, by_id, range(config.repeats), pairs))
    measured = {tuple(row[name] for name in KEY): row for row in folder.rows()}
    missing = [key for key in keys if key not in measured]
    paces: dict[str, int] = {}
    with progress(console) as bar:
        task = bar.add_task("Measuring", total=len(keys), completed=len(keys) - len(missing))
        for (temperature, prompt_id, repeat), together in itertools.groupby(missing, lambda key: key[:3]):
            prompt, requests = by_id[prompt_id], {}
            limits = {field: getattr(config, field) for field in ("max_new_tokens", "top_k", "top_p", "min_p")}
            sampling = SamplingParams(temperature=temperature, seed=config.seed + repeat, **limits)
            for *_, name in together:
                options = {"chat": config.chat, "system": config.system, "slots": slots}
                if jax.tree.leaves(pairs[name].params.drafter):  # a calibration is of models
                    options["calibration"] = config.calibration
                requests[name] = prepare(pairs[name], [prompt.turns[0]], sampling, **options)
                if name not in paces:
                    bar.update(task, description=f"Compiling {name}")
                    paces[name] = _warm_up(name, pairs[name], requests[name], folder, console)
            bar.update(task, description=f"{shown(prompt_id)}, temperature {temperature:g}")
            prefilled = {name: start(pairs[name], request) for name, request in requests.items()}
            runs = {name: (pairs[name], each.state, paces[name]) for name, each in prefilled.items()}
            for name, (state, seconds) in in_turns(runs).items():
                final, key = readable(state), (temperature, prompt_id, repeat, name)
                decoded = finish(pairs[name], requests[name], final, 0, seconds, prefilled[name])
                plain = measured.get((*key[:3], config.methods[0].name))  # None: this is the baseline
                row = _row(key, prompt.category, pairs, requests[name], decoded, final.statistics, plain)
                if judge is not None:
                    row |= quality(judge, verifiers[name], decoded, temperature, slots)
                measured[key] = row
                folder.append(row)
                rates = [cost["num_emitted_tokens"] / cost["seconds"] for cost in (row, plain or row)]
                line = f"{name:14s} {shown(prompt_id):16s} temperature {temperature:<4g} {rates[0]:6.1f} tokens/s"
                console.print(f"{line} {rates[0] / rates[1]:6.2f}")
                bar.advance(task)
    _report(config, folder, [measured[key] for key in keys], pairs, console)
    return folder


def load_pairs(config: CompareConfig) -> dict[str, Pair]:
    """Both models once, and a decoder for each method. Methods of equal static options share a compiled program."""
    options: dict[str, Any] = {"dtype": config.dtype, "costs": config.costs}
    plain = measured_pair(config.target, None, **options)
    options |= {"verification_widths": config.verification_widths, "rule_cost": config.rule_costs}
    pairs = {}
    for method in config.chosen_methods():
        drafter = config.drafter if method.drafter is None else method.drafter
        longest = method.max_draft_length or config.max_draft_length
        rules = {"policy": method.policy, "verifier": method.verifier, "max_draft_length": longest}
        drafts = method.policy is not None
        pairs[method.name] = measured_pair(plain.target, drafter, **rules, **options) if drafts else plain
    return pairs


def _slots(config: CompareConfig, pairs: dict[str, Pair], prompts: Iterable[Prompt]) -> int:
    """Cache slots that suffice for all prompts. Raises ValueError for a prompt that exceeds the context."""
    target, options = next(iter(pairs.values())).target, {"chat": config.chat, "system": config.system}
    longest, name = max((len(encode(target, prompt.turns[0], **options)), prompt.id) for prompt in prompts)
    if longest + config.max_new_tokens > target.model.spec.context:
        context = f"the context of {config.target}, {target.model.spec.context}"
        raise ValueError(f"prompt {name!r} of {longest} tokens and {config.max_new_tokens} new ones exceed {context}")
    widest = max(max(pair.decoder.parts.widths) for pair in pairs.values())
    return slots_for(longest + config.max_new_tokens, 0, widest)


def _warm_up(name: str, pair: Pair, request: Request, folder: RunFolder, console: Console) -> int:
    """Compiles a method and decodes a prompt untimed with it; its rounds to SLICE tokens of that prompt, rounded up."""
    with interrupts_end_here():
        decoded = decode(pair, request)
    seconds = round(decoded.results[0].compile_seconds, 3)
    earlier = read_manifest(folder.path)["compile_seconds"] or {}  # of a run that goes on
    folder.update_manifest(compile_seconds=earlier | {name: seconds})
    console.print(f"{name:14s} compiled in {seconds:.1f} s")
    counts = decoded.state.statistics
    return math.ceil(SLICE * int(counts.num_rounds[0]) / max(int(counts.num_emitted_tokens[0]), 1))


def _row(
    key: tuple[Any, ...],
    category: str,
    pairs: Mapping[str, Pair],
    request: Request,
    result: Generation,
    counted: Statistics,
    plain: Result | None,
) -> Result:
    """A timed generation, what costs predict of it and, under greedy, whether it equals plain decoding."""
    temperature, prompt_id, repeat, name = key
    pair, slots = pairs[name], request.options["slots"]
    drafter, costs = pair.decoder.parts.drafter, pair.costs  # they predict a model that drafts alone, or no drafts
    if drafter.max_draft_length == 0:
        costs = next((pair.costs for pair in pairs.values() if pair.costs is not None), None)
    elif drafter.model is None or (costs is not None and not costs.ratio):
        costs = None
    if costs is not None and slots > costs.slots:
        costs = None
    columns = re.compile(r"num_.*|.*_passes|acceptance_histogram")
    counts = {name: value for name, value in result.statistics.items() if columns.fullmatch(name)}
    hyperparameters = {**pair.policy.given, **request.options.get("policy_hyperparameters", {})}
    equality: Result = {"equals_plain": None, "first_difference": None}
    if temperature == 0 and plain is not None:
        texts = plain["tokens"], result.tokens
        difference = compare_outputs(pair.target.model, pair.params.target, result.prompt_tokens, *texts)
        equality["equals_plain"] = difference is None
        equality["first_difference"] = None if difference is None else difference._asdict()
    costs = costs and costs.at(slots, temperature=temperature, policy=pair.policy)
    predicted = None if costs is None else decoding_seconds(costs, counted)
    row = {"prompt_id": prompt_id, "category": category, "method": name, "temperature": temperature}
    row |= {"repeat": repeat, "seconds": result.seconds}
    row |= {"predicted_seconds": predicted, "prefill_seconds": result.prefill_seconds, **counts}
    row["accepted_at"] = [int(n) for n in counted.accepted_at[0]]
    row |= {"repeated_share": repeated_share(result.tokens), "finish_reason": result.finish_reason, **equality}
    # None is a hyperparameter's own way to say that its rule decides.
    row["policy_hyperparameters"] = {name: value for name, value in hyperparameters.items() if value is not None}
    row["monitor_hyperparameters"] = request.options.get("monitor_hyperparameters", {})
    return row | {"tokens": result.tokens, "text": result.text}


def _report(
    config: CompareConfig, folder: RunFolder, rows: list[Result], pairs: Mapping[str, Pair], console: Console
) -> None:
    summaries = summarise(rows)
    compared = [row["equals_plain"] for row in rows if row["equals_plain"] is not None]
    equality = [f"Greedy: {sum(compared)} of {len(compared)} outputs equal plain decoding token for token."]
    for row in rows:
        if row["equals_plain"] is False:
            position, gap = row["first_difference"]["position"], row["first_difference"]["logit_gap"]
            why = "one of them had ended" if gap is None else f"logit gap {gap:.3f}"
            kind = " (a numerical near tie)" if gap is not None and gap < CLOSE_GAP else ""
            equality.append(f"  {row['method']} on {row['prompt_id']}: diverges at token {position}, {why}{kind}")
    path = folder.path / "costs.json"
    began = list(json.loads(path.read_text(encoding="utf-8")).values()) if path.is_file() else []
    clauses = [costs.get("doubts", ()) for costs in began]  # doubts about the costs of the first and of resumed runs
    clauses += [pair.costs.doubts for pair in pairs.values() if pair.costs is not None]
    clauses.append([clause for clause in [passes_disagree(("", cost_model_of(each)) for each in began)] if clause])
    doubts = [*dict.fromkeys(clause for each in clauses for clause in each), *tables.doubts_of_rows(rows)]
    folder.update_manifest(doubts=doubts)
    drafting = {row["method"] for row in rows if row["num_draft_tokens"] or not row["drafter_passes"]}
    idle = [f"{name} drafted nothing: try a lower threshold." for name in pairs if name not in drafting]
    doubtful = [f"**Doubtful, measured on a busy machine: {'; '.join(doubts)}.**"] if doubts else []
    about = f"The target's weights are in {next(iter(pairs.values())).target.dtype}."
    blocks = [f"# {config.name}", *tables.methods_tables(summaries)]
    if config.against in {summary["what"] for summary in summaries}:
        blocks.append(tables.against_table(summarise(rows, config.against), config.against))
    blocks += tables.predictions_table(summaries)
    if config.quality:
        names = [method.name for method in config.chosen_methods()]
        reference = config.against if config.against in names else names[0]
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            figures, lines = by_method([row for row in rows if row["temperature"] == temperature]), []
            for method, means in figures.items():
                likelihood, *distances, first_choice = (means[name].mean() for name in MEANS)
                difference = mean_interval(means["log_likelihood"] - figures[reference]["log_likelihood"])
                cells = [f"{likelihood:.3f}", interval(difference, "+.3f", BOUNDS)]
                cells += [NONE if np.isnan(value) else f"{value:.4f}" for value in distances]
                cells += [f"{first_choice:.1%}", NONE if means["before"] is None else f"{means['before']:.1%}"]
                lines.append([method, *cells])
            heads = ["method", "log-likelihood", "difference", "TV", "KL", "first choice", "before diverging"]
            blocks += [f"## Quality, {at_temperature(temperature)}", markdown(heads, lines)]
        blocks.append(NOTE_QUALITY)
    equal = "\n".join(equality) if compared else "No greedy outputs to compare."
    text = "\n\n".join([*blocks, *idle, *doubtful, about, equal, ""])
    title = f"{config.name}: {config.target}, drafter {config.drafter}, {config.dtype}"
    tables.publish(folder, text, console, speedup=picture(summaries, title))


def picture(summaries: Iterable[Row], title: str) -> Figure:
    """The mean speed-up of every method with its interval, a panel a temperature."""
    panels: dict[str, list[Point]] = {}
    for row in summaries:
        panels.setdefault(at_temperature(row["temperature"]), []).append((row["what"], *mean_interval(speedups(row))))
    figure = dots_figure(panels, "mean speed-up over plain decoding, with its 95 % interval over prompts")
    figure.suptitle(title, fontsize=10)
    return figure


def quality(judge: Pair, verifier: Verifier, generation: Generation, temperature: float, size: int) -> Result:
    """Means over a text's tokens, by passes of both models over it, padded to `size` so that all share one program.
    `total_variation` and `divergence` are None for a verifier whose distribution metrics/deviation.py does not have."""
    exact = verifier.name in DISTRIBUTIONS
    hyperparameters = {key: np.float32(value) for key, value in verifier.hyperparameters.items()} if exact else {}
    hyperparameters |= {key: value for key, value in verifier.options.items() if exact and key == "top_n"}
    prompt, tokens = generation.prompt_tokens, generation.tokens
    text = np.zeros((1, size), np.int32)
    text[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    options = {"verifier": verifier.name if exact else "rejection", "hyperparameters": hyperparameters}
    figures = deviations(judge.decoder, judge.params, text, **options, warp=make_warp(1, temperature))
    answer = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    means = {name: float(np.asarray(values)[0, answer].mean()) for name, values in figures._asdict().items()}
    return means if exact else means | {"total_variation": None, "divergence": None}


def by_method(rows: Sequence[Mapping[str, Any]]) -> dict[str, Result]:
    """MEANS of each method, [prompts] float64 averaged over repeats, and `before`, the share of its tokens that stand
    before the first difference to plain decoding, None where no row was compared."""
    figures: dict[str, Result] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        prompts: dict[str, list[np.ndarray]] = {}
        same = compared = 0
        for row in (row for row in rows if row["method"] == method):
            prompts.setdefault(row["prompt_id"], []).append(np.array([row[name] for name in MEANS], float))  # or NaN
            if row["equals_plain"] is not None:
                compared += len(row["tokens"])
                same += (row["first_difference"] or {"position": len(row["tokens"])})["position"]
        means = np.array([np.mean(repeats, axis=0) for repeats in prompts.values()])
        figures[method] = dict(zip(MEANS, means.T, strict=True)) | {"before": same / compared if compared else None}
    return figures


main = config_command("compare", compare, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
