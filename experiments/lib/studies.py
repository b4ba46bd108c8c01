"""What studies share: arguments to exit code, rules that are always compared, Markdown tables, the look of a plot."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console

from experiments.lib.commands import exit_codes, told
from experiments.lib.plots import INK
from experiments.lib.rules import RULES
from experiments.lib.run_folder import TABLE, RunFolder
from experiments.lib.terminal import Whole

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


@exit_codes()
def run(config_type: type[Config], study: Callable[[Config, Console], None], doc: str | None, arguments: Any) -> int:
    """Reads the command line and runs the study; 2 and one line on bad input."""
    study(told(config_type, doc, arguments), Console(highlight=False, markup=False))
    return 0


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
