"""A calibration's tables and picture."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.lib.calibrate_hyperparameters import CARRIED
from experiments.lib.cells import interval, markdown
from experiments.lib.plots import panels

SCORES = ("threshold", "youden", "youden_elsewhere", "best_elsewhere")


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
        parts += _carried(figures["carry_over"]) if figures["carry_over"] else []
    return "\n\n".join(parts) + "\n"


def _sentences(figures: Mapping[str, Any]) -> str:
    cut, slow, bound = figures["rejection"], figures["rejection_by_running_entropy"], figures["lenience"]
    text = (
        f"{figures['acceptance']:.0%} of tokens would be accepted. A drafter entropy above {cut['threshold']:.2f} nats "
        f"indicates rejected ones best (Youden's J {cut['youden']:.2f}, area {cut['area']:.2f}); the running entropy "
        f"alone separates less (J {slow['youden']:.2f}, area {slow['area']:.2f}). AdaEDL's factor nearest to what was "
        f"accepted: {figures['entropy_factor']:.2f}. Lenience down to {bound['bound']:g} keeps the mean total "
        f"variation a token under {bound['max_deviation']:g}."
    )
    if figures["prior_gain"] is None:
        return text
    gain = interval(figures["prior_gain"], ".3f", "({}–{})")
    return f"{text} `survival` with a prior learnt on other texts is {gain} times as fast as with the built-in one."


def _carried(rows: list[dict[str, Any]]) -> list[str]:
    """Thresholds and rule settings chosen on one task and evaluated on the others."""
    thresholds = [
        markdown(
            ["learnt on", "threshold", "J there", "J elsewhere", "best J elsewhere"],
            [[row["task"], *(f"{row[name][score]:.2f}" for score in SCORES)] for row in rows],
        )
        for name in ("entropy", "running_entropy")
    ]
    speeds = [[row["task"], *(f"{row[name]['of_best']:.3f}" for name in CARRIED)] for row in rows]
    return [
        "Learnt on one task and judged on the others, thresholds by Youden's J. The drafter's entropy:",
        thresholds[0],
        "The running entropy, by which phases are separated:",
        thresholds[1],
        "Rules' speed at the setting learnt there, as a share of the best single setting's elsewhere:",
        markdown(["learnt on", *CARRIED], speeds),
    ]


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
