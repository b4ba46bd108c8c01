"""Entropy or largest probability: which tells better when to stop, from greedy decoding to high temperatures?

Question:  Do rules that read the entropy (adaedl, adaedl-keep, svip) hold up better at temperature than those that read
           the largest probability (max-confidence, max-confidence-keep), in speed and in wasted drafter passes?
Command:   python -m experiments.record --temperatures 0 0.3 0.7 1 1.3 1.7 --out runs/temperatures
           python -m experiments.temperature runs/temperatures [--costs cost_model.json]
Time:      a minute for 84 prompts and three temperatures on 2 cores; --smoke needs no trace
Expected:  the built-in pair: greedy, the largest probability is the better sign, by 2.5 % with the checked token kept
           and by 5 % as published; sampled, the two differ by half a percent
Output:    runs/temperature-<time>/ with manifest.json, results.jsonl (a line a trace, task and rule), table.md and
           temperature.png; a stopped run goes on where it was with the same --out

Every rule has the setting that was fastest on the other half of the prompts, at every temperature anew. Wasted passes
are those that gave no accepted token, whether their token was rejected or never drawn.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import studies
from experiments.lib.rules import rule
from experiments.lib.trace_runs import (
    ALL,
    Row,
    Run,
    Source,
    TraceOptions,
    acceptance,
    chosen,
    fill,
    find,
    finish,
    gain,
    open_run,
    pooled,
    replayed,
    speedup,
    total,
    wasted,
)
from experiments.lib.trace_tables import (
    about,
    legend_below,
    palette,
    panels,
    percent_more,
    sections,
    setting,
    share,
    times,
)
from specdec_jax.metrics.intervals import Interval

ENTROPY, CONFIDENCE = ("adaedl", "adaedl-keep", "svip"), ("max-confidence", "max-confidence-keep")
RULES = ("static", *ENTROPY, *CONFIDENCE)
PAIRS = (("adaedl", "max-confidence"), ("adaedl-keep", "max-confidence-keep"), ("svip", "max-confidence-keep"))
STYLES = {"adaedl": "o--", "max-confidence": "s--", "static": "d:"}


@dataclass(frozen=True)
class Temperature(TraceOptions):
    """Compare rules for entropy and for confidence over temperatures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(Temperature, study, __doc__, arguments)


def study(options: Temperature, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    run = open_run("temperature", options, console)

    def measure(source: Source, what: str) -> Mapping[str, Row]:
        settings = rule(what).settings()
        return chosen(run, source, replayed(run, source, rule(what), settings), settings)

    rows = fill(run, RULES, measure)
    finish(run, report(run, rows), {"temperature.png": picture(run, rows)})


def report(run: Run, rows: Sequence[Row]) -> str:
    """Each temperature's rules, then entropy over confidence by temperature and task."""
    blocks = ["# Temperature", about(run)]
    for source, title in sections(run):
        here = [row for row in rows if (row["drafter"], row["temperature"], row["task"]) == (*source[:2], ALL)]
        blocks += [f"## {title}", rules_table(here)]
    blocks += ["## Entropy over largest probability", pairs_table(run, rows), tasks_table(run, rows)]
    return "\n\n".join([*blocks, NOTES, ""])


NOTES = (
    "Speed-up over plain decoding, total over total, with its 95 % bootstrap interval over prompts; chosen: on one "
    "half / on the other. Wasted: drafter passes that gave no accepted token, by token emitted; discarded: share of "
    "passes whose distribution gave no token. Gains of one rule over another are paired by prompt, bold where the "
    "interval leaves 0 out."
)


def rules_table(rows: Sequence[Row]) -> str:
    """Speed and waste of every rule."""
    head = ["rule", "chosen", "speed-up", "wasted a token", "discarded", "accepted"]
    lines = []
    for name in RULES:
        row = find(rows, what=name)
        discarded = (total(row, "passes") - total(row, "drafted")) / max(total(row, "passes"), 1)
        line = [name, setting(row["settings"]), times(speedup(row)), times(wasted(row)), share(discarded)]
        lines.append([*line, share(acceptance(row))])
    return studies.table(head, lines)


def pairs_table(run: Run, rows: Sequence[Row]) -> str:
    """What reading the entropy brings, by temperature; and in wasted passes."""
    head = ["temperature", *(f"{one} over {other}" for one, other in PAIRS), "wasted: " + " against ".join(PAIRS[1])]
    lines = []
    for source, title in sections(run):
        here = [row for row in rows if (row["drafter"], row["temperature"], row["task"]) == (*source[:2], ALL)]
        gains = [percent_more(gain(find(here, what=one), find(here, what=other))) for one, other in PAIRS]
        waste = [f"{wasted(find(here, what=name)).estimate:.2f}" for name in PAIRS[1]]
        lines.append([title, *gains, " against ".join(waste)])
    return studies.table(head, lines)


def tasks_table(run: Run, rows: Sequence[Row]) -> str:
    """The keeping pair by task, all temperatures together, each task at its own setting."""
    one, other = PAIRS[1]
    tasks = dict.fromkeys(task for source in run.sources for task in source.tasks if task != ALL)
    lines = []
    for task in tasks:
        both = [pooled(row for row in rows if row["task"] == task and row["what"] == name) for name in (one, other)]
        lines.append([task, *(times(speedup(row)) for row in both), percent_more(gain(*both))])
    return studies.table(["all temperatures", one, other, "gain"], lines) if lines else ""


def picture(run: Run, rows: Sequence[Row]) -> Figure:
    """Speed-up and wasted passes against the temperature, a column a drafter."""
    drafters = list(dict.fromkeys(source.drafter for source in run.sources))
    figure, grid = panels(drafters, 3.2, rows=2, width=6.4, sharex=True)
    figures: tuple[tuple[str, Callable[[Row], Interval]], ...] = (
        ("speed-up over plain decoding", speedup),
        ("wasted drafter passes a token", wasted),
    )
    colours = palette(RULES)
    for column, drafter in enumerate(drafters):
        temperatures = [source.temperature for source in run.sources if source.drafter == drafter]
        for axes, (label, value_of) in zip(grid[:, column], figures, strict=True):
            for place, name in enumerate(RULES):
                mine = [
                    find(rows, drafter=drafter, temperature=temperature, task=ALL, what=name)
                    for temperature in temperatures
                ]
                values = [value_of(row) for row in mine]
                bars = [[v.estimate - v.low for v in values], [v.high - v.estimate for v in values]]
                # intervals beside each other
                shifted = [temperature + 0.012 * (place - len(RULES) / 2) for temperature in temperatures]
                style = {"color": colours[name], "ms": 5, "lw": 1.6, "elinewidth": 0.9, "label": name}
                axes.errorbar(shifted, [v.estimate for v in values], bars, fmt=STYLES.get(name, "o-"), **style)
            axes.set_ylabel(label)
        grid[-1][column].set_xlabel("temperature")
    legend_below(figure, grid[0][0], 3)
    return figure


if __name__ == "__main__":
    sys.exit(main())
