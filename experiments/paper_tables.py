"""AdaEDL's tables again: static, max-confidence and AdaEDL at L = 3, 7, 16, beside the published figures.

Question:  Does the paper's order of methods hold here, as ratios to plain decoding, by draft length and temperature,
           for summaries, instructions and translation from German?
Command:   python -m experiments.record --temperatures 0.7 1 1.3 1.7 --prompts FILE.jsonl --out runs/paper
           python -m experiments.paper_tables runs/paper [--costs cost_model.json]
Time:      a minute for 84 prompts and three temperatures on 2 cores; --smoke needs no trace
Expected:  the built-in pair: max-confidence and AdaEDL hold their speed as L grows and static lengths lose it, as
           published; but the best static length, 3, is faster than AdaEDL, which pays for every check with a pass
Output:    runs/paper_tables-<time>/ with manifest.json, results.jsonl (a line a trace, task, method and L), table.md
           and paper.png; a stopped run goes on where it was with the same --out

Replayed from traces, with measured costs, not timed. Published: arXiv 2410.18351, Table 1 (temperature 0.7) and Figure
8, tokens/s of Llama2-7B with a drafter of 115 M parameters on an A100 over tokens/s of plain decoding there; the paper
gives every method the best lambda it tried, about 0.3 to 0.9. Ours starts from the lambda of --starts that was fastest
on the other half of the prompts of the task; the built-in drafter, a weaker one, has more entropy and wants less than
the paper's least. adaedl-keep is ours: the distribution that fails its check still gives its token. Other models,
prompts and machines: compare orders and shapes, not values.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib import trace_tables as tables
from experiments.lib.cells import NONE, interval, markdown
from experiments.lib.commands import command
from experiments.lib.plots import rule_colours
from experiments.lib.rules import rule
from experiments.lib.smoke import made_up_trace
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import Row, Run, Source, TraceOptions, variant
from experiments.lib.trace_tables import share
from specdec_jax.replay.trace import Trace

LENGTHS = (3, 7, 16)
METHODS = ("static", "max-confidence", "adaedl")
KEPT = "adaedl-keep"
OURS = (*METHODS, KEPT)
SETS = {"summarization": "CNN-DM", "instructions": "Dolly", "translation": "WMT"}
TASKS = {"summarisation": "summarization", "mt_bench": "instructions", "chat": "instructions"}  # what stands for what


class Published(NamedTuple):
    """tokens/s of plain decoding, and by L of each method in the order of METHODS."""

    plain: float
    by_length: Mapping[int, tuple[float, float, float]]

    def ratio(self, length: int, method: str) -> float:
        """Over plain decoding."""
        return self.by_length[length][METHODS.index(method)] / self.plain


def _published(plain: float, *figures: tuple[float, float, float]) -> Published:
    return Published(plain, dict(zip(LENGTHS, figures, strict=True)))


PUBLISHED: dict[tuple[str, float], Published] = {
    ("summarization", 0.7): _published(25.74, (54.1, 53.1, 55.7), (51.5, 53.5, 56.9), (36.3, 49.5, 54.1)),
    ("instructions", 0.7): _published(29.02, (54.7, 55.7, 55.8), (47.6, 56.6, 57.1), (32.1, 55.8, 56.1)),
    ("translation", 0.7): _published(29.80, (40.9, 42.5, 45.0), (32.7, 45.1, 45.2), (22.3, 43.7, 43.9)),
    ("instructions", 1.0): _published(29.1, (53.9, 56.0, 56.2), (46.1, 54.7, 56.0), (31.0, 55.3, 53.4)),
    ("instructions", 1.3): _published(28.7, (47.3, 50.4, 49.9), (38.7, 50.1, 50.3), (26.7, 48.7, 49.0)),
    ("instructions", 1.7): _published(29.1, (28.2, 32.3, 31.9), (20.6, 31.6, 31.8), (13.6, 31.3, 31.7)),
    ("translation", 1.0): _published(29.6, (40.5, 42.9, 44.5), (30.3, 44.7, 44.8), (22.2, 43.5, 43.4)),
    ("translation", 1.3): _published(29.1, (40.4, 42.4, 43.5), (32.0, 44.2, 44.4), (21.6, 43.6, 44.2)),
    ("translation", 1.7): _published(29.9, (30.4, 35.6, 36.6), (24.4, 36.2, 37.1), (16.5, 35.8, 36.0)),
    ("summarization", 1.0): _published(25.9, (50.1, 50.5, 52.2), (45.6, 51.8, 52.8), (30.0, 47.4, 49.8)),
    ("summarization", 1.3): _published(23.3, (37.4, 39.0, 40.2), (30.1, 37.5, 39.3), (19.7, 37.2, 38.4)),
    ("summarization", 1.7): _published(25.7, (23.5, 27.0, 27.8), (17.8, 26.6, 27.7), (12.1, 26.7, 27.6)),
}


@dataclass(frozen=True)
class PaperTables(TraceOptions):
    """Set replays beside AdaEDL's published tables."""

    starts: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.6, 0.7, 0.9)
    """Lambdas to start from; the paper's are 0.3 and more."""

    def check(self) -> None:
        """Raises ValueError where options make no sense."""
        super().check()
        if self.max_draft_length < max(LENGTHS):
            raise ValueError(f"max_draft_length must be {max(LENGTHS)} or more here, got {self.max_draft_length}")
        if not self.starts:
            raise ValueError("--starts needs one lambda or more")
        rule("adaedl").policy.init(len(self.starts), threshold=np.array(self.starts))  # refuses what is out of range


def study(options: PaperTables, console: Console) -> None:
    """Replays what is missing and writes the run folder."""
    sources = runs.read_sources(options, {"made up": {0.7: made_up(0.7)}})
    if not any(tasks_of_sets(source) for source in sources):
        raise ValueError(f"no text is of a task that the paper has: {', '.join((*SETS, *TASKS))}")
    run = runs.open_run("paper_tables", options, console, sources=sources)
    starts = [{"threshold": start} for start in options.starts]
    rows = runs.compare(
        run,
        {
            f"{method}, {length}": variant(
                rule(method), [{"draft_length": length}] if method == "static" else starts, max_draft_length=length
            )
            for length in LENGTHS
            for method in OURS
        },
    )
    publish(run.folder, report(run, rows), run.console, paper=picture(run, rows))


def made_up(temperature: float) -> Trace:
    """A made-up trace of the paper's tasks."""
    trace = made_up_trace(temperature)
    names = dict(zip(dict.fromkeys(trace.about["tasks"]), SETS, strict=True))
    return trace._replace(about=trace.about | {"tasks": [names[task] for task in trace.about["tasks"]]})


def tasks_of_sets(source: Source) -> dict[str, str]:
    """The source's tasks that stand for the paper's sets: {'summarization': the task here}."""
    found = {name: name for name in SETS if name in source.tasks}
    for task, name in TASKS.items():
        if task in source.tasks:
            found.setdefault(name, task)
    return {name: found[name] for name in SETS if name in found}


def report(run: Run, rows: Sequence[Row]) -> str:
    """A table a temperature, and what AdaEDL gains, published and here."""
    blocks = ["# The paper's tables", tables.about(run), NOTES]
    for source, title in tables.sections(run):
        if tasks_of_sets(source):
            blocks += [f"## {title}", lengths_table(source, runs.of_source(rows, source))]
    return "\n\n".join([*blocks, "## What AdaEDL gains", gains_table(run, rows), ""])


NOTES = (
    "Ratios to plain decoding: published, then replayed here with a 95 % bootstrap interval over prompts and, in "
    "brackets, the share of drafted tokens that were accepted. Gains: the fastest L of either method, in hindsight as "
    "in the paper, here paired by prompt and bold where the interval excludes 0; lambda: AdaEDL's start, chosen on "
    "one half / on the other. – where the paper has no figure."
)


def lengths_table(source: Source, rows: Sequence[Row]) -> str:
    """Methods and lengths, published and ours, for every set."""
    tasks = tasks_of_sets(source)
    head = ["L, method"]
    for name, task in tasks.items():
        head += [f"{SETS[name]}, published", task if task == name else f"{task} (for {name})"]
    lines = []
    for length in LENGTHS:
        for method in OURS:
            line = [f"{length}, {method}"]
            for name, task in tasks.items():
                known = PUBLISHED.get((name, source.temperature))
                row = runs.find(rows, task=task, what=f"{method}, {length}")
                line.append(f"{known.ratio(length, method):.2f}" if known and method in METHODS else NONE)
                line.append(f"{interval(runs.speedup(row))} ({share(runs.acceptance(row))})")
            lines.append(line)
    return markdown(head, lines)


def gains_table(run: Run, rows: Sequence[Row]) -> str:
    """AdaEDL at its best L against the best static length of the three, and against max-confidence at its best."""
    head = ["set", "over static, published", "here", "over max-confidence, published", "here", "lambda"]
    lines = []
    for source, title in tables.sections(run):
        for name, task in tasks_of_sets(source).items():
            here = runs.of_source(rows, source, task)
            best = {method: fastest(here, method) for method in OURS}
            known, line = PUBLISHED.get((name, source.temperature)), [f"{task}, {title.lower()}"]
            for other in ("static", "max-confidence"):
                line.append(published_gain(known, other) if known else NONE)
                line.append(tables.percent_more(runs.gain(best["adaedl"], best[other])))
            line.append(tables.setting(best["adaedl"]["settings"], "threshold"))
            lines.append([*line, tables.percent_more(runs.gain(best[KEPT], best["static"]))])
    return markdown([*head, "keep over static"], lines)


def fastest(rows: Sequence[Row], method: str) -> Row:
    """The method's row at its best L."""
    found = [runs.find(rows, what=f"{method}, {length}") for length in LENGTHS]
    return min(found, key=lambda row: np.sum(row["seconds"]))


def published_gain(known: Published, other: str) -> str:
    """AdaEDL's best over the other method's best."""
    best = {method: max(known.ratio(length, method) for length in LENGTHS) for method in ("adaedl", other)}
    return f"{100 * (best['adaedl'] / best[other] - 1):+.1f} %"


def picture(run: Run, rows: Sequence[Row]) -> Figure:
    """A row a set and a column a temperature: speed-up by L, ours with intervals and the paper's dotted."""
    colours = rule_colours(OURS)
    styles = {method: {"color": colours[method], "marker": "o", "ms": 4} for method in OURS}
    styles |= {f"{method}, published": {"color": colours[method], "ls": ":", "marker": "D"} for method in METHODS}
    names = [name for name in SETS if any(name in tasks_of_sets(source) for source in run.sources)]
    lines = {}
    for name in names:
        for source, title in tables.sections(run):
            series = lines.setdefault(f"{name}, {title.lower()}", {})
            if (task := tasks_of_sets(source).get(name)) is None:
                continue
            here, known = runs.of_source(rows, source, task), PUBLISHED.get((name, source.temperature))
            for method in OURS:
                values = [runs.speedup(runs.find(here, what=f"{method}, {length}")) for length in LENGTHS]
                series[method] = LENGTHS, values
                if known and method in METHODS:
                    series[f"{method}, published"] = LENGTHS, [known.ratio(length, method) for length in LENGTHS]
    labels = "L, drafts a round", "speed-up over plain decoding"
    return tables.lines_figure(lines, labels, styles, columns=len(run.sources), ticks=LENGTHS)


main = command(PaperTables, study, __doc__)

if __name__ == "__main__":
    sys.exit(main())
