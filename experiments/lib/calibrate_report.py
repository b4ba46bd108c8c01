"""What a calibration says: how its hyperparameters carry over to other tasks, its tables and its picture."""

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
    """A row a task: what was learnt on it alone, judged on all the others beside what they would have chosen."""
    replays = {}
    for name in CARRIED:
        entry: Rule = rule(name)
        settings = entry.settings()
        replays[name] = settings, replay_rule(trace, entry, costs, longest, settings).seconds(costs)
    entropy, running = trace.path[..., FEATURES.index("entropy")], running_entropy(trace)
    rows = []
    tasks = texts_by_task(trace)
    for task, own in tasks.items():
        rest = np.setdiff1d(np.arange(trace.num_texts), own)
        if rest.size == 0 or any(_of_one_kind(trace, texts) for texts in (own, rest)):
            continue  # nothing to learn, or nothing to judge on
        row: dict[str, Any] = {"task": task, "texts": len(own)}
        for name, values in (("entropy", entropy), ("running_entropy", running)):
            row[name] = _separation(trace, values, own, rest)
        for name, (settings, seconds) in replays.items():
            here, there = seconds[:, own].sum(axis=1), seconds[:, rest].sum(axis=1)
            chosen = int(np.argmin(here))
            row[name] = {"setting": settings[chosen], "of_best": float(there.min() / there[chosen])}
        rows.append(row)
    return rows


def prior_gain(kind: str, trace: Trace, costs: CostModel, longest: int) -> Interval | None:
    """How many times faster `survival` is with a prior learnt on the other half of the texts than with its own.

    None where a half accepts nothing, or everything: there is nothing to learn.
    """
    half = np.random.default_rng(0).permutation(trace.num_texts) % 2
    if any(_of_one_kind(trace, np.flatnonzero(half == which)) for which in (0, 1)):
        return None
    learnt = [fit_prior(select(trace, np.flatnonzero(half == which))) for which in (0, 1)]
    policies = [survival(), *(survival(**{kind: list(prior)}) for prior in learnt)]
    built_in, of_first, of_second = (
        replay_rule(trace, Rule("survival", policy), costs, longest).seconds(costs)[0] for policy in policies
    )
    return faster(np.where(half == 0, of_second, of_first), built_in)


def _of_one_kind(trace: Trace, texts: np.ndarray) -> bool:
    accepted = trace.accepted[texts].sum()
    return bool(accepted == 0 or accepted == trace.length[texts].sum())


def _separation(trace: Trace, values: np.ndarray, own: np.ndarray, rest: np.ndarray) -> dict[str, float]:
    """The threshold learnt on a task's texts: how well it separates there, elsewhere, and what could be had there."""
    both = []
    for texts in (own, rest):
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
        parts += [f"## {kind.capitalize()}", _sentences(figures), _phases(hyperparameters["monitor"]["phases"])]
        parts += [_settings(hyperparameters, variants)]
        parts += [_carried(figures["carry_over"])] if figures["carry_over"] else []
    return "\n\n".join(parts) + "\n"


def _percentiles(figures: Mapping[str, Any]) -> str:
    names = list(figures["greedy"]["drafter_entropy"])
    lines = [
        [f"{kind}: {name.replace('_', ' ')}", *(f"{found[name][percent]:.2f}" for percent in names)]
        for kind, found in figures.items()
        for name in ("drafter_entropy", "target_entropy", "running_entropy")
    ]
    note = "Running entropies are of the target's raw distributions, the others of the distributions as sampled."
    return markdown(["nats, by percentile", *names], lines) + "\n\n" + note


def _phases(phases: Mapping[str, float]) -> str:
    bounds = f"above a running entropy of {phases['enter']:.2f} nats, routine below {phases['leave']:.2f}"
    return f"Phases: reasoning {bounds}."


def _sentences(figures: Mapping[str, Any]) -> str:
    cut, slow, bound = figures["rejection"], figures["rejection_by_running_entropy"], figures["lenience"]
    lines = (
        f"{figures['acceptance']:.0%} of tokens would be accepted.",
        f"Rejected ones are told best by a drafter entropy above {cut['threshold']:.2f} nats",
        f"(Youden's J {cut['youden']:.2f}, area {cut['area']:.2f});",
        f"the running entropy alone knows less (J {slow['youden']:.2f}, area {slow['area']:.2f}).",
        f"AdaEDL's factor nearest to what was accepted: {figures['entropy_factor']:.2f}.",
        f"Lenience down to {bound['bound']:g} keeps the mean total variation a token under {bound['max_deviation']:g}.",
    )
    if figures["prior_gain"] is not None:
        gain = "{:.3f} ({:.3f}–{:.3f})".format(*figures["prior_gain"])
        lines += (f"`survival` with a prior learnt on other texts is {gain} times as fast as with the built-in one.",)
    return " ".join(lines)


def _settings(hyperparameters: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> str:
    found = [(f"{kind} {name}", own) for kind, entries in hyperparameters.items() for name, own in entries.items()]
    for variant in variants:
        built = ", ".join(f"{key}={value}" for key, value in variant["static_options"].items())
        found.append((f"{variant['kind']} {variant['name']}({built})", variant["hyperparameters"]))
    lines = [
        [name, ", ".join(f"{key} {_short(value)}" for key, value in own.items()) or "its own defaults"]
        for name, own in found
    ]
    return markdown(["of", "hyperparameters"], lines).replace("---:", "---")


def _short(value: Any) -> str:
    return " ".join(f"{part:.3g}" for part in value) if isinstance(value, list) else f"{value:.3g}"


def _carried(rows: Sequence[Mapping[str, Any]]) -> str:
    scores = ["threshold", "J there", "J elsewhere", "best J elsewhere"]
    by_entropy = [[row["task"], *_scores(row["entropy"])] for row in rows]
    by_phase = [[row["task"], *_scores(row["running_entropy"])] for row in rows]
    speeds = [[row["task"], *(f"{row[name]['of_best']:.3f}" for name in CARRIED)] for row in rows]
    return "\n\n".join(
        [
            "Learnt on one task and judged on the others, thresholds by Youden's J. The drafter's entropy:",
            markdown(["learnt on", *scores], by_entropy),
            "The running entropy, by which phases are told:",
            markdown(["learnt on", *scores], by_phase),
            "Rules' speed at the setting learnt there, as a share of the best one setting's elsewhere:",
            markdown(["learnt on", *CARRIED], speeds),
        ]
    )


def _scores(found: Mapping[str, float]) -> list[str]:
    return [f"{found[name]:.2f}" for name in ("threshold", "youden", "youden_elsewhere", "best_elsewhere")]


def picture(content: Mapping[str, Any]) -> Figure:
    """Acceptance by the drafter's entropy and by the running entropy, with the thresholds."""
    figure = Figure(figsize=(9.4, 3.8), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = {"greedy": "#0072B2", "sampled": "#D55E00"}
    for kind, found in content["figures"].items():
        for axes, name in ((left, "acceptance_by_entropy"), (right, "acceptance_by_running_entropy")):
            curve = found[name]
            axes.plot(curve["value"], curve["acceptance"], "o-", ms=3.5, lw=1.4, color=colours[kind], label=kind)
        left.axvline(found["rejection"]["threshold"], color=colours[kind], lw=1, ls="--")
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
