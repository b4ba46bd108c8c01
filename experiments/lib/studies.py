"""What studies share that weigh rules over traces by a machine's costs: arguments to exit code, rules by name, tables.

Settings are never chosen on the prompts they are judged on.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console

from experiments.lib.commands import exit_codes, told
from experiments.lib.plots import INK
from experiments.lib.rules import RULES, Rule, rule
from experiments.lib.run_folder import TABLE, RunFolder
from experiments.lib.smoke import made_up_traces
from experiments.lib.terminal import Whole
from experiments.lib.traced import Judged, chosen_on_other_half, faster, load_traces, replay_rule
from specdec_jax.metrics.intervals import Interval
from specdec_jax.replay.cost_model import CostModel
from specdec_jax.replay.replay import Replay
from specdec_jax.replay.trace import Trace

Config = TypeVar("Config")
STATIC = "static"  # its best length is looked for like any other setting
RULE_COLOURS = {
    STATIC: "#999999",
    "adaedl": "#0072B2",
    "adaedl-keep": "#56B4E9",
    "max-confidence-keep": "#E69F00",
    "cumulative-confidence": "#009E73",
    "survival": "#D55E00",
}
COMPARED = tuple(entry.name for entry in RULES if entry.name in RULE_COLOURS)
SHORT_NAMES = {  # headings that a terminal need not cut
    STATIC: "best static",
    "adaedl-keep": "adaedl keep",
    "max-confidence-keep": "max conf. keep",
    "cumulative-confidence": "cumul. conf.",
}
SPARE_COLOURS = ("#CC79A7", "#8C564B", "#7F7F00", "#17BECF")


class Cell(NamedTuple):
    """How a rule did: totals over the judged texts."""

    speedup: Interval  # over plain decoding
    acceptance: float  # accepted over drafted
    tokens_per_pass: float
    settings: tuple[dict[str, Any], ...]


@exit_codes()
def run(config_type: type[Config], study: Callable[[Config, Console], None], doc: str | None, arguments: Any) -> int:
    """Reads the command line and runs the study; 2 and one line on bad input."""
    study(told(config_type, doc, arguments), Console(highlight=False, markup=False))
    return 0


def traces_of(paths: Sequence[str], smoke: bool, longest: int) -> dict[float, Trace]:
    """The traces by temperature, or made-up ones. Raises as `load_traces` does."""
    if not paths and not smoke:
        raise ValueError("name traces that python -m experiments.record wrote, or give --smoke")
    return made_up_traces() if smoke else load_traces(paths, longest)


def chosen_rules(names: Sequence[str]) -> list[Rule]:
    """The rules of these names, the best static length first. Raises ValueError naming the nearest."""
    return [rule(name) for name in dict.fromkeys((STATIC, *names))]


def judged(
    trace: Trace, entry: Rule, costs: CostModel, longest: int, known: dict[str, Replay] | None = None, seed: int = 0
) -> Judged:
    """The rule at the setting that was fastest on the other half of the texts.

    `known` keeps the replays of rules that costs do not change: every further machine is arithmetic for those.
    """
    settings = entry.settings()
    kept = known if known is not None and entry.costs is None else {}
    if entry.name not in kept:
        kept[entry.name] = replay_rule(trace, entry, costs, longest, settings)
    return chosen_on_other_half(kept[entry.name], costs, settings, seed)


def cell(trace: Trace, found: Judged, costs: CostModel, texts: Any = slice(None), seed: int = 0) -> Cell:
    """The totals of some texts against plain decoding of the same."""
    emitted = trace.length[texts]
    return Cell(
        faster(found.seconds[texts], emitted * costs.plain_pass, seed),
        float(found.accepted[texts].sum() / max(found.drafted[texts].sum(), 1)),
        float(emitted.sum() / found.rounds[texts].sum()),
        found.settings,
    )


def as_judged(found: Replay, costs: CostModel) -> Judged:
    """A replay of one setting, nothing chosen."""
    fields = {name: np.asarray(getattr(found, name)[0], float) for name in Judged._fields[1:-1]}
    return Judged(seconds=found.seconds(costs)[0], **fields, settings=({},))


def as_row(entry: Cell) -> dict[str, Any]:
    """A cell as fields of a result line."""
    return {
        "speedup": entry.speedup.estimate,
        "low": entry.speedup.low,
        "high": entry.speedup.high,
        "acceptance": entry.acceptance,
        "tokens_per_pass": entry.tokens_per_pass,
        "settings": list(entry.settings),
    }


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1), *rows])


def headings(names: Iterable[str]) -> list[str]:
    """Rules' names as columns."""
    return [SHORT_NAMES.get(name, name) for name in names]


def emphasised(texts: Sequence[str], values: Sequence[float]) -> list[str]:
    """The texts, that of the largest value in bold."""
    best = int(np.argmax(values))
    return [f"**{text}**" if index == best else text for index, text in enumerate(texts)]


def publish(folder: RunFolder, text: str, console: Console) -> None:
    """Writes table.md and prints it."""
    folder.write_text(TABLE, text)
    console.print(Whole(text))
    console.print(f"Written to {folder.path}/")


def missing(folder: RunFolder, keys: Sequence[str], wanted: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The combinations that the folder has no row of yet."""
    there = {tuple(row[key] for key in keys) for row in folder.rows()}
    return [entry for entry in wanted if entry not in there]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each rule, the same in every picture for those that are always compared."""
    others = [name for name in names if name not in RULE_COLOURS]
    return RULE_COLOURS | {name: SPARE_COLOURS[at % len(SPARE_COLOURS)] for at, name in enumerate(others)}


def at_temperature(temperature: float) -> str:
    """How a title calls a temperature."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def plain_axes(axes: Axes, title: str = "") -> None:
    """The house's look."""
    axes.set_title(title, fontsize=11, color=INK)
    axes.grid(color="#e4e4e4", lw=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
