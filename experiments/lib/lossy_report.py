"""The table and the picture of experiments.lossy, from its rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.cells import NONE, at_temperature, interval, markdown
from experiments.lib.plots import COLOURS, INK, panels
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.intervals import Interval, mean_interval, total_speedup
from specdec_jax.text.strategies import name_in

PLAIN, REJECTION = "plain", "rejection"
BOUNDS = "[{}, {}]"  # some are negative
NOTES = (
    "Speed: tokens/s over those of rejection, all tokens over all seconds. Predicted: the same by counted rounds and "
    "drafter passes and a machine's costs. Log-likelihood: mean over prompts of a token's under the target at "
    "temperature 1, in nats, and its difference to rejection's on the same prompts. TV: mean total variation between "
    "the distribution of a token drafted at a position and the target's, along the text; KL likewise, in nats. First "
    "choice: share of tokens that are the target's most probable one after what stands before. Equal: share of tokens "
    "before the first one that differs from plain decoding. Brackets: 95 % bootstrap interval over prompts. A "
    "verifier that changes nothing differs from rejection by chance of drawing alone."
)
COUNTS = ("seconds", "num_rounds", "num_draft_tokens", "num_emitted_tokens", "drafter_passes")
MEANS = ("log_likelihood", "total_variation", "divergence", "first_choice")


class Line(NamedTuple):
    """A variant at a temperature, over all prompts."""

    variant: str
    tokens_per_round: float
    speed: Interval  # over rejection
    predicted: float  # over rejection
    likelihood: float  # nats a token
    difference: Interval  # to rejection's
    total_variation: float  # NaN where it is not known
    divergence: float
    first_choice: float
    equal: float  # to plain decoding, NaN above temperature 0


def lines(rows: Sequence[Mapping[str, Any]], temperature: float, costs: CostModel) -> list[Line]:
    """The variants of one temperature, in the order of their rows."""
    here = [row for row in rows if row["temperature"] == temperature]
    prompts = list(dict.fromkeys(row["prompt_id"] for row in here))
    plain = {(row["prompt_id"], row["repeat"]): row["tokens"] for row in here if row["variant"] == PLAIN}
    figures = {name: by_prompt(here, name, prompts) for name in dict.fromkeys(row["variant"] for row in here)}
    base, found = figures[REJECTION], []
    for name, own in figures.items():
        mine = [row for row in here if row["variant"] == name]
        pairs = [(row["tokens"], plain[row["prompt_id"], row["repeat"]]) for row in mine]
        found.append(
            Line(
                name,
                own["num_emitted_tokens"].sum() / own["num_rounds"].sum(),
                total_speedup(own["num_emitted_tokens"], own["seconds"], base["num_emitted_tokens"], base["seconds"]),
                predicted(own, costs, name) / predicted(base, costs, REJECTION),
                float(own["log_likelihood"].mean()),
                mean_interval(own["log_likelihood"] - base["log_likelihood"]),
                float(own["total_variation"].mean()),
                float(own["divergence"].mean()),
                float(own["first_choice"].mean()),
                equal_share(pairs) if temperature == 0 else float("nan"),
            )
        )
    return found


def by_prompt(rows: Sequence[Mapping[str, Any]], variant: str, prompts: Sequence[str]) -> dict[str, np.ndarray]:
    """Counts summed and qualities averaged over the repeats of each prompt, [prompts] float64."""
    mine = [[row for row in rows if (row["variant"], row["prompt_id"]) == (variant, name)] for name in prompts]
    number = lambda value: float("nan") if value is None else float(value)  # noqa: E731
    totals = {key: np.array([sum(row[key] for row in group) for group in mine], float) for key in COUNTS}
    return totals | {key: np.array([np.mean([number(row[key]) for row in group]) for group in mine]) for key in MEANS}


def predicted(counts: Mapping[str, np.ndarray], costs: CostModel, variant: str) -> float:
    """Tokens per second by counts: rounds verify in the width of the mean draft."""
    tokens, rounds, passes = (counts[key].sum() for key in ("num_emitted_tokens", "num_rounds", "drafter_passes"))
    if variant == PLAIN:
        return tokens / (rounds * costs.plain_pass)
    drafted = int(np.ceil(counts["num_draft_tokens"].sum() / rounds))
    return tokens / (rounds * costs.pass_times(drafted)[-1] + passes * costs.drafter_step)


def equal_share(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Share of all tokens of the first texts that stand before the first difference to the second ones."""
    same = 0
    for ours, plain in pairs:
        agree = [one == other for one, other in zip(ours, plain, strict=False)]
        same += agree.index(False) if False in agree else len(agree)
    return same / sum(len(ours) for ours, _ in pairs)


def report(rows: Sequence[Mapping[str, Any]], costs: CostModel) -> str:
    """The table of each temperature."""
    heads = ["verifier", "tokens a round", "speed", "predicted", "log-likelihood", "difference", "TV", "KL"]
    blocks = ["# Lossy verification"]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        greedy = temperature == 0
        body = [cells(line, greedy) for line in lines(rows, temperature, costs)]
        blocks += [
            f"## {at_temperature(temperature)}",
            markdown([*heads, "first choice", *(["equal"] if greedy else [])], body),
        ]
    return "\n\n".join([*blocks, NOTES, f"Costs: {costs.device or 'as given'}, c = {costs.ratio:.3f}.", ""])


def cells(line: Line, greedy: bool) -> list[str]:
    """A row of the table."""
    own = [
        label(line.variant),
        f"{line.tokens_per_round:.2f}",
        interval(line.speed, bounds=BOUNDS),
        f"{line.predicted:.2f}",
        f"{line.likelihood:.3f}",
        interval(line.difference, "+.3f", BOUNDS),
        *(NONE if np.isnan(value) else f"{value:.4f}" for value in (line.total_variation, line.divergence)),
        f"{line.first_choice:.1%}",
    ]
    return [*own, f"{line.equal:.1%}"] if greedy else own


def label(variant: str) -> str:
    """The verifier and the values of its hyperparameters, for what is narrow."""
    name, _, options = variant.rstrip(")").partition("(")
    values = "/".join(option.partition("=")[2] for option in options.split(",")) if options else ""
    return f"{name} {values}".strip()


def picture(rows: Sequence[Mapping[str, Any]], costs: CostModel) -> Figure:
    """Speed against the difference in log-likelihood, a line a verifier over its settings, a panel a temperature."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure, grid = panels(list(map(at_temperature, temperatures)), 4.4, width=5.4, least=6.4)
    for axes, temperature in zip(grid[0], temperatures, strict=True):
        found = [line for line in lines(rows, temperature, costs) if line.variant != PLAIN]
        for place, family in enumerate(dict.fromkeys(name_in(line.variant) for line in found)):
            colour = INK if family == REJECTION else COLOURS[1 + place % (len(COLOURS) - 1)]
            _family(axes, family, [line for line in found if name_in(line.variant) == family], colour)
        axes.axhline(0, color=INK, lw=0.8, ls="--", zorder=1)
        axes.axvline(1, color=INK, lw=0.8, ls="--", zorder=1)
        axes.set_xlabel("tokens/s over rejection's")
        axes.set_ylabel("log-likelihood a token, difference to rejection's (nats)")
        axes.legend(fontsize=8, frameon=False)
    return figure


def _family(axes: Axes, family: str, mine: Sequence[Line], colour: str) -> None:
    """A verifier's settings as a line, each with its hyperparameters beside it."""
    points = [(line.speed.estimate, line.difference.estimate) for line in mine]
    axes.plot(*zip(*points, strict=True), "o-", color=colour, lw=1.4, ms=5, label=family)
    beside: dict[str, Any] = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7, "color": colour}
    for line, point in zip(mine, points, strict=True):
        axes.annotate(label(line.variant).removeprefix(family), point, **beside)
