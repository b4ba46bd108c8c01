"""What does a target pass, a drafter step and a stopping rule's own computation cost on this machine?

Question:  How flat is the target's pass in the tokens it verifies, what is c (a drafter step over a pass of plain
           decoding), greedily and sampled, and what does a rule add? How near does a prompt come to the peak rate?
Command:   python -m experiments.step_cost [--target smollm2] [--drafter smollm2-drafter] [--dtypes bfloat16 float32]
Time:      6 minutes on 2 cores, most of it compilation; seconds with --smoke (tiny random models)
Expected:  docs/performance.md has the tables of the machines it was run on
Output:    runs/step_cost-<time>/, with costs.json (all figures) and cost_model.json, which a finished folder keeps

cost_model.json is what experiments on traces take as `--costs` (specdec_jax.costs.cost_model.load_cost_model);
configs/costs/cpu.json, their default, is one of an earlier version, from width 2 on and greedy. It holds the first
dtype's drafter step and target pass by width, greedily and sampled, and what each of the --rules adds.

All are times of rounds of the decoder itself (specdec_jax/costs/step_cost.py). Programs of a table run in turn,
--repeats times: medians and quartiles, so that a busy machine slows all of them.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from rich.console import Console

from experiments.lib.commands import Models, Output, Smoke, command
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import tiny_pair
from experiments.lib.tables import PARENTHESES, WORDS, interval, markdown, publish
from specdec_jax.compilation_cache import enable
from specdec_jax.costs import step_cost as timing
from specdec_jax.costs.cost_model import CostModel, RuleCost, save_cost_model
from specdec_jax.costs.machine import device
from specdec_jax.decoding.prefill import target_prefill
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.kernels.compiled import say
from specdec_jax.loading import LoadedModel, for_target, load_model, refuse_encoders
from specdec_jax.loading.precision import precision
from specdec_jax.ranges import Between, check_fields
from specdec_jax.text.strategies import choose

RULES = "adaedl", "adaedl(keep_checked_token=True)", "at_least(minimum=1, policy=adaedl)", "svip", "goodput"
RULES += "max_confidence", "max_confidence(keep_checked_token=True)", "cumulative_confidence", "hf_heuristic"
RULES += "survival", "survival(signal=probability)", "survival(signal=bound)"  # all those of configs/evidence.py
ROUNDS = 4  # of a timed run
PRODUCT = 2048  # rows and columns of the large product
COSTS, COST_MODEL = "costs.json", "cost_model.json"
TINY: dict[str, Any] = {"target": "tiny", "drafter": "tiny", "dtypes": ("float32",), "widths": (1, 2, 4, 8)}
TINY |= {"prompt": 64, "rules": ("survival",), "repeats": 3}


@dataclass(frozen=True)
class StepCost(Output, Smoke, Models):
    """Measure target passes, drafter steps and what rules add."""

    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """The target's, one table each; the drafter is measured in the first."""
    widths: Annotated[tuple[int, ...], Between(1)] = (1, 2, 4, 8, 12, 16, 17)
    """Tokens of a target pass; 17 is what verifies the 16 drafts of the longest replay."""
    batch: Annotated[int, Between(1)] = 1  # Rows.
    slots: int = 512  # Cache slots.
    prompt: Annotated[int, Between(0)] = 1024
    """Tokens of a prompt whose processing is compared with a large product of the first dtype; 0: none."""
    rules: tuple[str, ...] = RULES
    """Calls of files of specdec_jax/stopping whose own computation is timed, most of the time this takes."""
    rules_of: str | None = None
    """A run folder with these figures of another pair whose drafter has such a head, and whose pass is short."""
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
    rules = json.loads(Path(config.rules_of, COSTS).read_text(encoding="utf-8"))["rules"] if config.rules_of else {}
    policies = {} if rules else {words: choose("policy", words) for words in config.rules}
    folder = RunFolder.create("step_cost", config, config.out)
    if not (folder.path / COSTS).exists():
        enable()
        if config.smoke:
            targets, drafter = {"float32": tiny_pair()[0]}, tiny_pair()[1]
        else:
            targets = {dtype: load_model(config.target, dtype=dtype) for dtype in config.dtypes}
            drafter = for_target(targets[config.dtypes[0]], load_model(config.drafter, dtype=config.dtypes[0]), say)
        with console.status("Measuring passes and steps"):
            passes = measure_passes(config, targets, drafter)
        options: dict[str, Any] = {"batch": config.batch, "slots": config.slots, "rounds": ROUNDS}
        options |= {"drafter_of": drafter_of, "repeats": config.repeats}
        for name, policy in policies.items():
            with console.status(f"Measuring {name}"):
                cost, shares = timing.time_policy(targets[config.dtypes[0]], drafter, policy, **options)
                rules[name] = {"cost": cost, "shares": shares}
        machine = f"{device()}, {config.dtypes[0]}, jax {jax.__version__}"
        prompt = {}
        if config.prompt:  # needs every matrix but embedding and head, and causal attention
            target, size, length = targets[config.dtypes[0]], 64 if config.smoke else PRODUCT, config.prompt
            tokens = jnp.ones((1, length + length // 4), jnp.int32)  # a cache that is a quarter longer
            fill, full_length = target_prefill(target.model, None, 64), jnp.full((1,), length, jnp.int32)
            matrix = jnp.ones((size, size), precision(config.dtypes[0]).dtype)
            product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
            calls = {
                "prompt": lambda: jax.block_until_ready(fill(target.params, None, tokens, full_length)),
                "product": lambda: jax.block_until_ready(product(matrix, matrix)),
            }
            with console.status("Measuring a prompt"):
                spent = timing.turns({name: timing.clocked(call) for name, call in calls.items()}, config.repeats)
            seconds = {name: timing.summary(times) for name, times in spent.items()}
            layers = {name: value for name, value in target.params.items() if name.startswith("layer_")}
            matrices, c = sum(leaf.size for leaf in jax.tree.leaves(layers) if leaf.ndim == 2), target.config
            attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * length**2
            operations = {"prompt": 2 * matrices * length + attention, "product": 2 * size**3}
            prompt = {"seconds": seconds, "operations": operations}
        folder.write_json(COSTS, {"device": machine, "passes": passes, "rules": rules, "prompt": prompt})
    measured = json.loads((folder.path / COSTS).read_text(encoding="utf-8"))
    times = {name: timing.Cost(*entry) for name, entry in measured["passes"][config.dtypes[0]].items()}
    rule_costs = [entry["cost"] for entry in measured["rules"].values()]
    model = timing.costs_of(times, device=measured["device"], batch=config.batch, slots=config.slots, rules=rule_costs)
    save_cost_model(folder.path / COST_MODEL, model)
    publish(folder, report(config, model, measured), console)
    console.print(f"c = {model.ratio:.3f}, sampled {model.at(temperature=timing.SAMPLED).ratio:.3f}")


def measure_passes(
    config: StepCost, targets: Mapping[str, LoadedModel], drafter: LoadedModel
) -> dict[str, dict[str, timing.Cost]]:
    """By dtype the seconds of `pass_programs`; the programs of all dtypes run in turn."""
    options: dict[str, Any] = {"batch": config.batch, "slots": config.slots, "rounds": ROUNDS, "drafter_of": drafter_of}
    each = {dtype: timing.pass_programs(target, drafter, config.widths, **options) for dtype, target in targets.items()}
    programs = {(dtype, name): call for dtype, (calls, _) in each.items() for name, call in calls.items()}
    spent = timing.turns(programs, config.repeats)
    return {
        dtype: seconds_of({name: spent[dtype, name] for name in calls}) for dtype, (calls, seconds_of) in each.items()
    }


def report(config: StepCost, model: CostModel, measured: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    first, prompt = jax.devices()[0], measured["prompt"]
    about = (
        f"{config.target} and {config.drafter} on {first.platform} ({first.device_kind}), jax {jax.__version__}, "
        f"batch {config.batch}, {config.slots} slots; medians of {config.repeats} alternating runs (quartiles)."
    )
    rows, names = [], ["plain pass", "drafter step", *(f"pass of {width} tokens" for width in model.widths)]
    for dtype, times in measured["passes"].items():
        for at in ("0", f"{timing.SAMPLED:g}"):
            costs = [timing.Cost(*times[f"{at} {name}"]) for name in names]
            cells = [interval([1e3 * seconds for seconds in cost], bounds=PARENTHESES) for cost in costs]
            rows.append([f"{dtype}, {at}, ms", *cells])
            rows.append(["over a plain pass", *(f"{cost.median / costs[0].median:.3f}" for cost in costs)])
    tables = [about, markdown(["dtype, temperature", *names], rows)]
    heads = ["rule", *(f"{head}, {at:g}" for at in (0.0, timing.SAMPLED) for head in ("µs a pass", "a round", "share"))]
    lines = []
    for name, entry in measured["rules"].items():
        rule = RuleCost(*entry["cost"])
        shares = [interval(share, "+.1%", WORDS) for share in entry["shares"].values()]
        times = [f"{1e6 * seconds:.0f}" for seconds in rule[1:]]
        lines.append([name, *times[:2], shares[0], *times[2:], shares[1]])
    if lines:
        tables += [markdown(heads, lines), "Share: of a round of seven drafts."]
    if prompt:
        seconds = {name: timing.Cost(*entry) for name, entry in prompt["seconds"].items()}
        rates = {name: prompt["operations"][name] / cost.median / 1e9 for name, cost in seconds.items()}
        tables.append(
            f"A prompt of {config.prompt:,} tokens takes {interval(seconds['prompt'], '.2f', PARENTHESES)} s: "
            f"{config.prompt / seconds['prompt'].median:.0f} tokens/s, {rates['prompt']:.0f} GFLOP/s, "
            f"{rates['prompt'] / rates['product']:.0%} of the {rates['product']:.0f} that a large product reaches."
        )
    return "\n\n".join(tables) + "\n"


main = command(StepCost, measure, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
