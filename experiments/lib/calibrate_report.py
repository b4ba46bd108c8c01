"""How calibrated hyperparameters carry over to other tasks, and a calibration's tables and picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lib.cells import markdown
from experiments.lib.plots import plain_axes
from experiments.lib.rules import Rule, rule
from experiments.lib.trace_runs import faster, replay_rule, texts_by_task
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.intervals import Interval
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.metrics.separation import separate, youden
from specdec_jax.replay.phase_path import running_entropy
from specdec_jax.replay.trace import FEATURES, Trace, select
from specdec_jax.stopping import survival

CARRIED = ("static", "adaedl", "max-confidence", "cumulative-confidence")


def carry_over(trace: Trace, costs: CostModel, longest: int) -> list[dict[str, Any]]:
    """A row a task: what was learnt on it alone, judged on all other tasks against their best setting."""
    settings = {name: rule(name).settings() for name in CARRIED}
    seconds = {
        name: replay_rule(trace, rule(name), costs, longest, tried).seconds(costs) for name, tried in settings.items()
    }
    entropies = {"entropy": trace.path[..., FEATURES.index("entropy")], "running_entropy": running_entropy(trace)}
    rows = []
    for task, texts in texts_by_task(trace).items():
        rest = np.setdiff1d(np.arange(trace.num_texts), texts)
        if rest.size == 0 or any(_of_one_kind(trace, half) for half in (texts, rest)):
            continue  # nothing to learn, or nothing to judge on
        row: dict[str, Any] = {"task": task, "texts": len(texts)}
        row |= {name: _separation(trace, values, texts, rest) for name, values in entropies.items()}
        for name, by_setting in seconds.items():
            here, there = by_setting[:, texts].sum(axis=1), by_setting[:, rest].sum(axis=1)
            chosen = int(np.argmin(here))
            row[name] = {"setting": settings[name][chosen], "of_best": float(there.min() / there[chosen])}
        rows.append(row)
    return rows


def prior_gain(kind: str, trace: Trace, costs: CostModel, longest: int) -> Interval | None:
    """How many times faster `survival` is with a prior learnt on the other half of the texts than with its default.

    None where a half accepts nothing, or everything: there is nothing to learn.
    """
    half = np.random.default_rng(0).permutation(trace.num_texts) % 2
    halves = [np.flatnonzero(half == which) for which in (0, 1)]
    if any(_of_one_kind(trace, texts) for texts in halves):
        return None
    priors = [fit_prior(select(trace, texts)) for texts in halves]
    policies = [survival(), *(survival(**{kind: list(prior)}) for prior in priors)]
    built_in, of_first, of_second = (
        replay_rule(trace, Rule("survival", policy), costs, longest).seconds(costs)[0] for policy in policies
    )
    return faster(np.where(half == 0, of_second, of_first), built_in)


def _of_one_kind(trace: Trace, texts: np.ndarray) -> bool:
    """Whether these texts accept all drafts, or none."""
    accepted = trace.accepted[texts].sum()
    return bool(accepted == 0 or accepted == trace.length[texts].sum())


def _separation(trace: Trace, values: np.ndarray, task: np.ndarray, rest: np.ndarray) -> dict[str, float]:
    """The threshold learnt on a task's texts: how well it separates there and in the rest, and the best of the rest."""
    both = []
    for texts in (task, rest):
        there = np.isfinite(values[texts]) & (np.arange(values.shape[1])[None, :] < trace.length[texts][:, None])
        both.append((values[texts][there], trace.accepted[texts][there]))
    learnt = separate(*both[0])
    return {
        "threshold": learnt.threshold,
        "youden": learnt.youden,
        "youden_elsewhere": youden(*both[1], learnt.threshold),
        "best_elsewhere": separate(*both[1]).youden,
    }


def report(content: Mapping[str, Any]) -> str:
    """All tables."""
    about, parts = content["about"], [f"# {content['target']['name']} with {content['drafter']['name']}"]
    files, temperature = ", ".join(about["prompts"]), about["temperatures"][1]
    parts.append(f"{about['texts']} texts of {files}; temperatures 0 and {temperature:g}. Costs: {about['costs']}.")
    parts.append(_percentiles(content["figures"]))
    for kind, figures in content["figures"].items():
        hyperparameters, variants = content["hyperparameters"][kind], content["variants"][kind]
        phases = hyperparameters["monitor"]["phases"]
        bounds = f"above a running entropy of {phases['enter']:.2f} nats, routine below {phases['leave']:.2f}"
        parts += [f"## {kind.capitalize()}", _sentences(figures), f"Phases: reasoning {bounds}."]
        parts += [_settings(hyperparameters, variants)]
        parts += [_carried(figures["carry_over"])] if figures["carry_over"] else []
    return "\n\n".join(parts) + "\n"


def _percentiles(figures: Mapping[str, Any]) -> str:
    names = list(figures["greedy"]["drafter_entropy"])
    lines = [
        [f"{kind}: {name.replace('_', ' ')}", *(f"{by_name[name][percent]:.2f}" for percent in names)]
        for kind, by_name in figures.items()
        for name in ("drafter_entropy", "target_entropy", "running_entropy")
    ]
    note = "Running entropies are of the target's raw distributions, the others of the distributions as sampled."
    return markdown(["nats, by percentile", *names], lines) + "\n\n" + note


def _sentences(figures: Mapping[str, Any]) -> str:
    cut, slow, bound = figures["rejection"], figures["rejection_by_running_entropy"], figures["lenience"]
    lines = (
        f"{figures['acceptance']:.0%} of tokens would be accepted.",
        f"A drafter entropy above {cut['threshold']:.2f} nats indicates rejected ones best",
        f"(Youden's J {cut['youden']:.2f}, area {cut['area']:.2f});",
        f"the running entropy alone separates less (J {slow['youden']:.2f}, area {slow['area']:.2f}).",
        f"AdaEDL's factor nearest to what was accepted: {figures['entropy_factor']:.2f}.",
        f"Lenience down to {bound['bound']:g} keeps the mean total variation a token under {bound['max_deviation']:g}.",
    )
    if figures["prior_gain"] is not None:
        gain = "{:.3f} ({:.3f}–{:.3f})".format(*figures["prior_gain"])
        lines += (f"`survival` with a prior learnt on other texts is {gain} times as fast as with the built-in one.",)
    return " ".join(lines)


def _settings(hyperparameters: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> str:
    by_name = {f"{kind} {name}": values for kind, each in hyperparameters.items() for name, values in each.items()}
    for variant in variants:
        options = ", ".join(f"{key}={value}" for key, value in variant["static_options"].items())
        by_name[f"{variant['kind']} {variant['name']}({options})"] = variant["hyperparameters"]
    lines = [
        [name, ", ".join(f"{key} {_short(value)}" for key, value in values.items()) or "the defaults"]
        for name, values in by_name.items()
    ]
    return markdown(["strategy", "hyperparameters"], lines).replace("---:", "---")


def _short(value: Any) -> str:
    return " ".join(f"{part:.3g}" for part in value) if isinstance(value, list) else f"{value:.3g}"


def _carried(rows: Sequence[Mapping[str, Any]]) -> str:
    speeds = [[row["task"], *(f"{row[name]['of_best']:.3f}" for name in CARRIED)] for row in rows]
    return "\n\n".join(
        [
            "Learnt on one task and judged on the others, thresholds by Youden's J. The drafter's entropy:",
            _thresholds(rows, "entropy"),
            "The running entropy, by which phases are separated:",
            _thresholds(rows, "running_entropy"),
            "Rules' speed at the setting learnt there, as a share of the best single setting's elsewhere:",
            markdown(["learnt on", *CARRIED], speeds),
        ]
    )


def _thresholds(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    names = ("threshold", "youden", "youden_elsewhere", "best_elsewhere")
    lines = [[row["task"], *(f"{row[name][score]:.2f}" for score in names)] for row in rows]
    return markdown(["learnt on", "threshold", "J there", "J elsewhere", "best J elsewhere"], lines)


def picture(content: Mapping[str, Any]) -> Figure:
    """Acceptance by the drafter's entropy and by the running entropy, with the thresholds."""
    figure = Figure(figsize=(9.4, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = {"greedy": "#0072B2", "sampled": "#D55E00"}
    for kind, figures in content["figures"].items():
        for axes, name in ((left, "acceptance_by_entropy"), (right, "acceptance_by_running_entropy")):
            curve = figures[name]
            axes.plot(curve["value"], curve["acceptance"], "o-", ms=3.5, lw=1.4, color=colours[kind], label=kind)
        left.axvline(figures["rejection"]["threshold"], color=colours[kind], lw=1, ls="--")
        phases = content["hyperparameters"][kind]["monitor"]["phases"]
        right.axvspan(phases["leave"], phases["enter"], color=colours[kind], alpha=0.15, lw=0)
    plain_axes(left, "by the drafter's entropy")
    plain_axes(right, "by the target's running entropy")
    left.set_xlabel("nats (dashed: best threshold)", fontsize=9)
    right.set_xlabel("nats (shaded: from leave to enter)", fontsize=9)
    left.set_ylabel("accepted", fontsize=9)
    left.set_ylim(0, 1)
    right.legend(frameon=False, fontsize=8)
    return figure
