"""AdaEDL's entropy factor: does its value matter, and does fitting it while decoding help?

Question:  How does the speed-up depend on the factor gamma in `1 - sqrt(gamma * H) < lambda`, at the published lambda
           and at a lambda chosen for that factor, and what does fitting gamma online (adaptive_gamma) bring?
Command:   python -m experiments.entropy_factor TRACES... [--factors 0.05 0.2 1.0] [--costs cost_model.json]
Time:      a minute for 84 prompts and three temperatures on 2 cores; --smoke needs no trace
Expected:  the built-in pair: at lambda 0.7 the smallest factor is the fastest, by 6 to 24 % over 0.2; with lambda
           chosen for it every factor up to 0.2 is the same rule, for gamma and lambda set one cut-off,
           H > (1 - lambda)^2 / gamma, which no lambda puts above 1 / gamma; fitted is 3 to 7 % slower than those
Output:    runs/entropy_factor-<time>/ with manifest.json, results.jsonl (a line a trace, task, factor and lambda),
           table.md and factors.png; a stopped run goes on where it was with the same --out

Traces of several drafters are compared side by side: name all their folders. Lambda is where Algorithm 1 starts; chosen
lambdas were fastest on the other half of the prompts of the task. `fitted` starts from gamma 0.2.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from rich.console import Console

from experiments.lib import studies
from experiments.lib.plots import COLOURS
from experiments.lib.rules import THRESHOLDS, rule
from experiments.lib.smoke import made_up_trace
from experiments.lib.trace_runs import (
    ALL,
    Row,
    Run,
    Source,
    TraceOptions,
    chosen,
    fill,
    find,
    finish,
    fixed,
    gain,
    open_run,
    replayed,
    speedup,
)
from experiments.lib.trace_tables import about, band, legend_below, panels, percent_more, sections, setting, times

FITTED, PUBLISHED = "fitted", 0.2
LAMBDA = 0.7
LAMBDAS = (0.0, *THRESHOLDS)
KINDS = ("published", "chosen")


@dataclass(frozen=True)
class EntropyFactor(TraceOptions):
    """Sweep AdaEDL's entropy factor."""

    factors: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)
    """The paper's gamma; 0.2, which all are compared with, is always among them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; 2 on bad input."""
    return studies.run(EntropyFactor, study, __doc__, arguments)


def study(options: EntropyFactor, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    factors = sorted({*options.factors, PUBLISHED})
    rule("adaedl").policy.init(len(factors), entropy_factor=np.array(factors))  # refuses what is out of range
    names = {f"{factor:g}": factor for factor in factors}
    whats = {f"{name}, {kind}": (name, kind) for name in (*names, FITTED) for kind in KINDS}
    two = {
        f"{name}, made up": {1.0: made_up_trace(1.0, boost=boost)} for name, boost in (("worse", 0.0), ("better", 0.7))
    }
    run = open_run("entropy_factor", options, console, two)

    def measure(source: Source, what: str) -> Mapping[str, Row]:
        name, kind = whats[what]
        entry = rule("adaptive-gamma" if name == FITTED else "adaedl")
        factor = {} if name == FITTED else {"entropy_factor": names[name]}
        values = (LAMBDA,) if kind == "published" else LAMBDAS
        settings = [factor | {"threshold": value} for value in values]
        found = replayed(run, source, entry, settings)
        return (
            fixed(run, source, found, settings=settings) if len(values) == 1 else chosen(run, source, found, settings)
        )

    rows = fill(run, tuple(whats), measure)
    finish(run, report(run, rows, [*names, FITTED]), {"factors.png": picture(run, rows, factors)})


def report(run: Run, rows: Sequence[Row], names: Sequence[str]) -> str:
    """Factors at the published lambda and at the chosen one, against 0.2; then by task."""
    blocks = ["# The entropy factor", about(run)]
    for source, title in sections(run):
        here = [row for row in rows if (row["drafter"], row["temperature"]) == source[:2]]
        blocks += [f"## {title}", whole_table(here, names)]
        if len(source.tasks) > 1:
            blocks += [tasks_table(source, here, names, kind) for kind in KINDS]
    return "\n\n".join([*blocks, NOTES, ""])


NOTES = (
    f"Speed-up over plain decoding, total over total; over 0.2: against the published factor at the published lambda "
    f"({LAMBDA:g}), or at the lambda chosen for it; 95 % bootstrap intervals over prompts, paired, bold where they "
    "leave 0 out. Lambda: chosen on one half of the prompts / on the other. Cut-off: the entropy in nats above which a "
    "draft stops at that lambda, before Algorithm 1 moves it; lambda cannot put it above 1 over the factor."
)


def whole_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Both lambdas over all texts."""
    head = [
        "factor",
        f"speed-up at {LAMBDA:g}",
        "over 0.2",
        "cut-off",
        "chosen lambda",
        "speed-up",
        "over 0.2",
        "cut-off",
    ]
    lines = []
    for name in names:
        line = [name]
        for kind in KINDS:
            row, other = (find(rows, what=f"{factor}, {kind}", task=ALL) for factor in (name, f"{PUBLISHED:g}"))
            line += [setting(row["settings"], "threshold")] if kind == "chosen" else []
            line += [times(speedup(row)), "" if row is other else percent_more(gain(row, other)), cutoffs(row)]
        lines.append(line)
    return studies.table(head, lines)


def cutoffs(row: Row) -> str:
    """The entropies above which a draft stops, of each setting."""
    if "entropy_factor" not in row["settings"][0]:
        return "–"
    found = [(1 - chosen["threshold"]) ** 2 / chosen["entropy_factor"] for chosen in row["settings"]]
    return " / ".join(dict.fromkeys(f"{value:.2g}" for value in found))


def tasks_table(source: Source, rows: Sequence[Row], names: Sequence[str], kind: str) -> str:
    """Total speed-ups by task."""
    tasks = [task for task in source.tasks if task != ALL]
    lines = []
    for name in names:
        found = [speedup(find(rows, what=f"{name}, {kind}", task=task)).estimate for task in tasks]
        lines.append([name, *(f"{value:.2f}" for value in found)])
    title = f"at lambda {LAMBDA:g}" if kind == "published" else "lambda chosen by task"
    return studies.table([f"factor, {title}", *tasks], lines)


def picture(run: Run, rows: Sequence[Row], factors: Sequence[float]) -> Figure:
    """Speed-up against the factor, lambda published or chosen, and the fitted factor as a level."""
    figure, grid = panels([title for _, title in sections(run)], sharey=True)
    styles = {"published": (COLOURS[1], "o-", f"lambda {LAMBDA:g}"), "chosen": (COLOURS[2], "s-", "lambda chosen")}
    for axes, source in zip(grid[0], run.sources, strict=True):
        here = [row for row in rows if (row["drafter"], row["temperature"], row["task"]) == (*source[:2], ALL)]
        for kind, (colour, style, label) in styles.items():
            values = [speedup(find(here, what=f"{factor:g}, {kind}")) for factor in factors]
            band(axes, factors, values, colour, marker=style[0], ls=style[1:], label=label)
            level = speedup(find(here, what=f"{FITTED}, {kind}")).estimate
            axes.axhline(level, color=colour, ls="--", lw=1.2, label=f"{label}, factor fitted")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(list(factors)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{factor:g}" for factor in factors])
        axes.set_xlabel("entropy factor")
    grid[0][0].set_ylabel("speed-up over plain decoding")
    legend_below(figure, grid[0][0], 4)
    return figure


if __name__ == "__main__":
    sys.exit(main())
