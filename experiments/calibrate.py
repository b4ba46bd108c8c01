"""Learn a pair's thresholds once: percentiles, what tells rejected tokens, phases, every rule's best setting.

Question:  Which hyperparameters suit this pair of models?
Command:   python -m experiments.calibrate [--target smollm2 --drafter smollm2-drafter] [--prompts FILE.jsonl ...]
Time:      twelve minutes on 2 cores (42 prompts at two temperatures, 128 tokens each)
Expected:  for the built-in pair what specdec_jax/weights/smollm2-drafter/calibration.json holds; docs/entropy_aware.md
Output:    runs/calibrate-<time>/, with calibration.json and the traces

`generate(..., calibration="FILE")`, `--calibration FILE` and configs read calibration.json and hand its hyperparameters
to policies, verifiers and monitors; "built-in" is the one that came with the drafter. Rules' settings are those that
are fastest in replays over all the texts, by --costs: measure another pair's with experiments.step_cost. With --split
calibrate the other half of each file stays for judging.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib.commands import LoadedPair, Output, Served, command
from experiments.lib.plots import panels
from experiments.lib.prompts import load_prompts
from experiments.lib.rules import LENGTHS, RULES, Rule
from experiments.lib.run_folder import RunFolder, package_versions
from experiments.lib.tables import markdown, publish
from experiments.lib.trace_runs import costs_or_default, replay_rule
from experiments.record import Record, record
from specdec_jax import stopping
from specdec_jax.costs.choices import ESTIMATED, weighs_costs
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.loading import refuse_encoders
from specdec_jax.metrics.deviation import deviations
from specdec_jax.metrics.judging import alike
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.metrics.separation import acceptance_curve, fitted_entropy_factor, percentiles, separate
from specdec_jax.ranges import Between
from specdec_jax.replay.phase_path import running_entropy
from specdec_jax.replay.trace import FEATURES, Trace, join, load_trace
from specdec_jax.strategy import Strategy
from specdec_jax.text.calibration import ANY_STATIC_OPTIONS, FILE, FORMAT, KINDS, fingerprint
from specdec_jax.text.generation import build_pair, encode
from specdec_jax.text.prompt_file import Prompt
from specdec_jax.text.sampling_params import NewTokens, Seed
from specdec_jax.text.strategies import build

SETS = tuple(f"configs/prompts/{name}.jsonl" for name in ("code", "math", "summarise", "instructions", "german"))
LENIENCES = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
TOGETHER = 6  # texts that share a pass when deviations are measured
ROUND_UP = 128  # tokens, of their lengths, so that few shapes compile


@dataclass(frozen=True)
class Calibrate(Output, Served):
    """Learn the hyperparameters of a pair."""

    prompts: tuple[str, ...] = SETS  # JSONL files, FILE:n for every n-th of its prompts, or hub:NAME.
    split: str | None = "calibrate"  # Only prompts of this half, so that the other can judge; None: all.
    temperatures: Annotated[tuple[float, float], Between(0)] = (0.0, 0.7)
    """Temperatures of the greedy hyperparameters (0) and of the sampled ones."""
    max_new_tokens: NewTokens = 128  # Most tokens of an answer.
    max_draft_length: Annotated[int, Between(1)] = 7  # Maximum draft length in replays.
    max_deviation: Annotated[float, Between(0, 1, open="low, high")] = 0.02
    """Bounds lenience: mean total variation per token between what it emits and the target's distribution."""
    costs: str | None = None  # A cost model (cost_model.json of experiments.step_cost); none: configs/costs/cpu.json.
    seed: Seed = 0  # Seed of the answers.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperatures[0] != 0 or self.temperatures[1] <= 0:
            raise ValueError(f"temperatures must be 0 and one above 0, got {self.temperatures}")


def calibrate(config: Calibrate, console: Console) -> Path:
    """Records what is missing, learns, and writes the run folder; returns calibration.json's path."""
    costs = costs_or_default(config.costs)
    prompts = [prompt for source in config.prompts for prompt in load_prompts(source, split=config.split)]
    refuse_encoders("this experiment", config.target, config.drafter)
    folder = RunFolder.create("calibrate", config, config.out)
    parts: dict[str, list[Trace]] = {kind: [] for kind in KINDS}
    for index, source in enumerate(config.prompts):  # a file's trace is recorded once
        place = folder.path / "traces" / f"{index}-{re.sub(r'[^A-Za-z0-9]+', '-', Path(source).name)}"
        names = ("target", "drafter", "dtype", "temperatures", "max_new_tokens", "split", "seed")
        options = {name: getattr(config, name) for name in names}
        for kind, path in zip(KINDS, record(Record(prompts=source, out=str(place), **options), console), strict=True):
            parts[kind].append(load_trace(path))
    traces = {kind: join(each) for kind, each in parts.items()}
    models = config.load(console)
    with console.status("Learning"):
        figures = {kind: figures_of(trace) for kind, trace in traces.items()}
        lenience = {kind: _lenience(config, models, prompts, trace) for kind, trace in traces.items()}
        longest, hyperparameters, variants = config.max_draft_length, {}, {}
        for kind, trace in traces.items():
            hyperparameters[kind], variants[kind] = learnt(kind, trace, lenience[kind]["bound"], costs, longest)
            figures[kind]["lenience"] = lenience[kind]
    roles = zip(("target", "drafter"), models, strict=True)
    about = {"prompts": [Path(source).name for source in config.prompts], "split": config.split}
    about |= {"temperatures": list(config.temperatures), "texts": traces["greedy"].num_texts}
    about |= {"tokens": {kind: trace.num_positions for kind, trace in traces.items()}}
    about["drafter_cost"] = round(costs.ratio, 4)
    measured = Path(config.costs).name if config.costs else "those of two x86 cores and the built-in pair"
    content = {
        "format": FORMAT,
        **{role: {"name": Path(model.name).name, **fingerprint(model.params)} for role, model in roles},
        "hyperparameters": hyperparameters,
        "variants": variants,
        "any_static_options": ANY_STATIC_OPTIONS,
        "figures": figures,
        "about": about | {"costs": measured, "versions": package_versions()},
    }
    content = json.loads(json.dumps(content), parse_float=lambda text: float(f"{float(text):.5g}"))
    folder.write_json(FILE, content)
    publish(folder, report(content), console, curves=picture(content))
    return folder.path / FILE


def _lenience(config: Calibrate, models: LoadedPair, prompts: list[Prompt], trace: Trace) -> dict[str, Any]:
    """Mean total variation per token by lenience, and the least lenience that keeps it below the given bound."""
    pair = build_pair(*models, costs=ESTIMATED)
    lines = [tokens[:length].tolist() for tokens, length in zip(trace.tokens, trace.length, strict=True)]
    texts = [encode(models[0], prompt.turns[0]) + line for prompt, line in zip(prompts, lines, strict=True)]
    length = np.array([len(text) for text in texts])
    totals = np.zeros(len(LENIENCES))
    for rows in alike(length.tolist(), TOGETHER):
        size = -(-length[rows].max() // ROUND_UP) * ROUND_UP
        padded = np.array([texts[row] + [0] * (size - length[row]) for row in rows], np.int32)
        at, last = np.arange(size - 1)[None, :], length[rows, None] - 1
        judged = (at < last) & (at >= last - trace.length[rows, None])
        lenient = {"verifier": "lenience", "hyperparameters": {"lenience": np.float32(LENIENCES)}}
        warp = make_warp(len(rows), float(trace.temperature[0]))
        figures = deviations(pair.decoder, pair.params, padded, **lenient, warp=warp)
        totals += np.sum(np.asarray(figures.total_variation), axis=(1, 2), where=judged[None])
    means = dict(zip(LENIENCES, (totals / trace.num_positions).tolist(), strict=True))
    bound = min((value for value, mean in means.items() if mean <= config.max_deviation), default=1.0)
    by_lenience = {f"{value:g}": mean for value, mean in means.items()}
    return {"by_lenience": by_lenience, "bound": bound, "max_deviation": config.max_deviation}


def report(content: Mapping[str, Any]) -> str:
    """All tables as Markdown."""
    about, parts = content["about"], [f"# {content['target']['name']} with {content['drafter']['name']}"]
    files, temperature = ", ".join(about["prompts"]), about["temperatures"][1]
    parts.append(f"{about['texts']} texts of {files}; temperatures 0 and {temperature:g}. Costs: {about['costs']}.")
    lines, percents = [], list(content["figures"]["greedy"]["drafter_entropy"])
    for kind, by_name in content["figures"].items():
        for name in ("drafter entropy", "target entropy", "running entropy"):
            values = by_name[name.replace(" ", "_")]
            lines.append([f"{kind}: {name}", *(f"{values[percent]:.2f}" for percent in percents)])
    parts.append(markdown(["nats, by percentile", *percents], lines))
    parts.append("Running entropies are of the target's raw distributions, the others of the distributions as sampled.")
    for kind, figures in content["figures"].items():
        phases = content["hyperparameters"][kind]["monitor"]["phases"]
        bounds = f"above a running entropy of {phases['enter']:.2f} nats, routine below {phases['leave']:.2f}"
        cut, slow, bound = figures["rejection"], figures["rejection_by_running_entropy"], figures["lenience"]
        sentences = (
            f"{figures['acceptance']:.0%} of tokens would be accepted. A drafter entropy above {cut['threshold']:.2f} "
            f"nats indicates rejected ones best (Youden's J {cut['youden']:.2f}, area {cut['area']:.2f}); the running "
            f"entropy alone separates less (J {slow['youden']:.2f}, area {slow['area']:.2f}). AdaEDL's factor nearest "
            f"to what was accepted: {figures['entropy_factor']:.2f}. Lenience down to {bound['bound']:g} keeps the "
            f"mean total variation a token under {bound['max_deviation']:g}."
        )
        parts += [f"## {kind.capitalize()}", sentences, f"Phases: reasoning {bounds}."]
        groups = content["hyperparameters"][kind].items()
        settings = {f"{group} {name}": values for group, each in groups for name, values in each.items()}
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


HYSTERESIS = 0.25  # in standard deviations of the running entropy, on either side of the threshold
UNCERTAIN = 90  # percentile of both entropies above which EASD is uncertain
PHASE = {"minimum_length": 8, "decay": 0.9}
CAPS = {"routine_length": LENGTHS, "reasoning_length": LENGTHS}


def positions_of(trace: Trace, raw_entropy: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(drafter entropy, target entropy, accepted, running entropy), [M] each: every position but texts' first ones. The
    first two are of the distributions as sampled, the last is raw, as monitors read it, unless raw_entropy=False."""
    running = running_entropy(trace, PHASE["decay"], raw_entropy)
    there = np.isfinite(running)
    drafter = trace.path[..., FEATURES.index("entropy")]
    return drafter[there], trace.target_entropy[there], trace.accepted[there], running[there]


def figures_of(trace: Trace) -> dict[str, Any]:
    """Diagnostics: percentiles, separation, the map from entropy to acceptance."""
    drafter, target, accepted, running = positions_of(trace)
    entropies = {"drafter_entropy": drafter, "target_entropy": target, "running_entropy": running}
    figures = {"acceptance": float(accepted.mean()), "entropy_factor": fitted_entropy_factor(drafter, accepted)}
    figures |= {name: percentiles(values) for name, values in entropies.items()}
    for name, values in (("rejection", drafter), ("rejection_by_running_entropy", running)):
        figures[name] = separate(values, accepted)._asdict()
    for name, values in (("acceptance_by_entropy", drafter), ("acceptance_by_running_entropy", running)):
        figures[name] = acceptance_curve(values, accepted)._asdict()
    return figures


def phase_hyperparameters(trace: Trace, raw_entropy: bool = True) -> dict[str, float]:
    """enter and leave around the running entropy that best separates rejected tokens, for the monitor `phases`."""
    _, _, accepted, running = positions_of(trace, raw_entropy)
    middle, band = separate(running, accepted).threshold, HYSTERESIS * float(running.std())
    return {"enter": middle + band, "leave": max(middle - band, 0.0), **PHASE}


def learnt(
    kind: str, trace: Trace, lenience: float, costs: CostModel, longest: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Hyperparameters of `init` by policy, verifier and monitor, as they are built by default; then a list of those of
    other static options. The setting of a rule is the one that is fastest in replays over all texts."""
    (drafter, target, *_), phases = positions_of(trace), phase_hyperparameters(trace)
    policies: dict[str, Any] = {}
    variants: list[dict[str, Any]] = []

    def best(entry: Rule) -> dict[str, Any]:
        settings = entry.settings()
        seconds = replay_rule(trace, entry, costs, longest, settings, phases).seconds(costs).sum(axis=1)
        return settings[int(np.argmin(seconds))]

    def vary(kind: str, name: str, options: dict[str, Any], values: dict[str, Any]) -> None:
        variants.append({"kind": kind, "name": name, "static_options": options, "hyperparameters": values})

    for entry in RULES:
        if entry.grid and not weighs_costs(entry.policy):  # those that weigh costs are given them when they run
            name, options = entry.policy.name, entry.policy.options
            if entry.policy.bare == (default := build("policy", name, {})):
                policies[name] = best(entry)
            else:
                others = {key: value for key, value in options.items() if value != default.options[key]}
                others = {key: repr(value) if isinstance(value, Strategy) else value for key, value in others.items()}
                vary("policy", name, others, best(entry))
    prior = {"prior": list(fit_prior(trace))} if kind == "sampled" else {}
    policies["survival"] = {**prior, "drafter_cost": costs.ratio}
    capped = best(Rule("survival-by-phase", stopping.phase_length(policy=stopping.survival(**prior)), CAPS))
    vary("policy", "phase_length", {"policy": "survival"}, {name: capped[name] for name in capped if name in CAPS})
    vary("monitor", "phases", {"raw_entropy": False}, phase_hyperparameters(trace, raw_entropy=False))
    verifiers = {name: {"lenience": lenience} for name in ("lenience", "by_phase")}
    uncertain = {"drafter_entropy": drafter, "target_entropy": target}
    verifiers["easd"] = {name: float(np.percentile(values, UNCERTAIN)) for name, values in uncertain.items()}
    return {"policy": policies, "verifier": verifiers, "monitor": {"phases": phases}}, variants


main = command(Calibrate, calibrate, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
