"""What does a target pass, a drafter step and the entropy check cost on this machine?

Question:  How flat is the target's pass in the tokens it verifies, what is c (a drafter step over a target pass), and
           what do the entropy and the check add to a generation?
Command:   python -m experiments.step_cost [--target smollm2] [--drafter smollm2-drafter] [--dtypes bfloat16 float32]
Time:      3 minutes on 2 cores, most of it compilation
Expected:  docs/performance.md has the tables of the machines it was run on
Output:    runs/step_cost-<time>/ with manifest.json, costs.json and table.md

All programs of a table run in turn, --repeats times: medians and quartiles, so that a busy machine slows all of them.
The entropy check is measured as two whole generations that draw the same tokens: a static draft length, and AdaEDL with
a threshold of 0, which looks at every law and never stops.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.markdown import Markdown

from experiments.run_folder import RunFolder
from specdec_jax.analysis.step_cost import Cost, alternate, draft_round, drafter_with, summary, target_pass
from specdec_jax.compilation_cache import enable
from specdec_jax.generation import Pair, build_pair, prepare, start
from specdec_jax.loading import LoadedModel, check_same_vocabulary, load_model
from specdec_jax.stopping import adaedl, static

PROMPT = "Explain in a few sentences how a bicycle stays upright."


@dataclass(frozen=True)
class StepCost:
    """Measure target passes, drafter steps and the entropy check."""

    target: str = "smollm2"
    """A built-in name, a folder in Hugging Face format, a .gguf file, or a hub id."""
    drafter: str = "smollm2-drafter"
    """As target."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """The target's, one table each; the drafter is measured in the first."""
    widths: tuple[int, ...] = (1, 2, 4, 8, 12)
    """Tokens of a target pass."""
    batch: int = 1
    """Rows."""
    slots: int = 512
    """Cache slots, half of them full."""
    draft_length: int = 7
    """Drafter steps of a round."""
    max_new_tokens: int = 64
    """Tokens of the generations with and without the entropy check."""
    repeats: int = 15
    """Timed runs of each program."""
    out: str | None = None
    """Run folder; none: runs/step_cost-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement; 2 on bad input."""
    config = tyro.cli(StepCost, args=arguments, description=__doc__)
    try:
        folder = RunFolder.create("step_cost", config, config.out)
        enable()
        drafter = load_model(config.drafter, dtype=config.dtypes[0])
        targets = {dtype: load_model(config.target, dtype=dtype) for dtype in config.dtypes}
        check_same_vocabulary(targets[config.dtypes[0]], drafter)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    with console.status("Measuring passes and steps"):
        passes = measure_passes(config, targets, drafter)
    with console.status("Measuring the entropy check"):
        checks = measure_check(config, targets[config.dtypes[0]], drafter)
    table = report(config, passes, checks)
    folder.write_json("costs.json", {"passes": _plain(passes), "checks": _plain(checks)})
    folder.write_text("table.md", table)
    console.print(Markdown(table))
    console.print(f"Written to {folder.path}/")
    return 0


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
        programs[name] = draft_round(
            drafter_with(drafter.model, config.draft_length),
            drafter.params,
            static(),
            {"draft_length": config.draft_length},
            batch=config.batch,
            slots=config.slots,
            temperature=temperature,
            keep_log_q=True,
            measure=False,
        )
        per[name] = config.draft_length
    return alternate(programs, config.repeats, per)


class Check(NamedTuple):
    """Whole generations with and without the entropy and the check, paired."""

    without: Cost  # seconds
    added: Cost  # share of the generation's time that the check adds, run by run
    passes: int  # drafter passes of the generation


def measure_check(config: StepCost, target: LoadedModel, drafter: LoadedModel) -> dict[str, Check]:
    """Generations that draft the same tokens with and without the entropy and the check, by temperature."""
    never_stops = {"threshold": 0.0, "entropy_factor": 1e-6, "step": 0.0}
    rules = ((static(), {"draft_length": config.draft_length}), (adaedl(), never_stops))
    checks = {}
    for temperature in (0.0, 0.8):
        plain, checked = (
            _generation(
                config,
                build_pair(target, drafter, policy=policy, max_draft_length=config.draft_length),
                temperature,
                numbers,
            )
            for policy, numbers in rules
        )
        pairs = [(plain(), checked()) for _ in range(config.repeats)]
        if any(one.passes != other.passes for one, other in pairs):
            raise AssertionError("the two generations drafted different tokens: what differs is not the check alone")
        without = summary([one.seconds for one, _ in pairs])
        added = summary([other.seconds / one.seconds - 1 for one, other in pairs])
        checks[f"{temperature:g}"] = Check(without, added, pairs[0][0].passes)
    return checks


class _Timed(NamedTuple):
    seconds: float
    passes: int


def _generation(config: StepCost, pair: Pair, temperature: float, numbers: dict[str, Any]) -> Callable[[], _Timed]:
    options = {"max_new_tokens": config.max_new_tokens, "temperature": temperature, "stop_ids": ()}
    request = prepare(pair, [PROMPT] * config.batch, **options, policy_numbers=numbers)
    start(pair, request)

    def generate() -> _Timed:
        begun = start(pair, request)
        watch = time.perf_counter()
        state = jax.block_until_ready(pair.decoder.run(pair.params, begun.state))
        seconds = time.perf_counter() - watch
        return _Timed(seconds, int(np.max(np.asarray(state.statistics.drafter_passes))))

    return generate


def report(config: StepCost, passes: dict[str, Cost], checks: dict[str, Check]) -> str:
    """The tables as Markdown."""
    device = jax.devices()[0]
    lines = [
        f"{config.target} and {config.drafter} on {device.platform} ({device.device_kind}), jax {jax.__version__}, "
        f"batch {config.batch}, {config.slots} slots; medians of {config.repeats} alternating runs (quartiles).",
        "",
        "| target pass | " + " | ".join(f"{width} tokens" for width in config.widths) + " |",
        "| --- |" + " ---: |" * len(config.widths),
    ]
    for dtype in config.dtypes:
        costs = [passes[f"target {dtype} {width}"] for width in config.widths]
        least = min(cost.median for cost in costs)
        lines.append(f"| {dtype}, ms | " + " | ".join(_ms(cost) for cost in costs) + " |")
        lines.append("| over its cheapest | " + " | ".join(f"{cost.median / least:.2f}" for cost in costs) + " |")
    cheapest = min(cost.median for name, cost in passes.items() if name.startswith("target " + config.dtypes[0]))
    lines += ["", "| drafter | ms a step | c | generation, s | the check adds | in shares of a drafter step |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for temperature, check in checks.items():
        step = passes[f"drafter {temperature}"]
        of_step = check.added.median * check.without.median / (check.passes * step.median)
        lines.append(
            f"| temperature {temperature} | {_ms(step)} | {step.median / cheapest:.3f} | {check.without.median:.3f} | "
            f"{check.added.median:+.1%} ({check.added.low:+.1%} to {check.added.high:+.1%}) | {of_step:+.1%} |"
        )
    return "\n".join([*lines, ""])


def _plain(costs: Mapping[str, Any]) -> dict[str, Any]:
    """NamedTuples as objects, for JSON."""
    return {key: _plain(value._asdict()) if hasattr(value, "_asdict") else value for key, value in costs.items()}


def _ms(cost: Cost) -> str:
    return f"{1e3 * cost.median:.2f} ({1e3 * cost.low:.2f}–{1e3 * cost.high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
