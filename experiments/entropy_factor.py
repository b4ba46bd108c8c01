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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import NONE, interval, markdown
from experiments.lib.commands import command
from experiments.lib.plots import COLOURS
from experiments.lib.rules import THRESHOLDS, rule
from experiments.lib.smoke import made_up_trace
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import ALL, Row, Run, Source, TraceOptions, variant

FITTED, PUBLISHED = "fitted", "0.2"
LAMBDA = 0.7
LAMBDAS = {"published": (LAMBDA,), "chosen": (0.0, *THRESHOLDS)}


@dataclass(frozen=True)
class EntropyFactor(TraceOptions):
    """Sweep AdaEDL's entropy factor."""

    factors: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)
    """The paper's gamma; 0.2, which all are compared with, is always among them."""


def study(options: EntropyFactor, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    factors = sorted({*options.factors, float(PUBLISHED)})
    rule("adaedl").policy.init(len(factors), entropy_factor=np.array(factors))  # refuses what is out of range
    rules = {f"{factor:g}": (rule("adaedl"), {"entropy_factor": factor}) for factor in factors}
    rules[FITTED] = rule("adaptive-gamma"), {}
    variants = {
        f"{name}, {kind}": variant(entry, [fixed | {"threshold": value} for value in values])
        for name, (entry, fixed) in rules.items()
        for kind, values in LAMBDAS.items()
    }
    two = {
        f"{name}, made up": {1.0: made_up_trace(1.0, boost=boost)} for name, boost in (("worse", 0.0), ("better", 0.7))
    }
    run = runs.open_run("entropy_factor", options, console, made_up=two)
    rows = runs.compare(run, variants)
    publish(run.folder, report(run, rows, list(rules)), run.console, factors=picture(run, rows, factors))


def report(run: Run, rows: Sequence[Row], names: Sequence[str]) -> str:
    """Factors at the published lambda and at the chosen one, against 0.2; then by task."""
    blocks = ["# The entropy factor", tables.about(run), NOTES]
    for source, title in tables.sections(run):
        here = runs.of_source(rows, source)
        blocks += [f"## {title}", whole_table(here, names)]
        if len(source.tasks) > 1:
            blocks += [tasks_table(source, here, names, kind) for kind in LAMBDAS]
    return "\n\n".join([*blocks, ""])


NOTES = (
    f"Speed-up over plain decoding, total over total; over {PUBLISHED}: against the published factor at the published "
    f"lambda ({LAMBDA:g}), or at the lambda chosen for it; 95 % bootstrap intervals over prompts, paired, bold where "
    "they exclude 0. Lambda: chosen on one half of the prompts / on the other. Cut-off: the entropy in nats above "
    "which a draft stops at that lambda, before Algorithm 1 moves it; lambda cannot put it above 1 over the factor."
)


def whole_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Both lambdas over all texts."""
    head = ["speed-up", f"over {PUBLISHED}", "cut-off"]
    lines = []
    for name in names:
        line = [name]
        for kind in LAMBDAS:
            row, other = (runs.find(rows, what=f"{factor}, {kind}", task=ALL) for factor in (name, PUBLISHED))
            line += [tables.setting(row["settings"], "threshold")] if kind == "chosen" else []
            gain = "" if row is other else tables.percent_more(runs.gain(row, other))
            line += [interval(runs.speedup(row)), gain, cutoffs(row)]
        lines.append(line)
    return markdown(["factor", f"speed-up at {LAMBDA:g}", *head[1:], "chosen lambda", *head], lines)


def cutoffs(row: Row) -> str:
    """The entropies above which a draft stops, of each setting."""
    if "entropy_factor" not in row["settings"][0]:
        return NONE
    found = [(1 - chosen["threshold"]) ** 2 / chosen["entropy_factor"] for chosen in row["settings"]]
    return " / ".join(dict.fromkeys(f"{value:.2g}" for value in found))


def tasks_table(source: Source, rows: Sequence[Row], names: Sequence[str], kind: str) -> str:
    """Total speed-ups by task."""
    tasks = [task for task in source.tasks if task != ALL]
    lines = [
        [name, *(f"{runs.speedup(runs.find(rows, what=f'{name}, {kind}', task=t)).estimate:.2f}" for t in tasks)]
        for name in names
    ]
    title = f"at lambda {LAMBDA:g}" if kind == "published" else "lambda chosen by task"
    return markdown([f"factor, {title}", *tasks], lines)


def picture(run: Run, rows: Sequence[Row], factors: Sequence[float]) -> Figure:
    """Speed-up against the factor, lambda published or chosen, and the fitted factor as a level."""
    labels = {"published": f"lambda {LAMBDA:g}", "chosen": "lambda chosen"}
    lines, styles = {}, {}
    for colour, label in zip(COLOURS[1:], labels.values(), strict=False):
        styles[label] = {"color": colour, "marker": "o"}
        styles[f"{label}, factor fitted"] = {"color": colour, "ls": "--"}
    for source, title in tables.sections(run):
        here = runs.of_source(rows, source, ALL)
        lines[title] = {}
        for kind, label in labels.items():
            values = [runs.speedup(runs.find(here, what=f"{factor:g}, {kind}")) for factor in factors]
            fitted = runs.speedup(runs.find(here, what=f"{FITTED}, {kind}")).estimate
            lines[title][label] = factors, values
            lines[title][f"{label}, factor fitted"] = factors, [fitted] * len(factors)
    return tables.lines_figure(
        lines, ("entropy factor", "speed-up over plain decoding"), styles, ticks=factors, log=True
    )


main = command(EntropyFactor, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
