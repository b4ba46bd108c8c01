"""Learn a pair's thresholds once: percentiles, what tells rejected tokens, phases, every rule's best setting.

Question:  Which hyperparameters suit this pair of models?
Command:   python -m experiments.calibrate [--target smollm2 --drafter smollm2-drafter] [--prompts FILE.jsonl ...]
Time:      twelve minutes on 2 cores (42 prompts at two temperatures, 128 tokens each)
Expected:  for the built-in pair what specdec_jax/weights/smollm2-drafter/calibration.json holds; docs/entropy_aware.md
Output:    runs/calibrate-<time>/ with calibration.json, table.md, curves.png, the traces, manifest.json; a stopped run
           goes on where it was with the same --out

`generate(..., calibration="FILE")`, `--calibration FILE` and configs read calibration.json and hand its hyperparameters
to policies, verifiers and monitors; "built-in" is the one that came with the drafter. Rules' settings are those that
are fastest in replays over all the texts, by --costs: measure another pair's with experiments.step_cost. With --split
calibrate the other half of each file stays for judging.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib.calibrate_hyperparameters import figures_of, hyperparameters_of, variants_of
from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.options import Output, Served
from experiments.lib.plots import panels
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import RunFolder, package_versions
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import costs_or_default
from experiments.record import Record, record
from specdec_jax.costs.choices import ESTIMATED
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.loading import LoadedModel
from specdec_jax.metrics.deviation import deviations
from specdec_jax.ranges import Between, check_fields
from specdec_jax.replay.trace import Trace, join, load_trace
from specdec_jax.text.calibration import ANY_STATIC_OPTIONS, FILE, FORMAT, KINDS, fingerprint
from specdec_jax.text.generation import build_pair, encode
from specdec_jax.text.sampling_params import NewTokens, Seed

SETS = tuple(f"configs/prompts/{name}.jsonl" for name in ("code", "math", "summarise", "instructions", "german"))
LENIENCES = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
TOGETHER = 6  # texts that share a pass when deviations are measured
ROUND_UP = 128  # tokens, of their lengths, so that few shapes compile


@dataclass(frozen=True)
class Calibrate(Output, Served):
    """Learn the hyperparameters of a pair."""

    prompts: tuple[str, ...] = SETS
    """JSONL files, FILE:n for every n-th of its prompts, or hub:NAME."""
    split: str | None = "calibrate"
    """Only prompts of this half, so that the other can judge; None: all."""
    temperatures: Annotated[tuple[float, float], Between(0)] = (0.0, 0.7)
    """Temperatures of the greedy hyperparameters (0) and of the sampled ones."""
    max_new_tokens: NewTokens = 128
    """Most tokens of an answer."""
    max_draft_length: Annotated[int, Between(1)] = 7
    """Maximum draft length in replays."""
    max_deviation: Annotated[float, Between(0, 1, open="low, high")] = 0.02
    """Bounds lenience: mean total variation per token between what it emits and the target's distribution."""
    costs: str | None = None
    """A cost model (cost_model.json of experiments.step_cost); none: configs/costs/cpu.json."""
    seed: Seed = 0
    """Seed of the answers."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperatures[0] != 0 or self.temperatures[1] <= 0:
            raise ValueError(f"temperatures must be 0 and one above 0, got {self.temperatures}")


def calibrate(config: Calibrate, console: Console) -> Path:
    """Records what is missing, learns, and writes the run folder; returns calibration.json's path."""
    costs = costs_or_default(config.costs)
    for source in config.prompts:
        load_prompts(source, split=config.split)
    folder = RunFolder.create("calibrate", config, config.out)
    traces = _traces(config, folder, console)
    models = config.load(console)
    with console.status("Learning"):
        figures = {kind: figures_of(trace) for kind, trace in traces.items()}
        lenience = {kind: _lenience(config, models, trace) for kind, trace in traces.items()}
        longest, hyperparameters, variants = config.max_draft_length, {}, {}
        for kind, trace in traces.items():
            hyperparameters[kind] = hyperparameters_of(kind, trace, lenience[kind]["bound"], costs, longest)
            variants[kind] = variants_of(kind, trace, hyperparameters[kind], costs, longest)
            figures[kind]["lenience"] = lenience[kind]
    content = {
        "format": FORMAT,
        **{
            role: {"name": Path(model.name).name, **fingerprint(model.params)}
            for role, model in zip(("target", "drafter"), models, strict=True)
        },
        "hyperparameters": hyperparameters,
        "variants": variants,
        "any_static_options": ANY_STATIC_OPTIONS,
        "figures": figures,
        "about": {
            "prompts": [Path(source).name for source in config.prompts],
            "split": config.split,
            "temperatures": list(config.temperatures),
            "texts": traces["greedy"].num_texts,
            "tokens": {kind: trace.num_positions for kind, trace in traces.items()},
            "drafter_cost": round(costs.ratio, 4),
            "costs": "those of two x86 cores and the built-in pair"
            if config.costs is None
            else Path(config.costs).name,
            "versions": package_versions(),
        },
    }
    content = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.5g}"))
    folder.write_json(FILE, content)
    publish(folder, report(content), console, curves=picture(content))
    return folder.path / FILE


def _traces(config: Calibrate, folder: RunFolder, console: Console) -> dict[str, Trace]:
    """The trace of all files by kind of decoding; a file's is recorded once."""
    parts: dict[str, list[Trace]] = {kind: [] for kind in KINDS}
    for index, source in enumerate(config.prompts):
        place = folder.path / "traces" / f"{index}-{re.sub(r'[^A-Za-z0-9]+', '-', Path(source).name)}"
        recording = Record(
            prompts=source,
            target=config.target,
            drafter=config.drafter,
            dtype=config.dtype,
            temperatures=config.temperatures,
            max_new_tokens=config.max_new_tokens,
            split=config.split,
            seed=config.seed,
            out=str(place),
        )
        for kind, path in zip(KINDS, record(recording, console), strict=True):
            parts[kind].append(load_trace(path))
    return {kind: join(traces) for kind, traces in parts.items()}


def _lenience(config: Calibrate, models: tuple[LoadedModel, LoadedModel], trace: Trace) -> dict[str, Any]:
    """Mean total variation per token by lenience, and the least lenience that keeps it below the given bound."""
    pair = build_pair(*models, costs=ESTIMATED)
    prompts = [prompt for source in config.prompts for prompt in load_prompts(source, split=config.split)]
    temperature = float(trace.temperature[0])
    texts = [
        encode(models[0], prompt.turns[0]) + trace.tokens[row, : trace.length[row]].tolist()
        for row, prompt in enumerate(prompts)
    ]
    length = np.array([len(text) for text in texts])
    by_length = np.argsort(length)
    totals = np.zeros(len(LENIENCES))
    for first in range(0, len(texts), TOGETHER):
        rows = by_length[first : first + TOGETHER]
        size = -(-length[rows].max() // ROUND_UP) * ROUND_UP
        padded = np.array([texts[row] + [0] * (size - length[row]) for row in rows], np.int32)
        at, last = np.arange(size - 1)[None, :], length[rows, None] - 1
        judged = (at < last) & (at >= last - trace.length[rows, None])
        figures = deviations(
            pair.decoder,
            pair.params,
            padded,
            verifier="lenience",
            hyperparameters={"lenience": np.float32(LENIENCES)},
            warp=make_warp(len(rows), temperature),
        )
        totals += np.sum(np.asarray(figures.total_variation), axis=(1, 2), where=judged[None])
    means = totals / trace.num_positions
    allowed = [value for value, mean in zip(LENIENCES, means, strict=True) if mean <= config.max_deviation]
    return {
        "by_lenience": {f"{value:g}": float(mean) for value, mean in zip(LENIENCES, means, strict=True)},
        "bound": min(allowed, default=1.0),
        "max_deviation": config.max_deviation,
    }


def report(content: Mapping[str, Any]) -> str:
    """All tables as Markdown."""
    about, parts = content["about"], [f"# {content['target']['name']} with {content['drafter']['name']}"]
    files, temperature = ", ".join(about["prompts"]), about["temperatures"][1]
    parts.append(f"{about['texts']} texts of {files}; temperatures 0 and {temperature:g}. Costs: {about['costs']}.")
    percents = list(content["figures"]["greedy"]["drafter_entropy"])
    lines = [
        [f"{kind}: {name.replace('_', ' ')}", *(f"{by_name[name][percent]:.2f}" for percent in percents)]
        for kind, by_name in content["figures"].items()
        for name in ("drafter_entropy", "target_entropy", "running_entropy")
    ]
    parts.append(markdown(["nats, by percentile", *percents], lines))
    parts.append("Running entropies are of the target's raw distributions, the others of the distributions as sampled.")
    for kind, figures in content["figures"].items():
        phases = content["hyperparameters"][kind]["monitor"]["phases"]
        bounds = f"above a running entropy of {phases['enter']:.2f} nats, routine below {phases['leave']:.2f}"
        parts += [f"## {kind.capitalize()}", _sentences(figures), f"Phases: reasoning {bounds}."]
        settings = {
            f"{group} {name}": values
            for group, each in content["hyperparameters"][kind].items()
            for name, values in each.items()
        }
        for variant in content["variants"][kind]:
            options = ", ".join(f"{key}={value}" for key, value in variant["static_options"].items())
            settings[f"{variant['kind']} {variant['name']}({options})"] = variant["hyperparameters"]
        lines = []
        for name, values in settings.items():
            numbers = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
            words = [f"{key} {' '.join(f'{number:.3g}' for number in each)}" for key, each in numbers.items()]
            lines.append([name, ", ".join(words) or "the defaults"])
        parts.append(markdown(["strategy", "hyperparameters"], lines).replace("---:", "---"))
    return "\n\n".join(parts) + "\n"


def _sentences(figures: Mapping[str, Any]) -> str:
    cut, slow, bound = figures["rejection"], figures["rejection_by_running_entropy"], figures["lenience"]
    return (
        f"{figures['acceptance']:.0%} of tokens would be accepted. A drafter entropy above {cut['threshold']:.2f} nats "
        f"indicates rejected ones best (Youden's J {cut['youden']:.2f}, area {cut['area']:.2f}); the running entropy "
        f"alone separates less (J {slow['youden']:.2f}, area {slow['area']:.2f}). AdaEDL's factor nearest to what was "
        f"accepted: {figures['entropy_factor']:.2f}. Lenience down to {bound['bound']:g} keeps the mean total "
        f"variation a token under {bound['max_deviation']:g}."
    )


def picture(content: Mapping[str, Any]) -> Figure:
    """Acceptance by the drafter's entropy and by the running entropy, with the thresholds."""
    titles = "by the drafter's entropy", "by the target's running entropy"
    figure, ((left, right),) = panels(titles, 3.8, width=4.7, sharey=True)
    colours = {"greedy": "#0072B2", "sampled": "#D55E00"}
    for kind, figures in content["figures"].items():
        for axes, name in ((left, "acceptance_by_entropy"), (right, "acceptance_by_running_entropy")):
            curve = figures[name]
            axes.plot(curve["value"], curve["acceptance"], "o-", ms=3.5, lw=1.4, color=colours[kind], label=kind)
        left.axvline(figures["rejection"]["threshold"], color=colours[kind], lw=1, ls="--")
        phases = content["hyperparameters"][kind]["monitor"]["phases"]
        right.axvspan(phases["leave"], phases["enter"], color=colours[kind], alpha=0.15, lw=0)
    left.set(xlabel="nats (dashed: best threshold)", ylabel="accepted", ylim=(0, 1))
    right.set(xlabel="nats (shaded: from leave to enter)")
    right.legend(frameon=False, fontsize=8)
    return figure


main = command(Calibrate, calibrate, __doc__)

if __name__ == "__main__":
    sys.exit(main())
