"""What does a target pass, a drafter step and the entropy check cost on this machine?

Question:  How flat is the target's pass in the tokens it verifies, what is c (a drafter step over a target pass), and
           what do the entropy and the check add to a generation? How near does a prompt come to the arithmetic rate?
Command:   python -m experiments.step_cost [--target smollm2] [--drafter smollm2-drafter] [--dtypes bfloat16 float32]
           python -m experiments.step_cost precision   (what the weights in fewer bits change and save)
Time:      4 minutes on 2 cores, most of it compilation; seconds with --smoke (tiny random models)
Expected:  docs/performance.md has the tables of the machines it was run on
Output:    runs/step_cost-<time>/, with costs.json (all figures) and cost_model.json, which a finished folder keeps

cost_model.json is what experiments on traces take as `--costs` (specdec_jax.costs.cost_model.load_cost_model);
configs/costs/cpu.json, their default, is one of an earlier version, from width 2 on. It holds the drafter step of the
greedy program, the first dtype's target pass by width, and the pass of plain decoding, which is the narrowest.

All programs of a table run in turn, --repeats times: medians and quartiles, so that a busy machine slows all of them.
What a rule costs is measured as two whole generations that draw the same tokens: a static draft length, and a rule at
hyperparameters at which it looks at every distribution and never stops.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np
from rich.console import Console

from experiments.lib.commands import Models, Output, Smoke, command, with_studies
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import tiny_pair
from experiments.lib.tables import NONE, PARENTHESES, WORDS, interval, markdown, publish
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.choices import ESTIMATED
from specdec_jax.costs.cost_model import CostModel, cost_model, save_cost_model
from specdec_jax.costs.machine import device
from specdec_jax.costs.step_cost import Cost, alternate, draft_round, large_product, prompt_pass, summary, target_pass
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.kernels.compiled import say
from specdec_jax.loading import LoadedModel, for_target, load_model, refuse_encoders
from specdec_jax.loading.precision import precision
from specdec_jax.meshes import bytes_here
from specdec_jax.metrics.agreement import changes_along
from specdec_jax.metrics.intervals import mean_interval
from specdec_jax.metrics.judging import answers
from specdec_jax.monitors import phases
from specdec_jax.ranges import Between, check_fields
from specdec_jax.stopping import adaedl, static, survival
from specdec_jax.text.generation import build_pair, decode, encode, prepare, start
from specdec_jax.text.sampling_params import NewTokens, SamplingParams

PROMPT = "Explain in a few sentences how a bicycle stays upright."
PRODUCT = 2048  # rows and columns of the large product
COSTS, COST_MODEL = "costs.json", "cost_model.json"
TINY: dict[str, Any] = {"target": "tiny", "drafter": "tiny", "dtypes": ("float32",), "widths": (1, 2, 4, 8)}
TINY |= {"draft_length": 3, "prompt": 64, "max_new_tokens": 8, "repeats": 3}


@dataclass(frozen=True)
class StepCost(Output, Smoke, Models):
    """Measure target passes, drafter steps and the entropy check."""

    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """The target's, one table each; the drafter is measured in the first."""
    widths: Annotated[tuple[int, ...], Between(1)] = (1, 2, 4, 8, 12, 16, 17)
    """Tokens of a target pass; 17 is what verifies the 16 drafts of the longest replay."""
    batch: Annotated[int, Between(1)] = 1  # Rows.
    slots: int = 512  # Cache slots, half of them full.
    draft_length: Annotated[int, Between(1)] = 7  # Number of drafter steps per round.
    prompt: Annotated[int, Between(0)] = 1024
    """Tokens of a prompt whose processing is compared with a large product of the first dtype; 0: none."""
    max_new_tokens: Annotated[int, Between(0)] = 64
    """Tokens of the generations with and without the entropy check, most of the time this takes; 0: none."""
    repeats: Annotated[int, Between(1)] = 15  # Timed runs of each program.

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.dtypes:
            raise ValueError("there must be dtypes")


def measure(config: StepCost, console: Console) -> None:
    """Measures, unless the folder holds the figures, and writes what is made of them."""
    config = dataclasses.replace(config, **TINY) if config.smoke else config
    if not config.smoke:
        refuse_encoders("step_cost", config.target, config.drafter)
    folder = RunFolder.create("step_cost", config, config.out)
    if not (folder.path / COSTS).exists():
        enable()
        if config.smoke:
            targets, drafter = {"float32": tiny_pair()[0]}, tiny_pair()[1]
        else:
            drafter = load_model(config.drafter, dtype=config.dtypes[0])
            targets = {dtype: load_model(config.target, dtype=dtype) for dtype in config.dtypes}
            drafter = for_target(targets[config.dtypes[0]], drafter, say)
        with console.status("Measuring passes and steps"):
            passes = measure_passes(config, targets, drafter)
        with console.status("Measuring the entropy check"):
            checks = measure_check(config, targets[config.dtypes[0]], drafter) if config.max_new_tokens else {}
        machine = f"{device()}, {config.dtypes[0]}, jax {jax.__version__}"
        prompt = {}
        if config.prompt:  # needs every matrix but embedding and head, and causal attention
            target, size, length = targets[config.dtypes[0]], 64 if config.smoke else PRODUCT, config.prompt
            product = large_product(precision(config.dtypes[0]).dtype, size)
            programs = {"prompt": prompt_pass(target.model, target.params, length), "product": product}
            with console.status("Measuring a prompt"):
                seconds = {name: cost._asdict() for name, cost in alternate(programs, config.repeats, {}).items()}
            layers = {name: value for name, value in target.params.items() if name.startswith("layer_")}
            matrices, c = sum(leaf.size for leaf in jax.tree.leaves(layers) if leaf.ndim == 2), target.config
            attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * length**2
            operations = {"prompt": 2 * matrices * length + attention, "product": 2 * size**3}
            prompt = {"seconds": seconds, "operations": operations}
        plain = {name: cost._asdict() for name, cost in passes.items()}
        folder.write_json(COSTS, {"device": machine, "passes": plain, "checks": checks, "prompt": prompt})
    measured = json.loads((folder.path / COSTS).read_text(encoding="utf-8"))
    passes = {name: Cost(**entry) for name, entry in measured["passes"].items()}
    model = costs_of(config, passes, measured["device"])
    save_cost_model(folder.path / COST_MODEL, model)
    publish(folder, report(config, passes, measured["checks"], measured["prompt"]), console)
    console.print(f"c = {model.ratio:.3f}")


def costs_of(config: StepCost, passes: Mapping[str, Cost], device: str = "") -> CostModel:
    """The cost model of the first dtype, with the greedy program's drafter step."""
    times = {width: passes[f"target {config.dtypes[0]} {width}"].median for width in config.widths}
    return cost_model(passes["drafter 0"].median, times, device=device, batch=config.batch)


def measure_passes(config: StepCost, targets: dict[str, LoadedModel], drafter: LoadedModel) -> dict[str, Cost]:
    """Seconds of a target pass by dtype and width, and of a drafter step by temperature."""
    programs: dict[str, Callable[[], Any]] = {}
    per: dict[str, int] = {}
    for dtype, target in targets.items():
        for width in config.widths:
            name = f"target {dtype} {width}"
            programs[name] = target_pass(target.model, target.params, width, config.batch, config.slots, passes=4)
            per[name] = 4
    for temperature in (0.0, 0.8):
        name = f"drafter {temperature:g}"
        models = drafter_of(drafter.model, config.draft_length), drafter.params
        rows = {"batch": config.batch, "slots": config.slots, "temperature": temperature}
        programs[name] = draft_round(*models, static(draft_length=config.draft_length), **rows)
        per[name] = config.draft_length
    return alternate(programs, config.repeats, per)


def measure_check(config: StepCost, target: LoadedModel, drafter: LoadedModel) -> dict[str, dict[str, Any]]:
    """Time that a rule, or watching phases, adds to whole generations that draft the same tokens without it. By "rule,
    temperature": seconds `without` it, the share `added`, run by run, and drafter `passes` of a generation."""
    fixed = static(draft_length=config.draft_length)
    work = {  # all of a rule's work, and it never stops a draft
        "adaedl": (adaedl(threshold=0.0, entropy_factor=1e-6, step=0.0), None),
        "survival": (survival(drafter_cost=1e-30, verification_times=(1.0,)), None),
        "phases": (fixed, phases()),
    }
    checks: dict[str, dict[str, Any]] = {}
    for rule, (policy, monitor) in work.items():
        options = {"max_draft_length": config.draft_length, "costs": ESTIMATED}
        rules = {"policy": fixed}, {"policy": policy, "monitor": monitor}
        pairs = [build_pair(target, drafter, **each, **options) for each in rules]
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=temperature, stop_ids=())
            requests = [prepare(pair, [PROMPT] * config.batch, sampling) for pair in pairs]
            for pair, request in zip(pairs, requests, strict=True):
                start(pair, request)
            seconds, passes = np.zeros((2, config.repeats)), np.zeros((2, config.repeats), int)
            for run in range(config.repeats):
                for side in (0, 1) if run % 2 == 0 else (1, 0):  # neither always finds the caches warm
                    results, state = decode(pairs[side], requests[side])
                    seconds[side, run] = results[0].seconds
                    passes[side, run] = np.max(np.asarray(state.statistics.drafter_passes))
            if (passes[0] != passes[1]).any():
                raise AssertionError(f"{rule} drafted other tokens than a static length: more than its check differs")
            added = summary((seconds[1] / seconds[0] - 1).tolist())
            without = summary(seconds[0].tolist())._asdict()
            entry = {"without": without, "added": added._asdict(), "passes": int(passes[0, 0])}
            checks[f"{rule}, {temperature:g}"] = entry
    return checks


def report(
    config: StepCost, passes: Mapping[str, Cost], checks: Mapping[str, Mapping[str, Any]], prompt: Mapping[str, Any]
) -> str:
    """The tables as Markdown."""
    first = jax.devices()[0]
    about = (
        f"{config.target} and {config.drafter} on {first.platform} ({first.device_kind}), jax {jax.__version__}, "
        f"batch {config.batch}, {config.slots} slots; medians of {config.repeats} alternating runs (quartiles)."
    )
    rows = []
    for dtype in config.dtypes:
        costs = [passes[f"target {dtype} {width}"] for width in config.widths]
        least = min(cost.median for cost in costs)
        rows.append([f"{dtype}, ms", *map(_ms, costs)])
        rows.append(["over its cheapest", *(f"{cost.median / least:.2f}" for cost in costs)])
    widths = markdown(["target pass", *(f"{width} tokens" for width in config.widths)], rows)
    heads = ["rule, temperature", "drafter, ms a step", "c", "generation, s", "the rule adds", "in shares of a step"]
    plain = costs_of(config, passes).plain_pass
    lines = []
    for name, check in checks.items():
        step, added, seconds = passes[f"drafter {name.rpartition(' ')[2]}"], Cost(**check["added"]), check["without"]
        of_step = added.median * seconds["median"] / (check["passes"] * step.median)
        cells = [_ms(step), f"{step.median / plain:.3f}", f"{seconds['median']:.3f}"]
        lines.append([name, *cells, interval(added, "+.1%", WORDS), f"{of_step:+.1%}"])
    tables = [about, widths, *([markdown(heads, lines)] if lines else [])]
    if not prompt:
        return "\n\n".join(tables) + "\n"
    seconds = {name: Cost(**entry) for name, entry in prompt["seconds"].items()}
    rates = {name: prompt["operations"][name] / cost.median / 1e9 for name, cost in seconds.items()}
    sentence = (
        f"A prompt of {config.prompt:,} tokens takes {interval(seconds['prompt'], '.2f', PARENTHESES)} s: "
        f"{config.prompt / seconds['prompt'].median:.0f} tokens/s, {rates['prompt']:.0f} GFLOP/s, "
        f"{rates['prompt'] / rates['product']:.0%} of the {rates['product']:.0f} that a large product reaches."
    )
    return "\n\n".join([*tables, sentence]) + "\n"


def _ms(cost: Cost) -> str:
    return interval([1e3 * seconds for seconds in cost], bounds=PARENTHESES)


PRECISION = """What do a model's weights in fewer bits change, and how much memory do they save?

Question:  Of a model with its weights in several dtypes: how far are the next distributions from those of the first
           dtype, and how much memory do the weights take? (step_cost --dtypes bfloat16 int8: how long is a pass?)
Command:   python -m experiments.step_cost precision [--target smollm2] [--dtypes bfloat16 int8 float32]
Time:      5 minutes on 2 cores; seconds with --smoke (a tiny random model)
Expected:  SmolLM2's weights take 135.4 MB in int8, 269.0 MB in bfloat16; other figures in docs/models.md
Output:    runs/precision-<time>/ with manifest.json, results.jsonl (a line a dtype) and table.md

Distributions are compared along prompts and the answers that the first dtype writes to them greedily, at the positions
of the answers. All dtypes are in memory at once.
"""
TINY_STUDY: dict[str, Any] = {"target": "tiny", "max_new_tokens": 8, "limit": 2}


@dataclass(frozen=True)
class PrecisionStudy(Output, Smoke):
    """Compare a model's dtypes."""

    target: str = "smollm2"
    """A built-in name, a folder in Hugging Face format, a .gguf file, or a hub id (org/name, org/name@revision)."""
    dtypes: tuple[str, ...] = ("bfloat16", "int8", "float32")
    """Dtypes of the weights; the others are compared with the first."""
    prompts: str = "configs/prompts/demo.jsonl"  # A JSONL file, FILE:n for every n-th prompt, or hub:NAME.
    limit: int | None = None  # Only the first prompts.
    max_new_tokens: NewTokens = 128  # Most tokens of an answer.
    mesh: str | None = None  # Several devices, such as model=4, that share the weights.

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.dtypes)) < max(2, len(self.dtypes)):
            raise ValueError(f"there must be two dtypes or more, each once, got {self.dtypes}")
        for dtype in self.dtypes:
            precision(dtype)


def precision_study(config: PrecisionStudy, console: Console) -> None:
    """Measures and writes the run folder."""
    config = dataclasses.replace(config, **TINY_STUDY) if config.smoke else config
    prompts = load_prompts(config.prompts, config.limit)
    if not config.smoke:
        refuse_encoders("precision", config.target)
    folder = RunFolder.create("precision", config, config.out)
    if not folder.rows():
        enable()
        with console.status("Loading the model in every dtype"):
            models = {
                dtype: tiny_pair(dtype)[0] if config.smoke else load_model(config.target, dtype=dtype)
                for dtype in config.dtypes
            }
        first = models[config.dtypes[0]]
        tokens = [encode(first, prompt.turns[0]) for prompt in prompts]
        with console.status("Writing the answers"):
            texts = answers(first, tokens, max_new_tokens=config.max_new_tokens, warp={"temperature": 0.0})
        with console.status("Comparing distributions"):
            texts = list(zip(tokens, texts, strict=True))
            changes = {dtype: compared(first, model, texts) for dtype, model in models.items()}
        for dtype, model in models.items():
            row = {"dtype": dtype, "device": device(), "bytes": bytes_here(model.params), "texts": len(prompts)}
            folder.append(row | changes[dtype])
    rows, lines, reference = folder.rows(), [], config.dtypes[0]
    for row in rows:
        cells = [interval(row["divergence"], ".5f", WORDS), interval(row["same_top"], ".2%", WORDS)]
        cells += [interval(row["mean_change"], ".3f", WORDS), f"{row['largest_change']:.2f}"]
        cells = cells if row["dtype"] != reference else [NONE] * 4
        lines.append([row["dtype"], f"{row['bytes'] / 1e6:.1f}", *cells])
    about = (
        f"{config.target} on {rows[0]['device']}: against {reference} along {rows[0]['tokens']:,} tokens of answers to "
        f"{rows[0]['texts']} prompts (means over prompts, 95 %)."
    )
    heads = ["weights", "MB", f"KL divergence from {reference}, nats a token", "same most probable token"]
    changed = markdown([*heads, "change of a logit, mean", "largest"], lines)
    publish(folder, f"{about}\n\n{changed}\n", console)


def compared(first: LoadedModel, other: LoadedModel, texts: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Means over texts (prompt, answer) of what `changes_along` gives along the answers, and the largest change."""
    means, largest = [], 0.0
    for prompt, answer in texts:
        if answer:
            changes = changes_along((first.model, other.model), (first.params, other.params), [*prompt, *answer])
            along = [values[len(prompt) - 1 :] for values in changes]
            means.append([float(np.mean(values)) for values in along[:3]])
            largest = max(largest, float(along[3].max()))
    names = "divergence", "same_top", "mean_change"
    figures = {name: list(mean_interval(values)) for name, values in zip(names, np.transpose(means), strict=True)}
    return figures | {"largest_change": largest, "tokens": sum(len(answer) for _, answer in texts)}


step_cost = command(StepCost, measure, __doc__, "python -m experiments.step_cost")
studied = command(PrecisionStudy, precision_study, PRECISION, "python -m experiments.step_cost precision")
main = with_studies(step_cost, precision=studied)

if __name__ == "__main__":
    sys.exit(main())
