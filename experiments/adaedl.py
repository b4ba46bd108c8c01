"""AdaEDL's own questions, on recorded traces: its tables, its entropy factor, and its lambda.

Question:  tables: does the published order of methods hold here, as ratios to plain decoding, by draft length?
           factor: does gamma in `1 - sqrt(gamma * H) < lambda` matter, and does fitting it while decoding help?
           lambda: what does Algorithm 1, which moves lambda, bring over the best fixed lambda and over its own start?
Command:   python -m experiments.adaedl tables|factor|lambda TRACES... [--costs cost_model.json]
Time:      a minute each for 84 prompts and three temperatures on 2 cores; --smoke seconds
Expected:  the built-in pair; docs/audit.md has what follows. tables: adaptive rules hold their speed as L grows, but
           the best static length is as fast as AdaEDL at 0.7 and 10 % faster at 1. factor: at lambda 0.7 the smallest
           is the fastest, by 6 to 27 % over 0.2; with a chosen lambda every factor up to 0.2 is the same rule. lambda:
           Algorithm 1 is within 1.1 % of the best fixed lambda
Output:    runs/adaedl-STUDY-<time>/

Rules are replayed with measured costs, not timed; settings are those that were fastest on the other half of the prompts
of the task. Published figures: arXiv 2410.18351, Table 1 (temperature 0.7) and Figure 8, tokens/s of Llama2-7B with a
drafter of 115 M parameters on an A100 over plain decoding there, at the best lambda of 0.3 to 0.9. adaedl-keep is ours:
the distribution that fails its check still gives its token. Other models, prompts and machines: compare orders and
shapes, not values.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from experiments.lib import plots, tables
from experiments.lib import trace_runs as runs
from experiments.lib.commands import command, with_studies
from experiments.lib.plots import COLOURS, rule_colours
from experiments.lib.rules import ADAEDL, THRESHOLDS, rule
from experiments.lib.smoke import made_up_trace
from experiments.lib.tables import NONE, Row, compared, gain, interval, markdown, percent_more, speedup
from experiments.lib.trace_runs import Source, TraceOptions, variant, write
from specdec_jax.ranges import Between

AXES = "speed-up over plain decoding"

LENGTHS = (3, 7, 16)
METHODS = ("static", "max-confidence", "adaedl")  # the paper's
OURS = (*METHODS, *ADAEDL[1:])
SETS = {"summarization": "CNN-DM", "instructions": "Dolly", "translation": "WMT"}
TASKS = {"summarization": ("summarization", "summarisation"), "instructions": ("instructions", "mt_bench", "chat")}
TASKS |= {"translation": ("translation",)}  # the task of a trace that stands for a set: the first that it has
RATES = {  # tokens/s of plain decoding, and of METHODS at each of LENGTHS
    ("summarization", 0.7): (25.74, (54.1, 53.1, 55.7), (51.5, 53.5, 56.9), (36.3, 49.5, 54.1)),
    ("instructions", 0.7): (29.02, (54.7, 55.7, 55.8), (47.6, 56.6, 57.1), (32.1, 55.8, 56.1)),
    ("translation", 0.7): (29.80, (40.9, 42.5, 45.0), (32.7, 45.1, 45.2), (22.3, 43.7, 43.9)),
    ("instructions", 1.0): (29.1, (53.9, 56.0, 56.2), (46.1, 54.7, 56.0), (31.0, 55.3, 53.4)),
    ("instructions", 1.3): (28.7, (47.3, 50.4, 49.9), (38.7, 50.1, 50.3), (26.7, 48.7, 49.0)),
    ("instructions", 1.7): (29.1, (28.2, 32.3, 31.9), (20.6, 31.6, 31.8), (13.6, 31.3, 31.7)),
    ("translation", 1.0): (29.6, (40.5, 42.9, 44.5), (30.3, 44.7, 44.8), (22.2, 43.5, 43.4)),
    ("translation", 1.3): (29.1, (40.4, 42.4, 43.5), (32.0, 44.2, 44.4), (21.6, 43.6, 44.2)),
    ("translation", 1.7): (29.9, (30.4, 35.6, 36.6), (24.4, 36.2, 37.1), (16.5, 35.8, 36.0)),
    ("summarization", 1.0): (25.9, (50.1, 50.5, 52.2), (45.6, 51.8, 52.8), (30.0, 47.4, 49.8)),
    ("summarization", 1.3): (23.3, (37.4, 39.0, 40.2), (30.1, 37.5, 39.3), (19.7, 37.2, 38.4)),
    ("summarization", 1.7): (25.7, (23.5, 27.0, 27.8), (17.8, 26.6, 27.7), (12.1, 26.7, 27.6)),
}
PUBLISHED = {key: np.array(rates) / plain for key, (plain, *rates) in RATES.items()}


@dataclass(frozen=True)
class Tables(TraceOptions):
    """Compare replays with AdaEDL's published tables."""

    max_draft_length: Annotated[int, Between(max(LENGTHS))] = 16  # Longest draft.


def paper_tables(options: Tables, console: Console) -> None:
    """static, max-confidence and AdaEDL at L = 3, 7, 16, and the published figures."""
    made_up = made_up_trace(0.7)
    names = dict(zip(dict.fromkeys(made_up.about["tasks"]), SETS, strict=True))
    about = made_up.about | {"tasks": [names[task] for task in made_up.about["tasks"]]}
    sources = runs.read_sources(options, {"made up": {0.7: made_up._replace(about=about)}})
    if not any(map(tasks_of_sets, sources)):
        raise ValueError(f"no text is of a task that the paper has: {', '.join(sum(TASKS.values(), ()))}")
    run = runs.open_traces("adaedl-tables", options, console, sources=sources)
    starts = rule("adaedl").settings()[1:]
    rows = runs.sweep(run, {
        f"{method}, {n}": variant(rule(method), [{"draft_length": n}] if method == "static" else starts, n)
        for n in LENGTHS for method in OURS
    })  # fmt: skip
    blocks, lines = [runs.about(run)], {}
    for source, title in runs.sections(run):
        table, panels = by_length(source, rows, title)
        blocks += [f"## {title}", table] if panels else []
        lines |= panels
    head = ["set", "over static, published", *ADAEDL, "over max-confidence, published", ADAEDL[0]]
    head += [f"L = {LENGTHS[-1]} over static, published", ADAEDL[0], "lambda"]
    gains = []
    for source, title in runs.sections(run):
        for name, task in tasks_of_sets(source).items():
            here = runs.by_name(rows, source, task)
            at_lengths = {method: [here[f"{method}, {length}"] for length in LENGTHS] for method in OURS}
            best = {method: min(each, key=lambda row: sum(row["seconds"])) for method, each in at_lengths.items()}
            longest = {method: each[-1] for method, each in at_lengths.items()}
            paper, line = PUBLISHED.get((name, source.temperature)), [f"{task}, {title.lower()}"]
            fastest, last = (None, None) if paper is None else (paper.max(axis=0), paper[-1])
            contrasts = (fastest, best, "static", ADAEDL), (fastest, best, "max-confidence", ADAEDL[:1])
            for published, played, other, readings in (*contrasts, (last, longest, "static", ADAEDL[:1])):
                ratio = None if published is None else published[-1] / published[METHODS.index(other)]
                line += [NONE if ratio is None else f"{100 * (ratio - 1):+.1f} %"]
                line += [percent_more(gain(played[reading], played[other])) for reading in readings]
            gains.append([*line, tables.setting(best["adaedl"]["settings"], "threshold")])
    blocks += ["## What AdaEDL gains", markdown(head, gains)]
    colours = rule_colours(OURS)
    styles = {method: {"color": colours[method], "marker": "o", "ms": 4} for method in OURS}
    styles |= {f"{method}, published": {"color": colours[method], "ls": ":", "marker": "D"} for method in METHODS}
    figure = plots.lines_figure(lines, ("L, drafts a round", AXES), styles, columns=3, ticks=LENGTHS)
    write(run, "The paper's tables", blocks, NOTE_TABLES, paper=figure)


NOTE_TABLES = (
    "Ratios to plain decoding: published, then replayed here with a 95 % bootstrap interval over prompts and, in "
    "brackets, the share of drafted tokens that were accepted. Gains: the fastest L of either method, in hindsight as "
    f"in the paper, or both at L = {LENGTHS[-1]}; here paired by prompt and bold where the interval excludes 0; "
    f"lambda: adaedl's start, chosen on one half / on the other. {NONE} where the paper has no figure."
)


def tasks_of_sets(source: Source) -> dict[str, str]:
    """The source's tasks that stand for the paper's sets: {'summarization': the task here}."""
    return {name: task for name, tasks in TASKS.items() for task in [t for t in tasks if t in source.tasks][:1]}


def by_length(source: Source, rows: Sequence[Row], title: str) -> tuple[str, dict[str, dict[str, plots.Line]]]:
    """Methods at each length, published and ours: the table of all sets, and lines by length, a panel a set."""
    tasks, cells, panels = tasks_of_sets(source), {}, {}
    for name, task in tasks.items():
        paper, series = PUBLISHED.get((name, source.temperature)), panels.setdefault(f"{name}, {title.lower()}", {})
        for method in OURS:
            here = [runs.by_name(rows, source, task)[f"{method}, {length}"] for length in LENGTHS]
            series[method] = LENGTHS, [speedup(row) for row in here]
            ratios = [] if paper is None or method not in METHODS else paper[:, METHODS.index(method)].tolist()
            if ratios:
                series[f"{method}, published"] = LENGTHS, ratios
            texts = [f"{value:.2f}" for value in ratios] or [NONE] * len(LENGTHS)
            for length, text, row in zip(LENGTHS, texts, here, strict=True):
                ours = f"{interval(speedup(row))} ({tables.acceptance(row):.0%})"
                cells[length, method] = [*cells.get((length, method), ()), text, ours]
    heads = [text for name, task in tasks.items() for text in (f"{SETS[name]}, published", f"{task}, here")]
    lines = [[f"{length}, {method}", *cells[length, method]] for length in LENGTHS for method in OURS if tasks]
    return markdown(["L, method", *heads], lines), panels


FITTED, PAPER = "fitted", "0.2"
FACTORS = (0.05, 0.1, float(PAPER), 0.5, 1.0)  # the paper's gamma
KINDS = {"0.7": (0.7,), "chosen": THRESHOLDS}  # lambda: our default, as the paper reports its best


def factor(options: TraceOptions, console: Console) -> None:
    """Factors at the default lambda and at the lambda chosen for each, and the factor that is fitted online."""
    rules = {f"{value:g}": (rule("adaedl"), {"entropy_factor": value}) for value in FACTORS}
    rules[FITTED] = rule("adaptive-gamma"), {}
    two = {f"{n}, made up": {1.0: made_up_trace(1.0, boost=boost)} for n, boost in (("worse", 0.0), ("better", 0.7))}
    run = runs.open_traces("adaedl-factor", options, console, runs.read_sources(options, two))
    rows = runs.sweep(run, {
        f"{name}, {kind}": variant(entry, [fixed | {"threshold": value} for value in values])
        for name, (entry, fixed) in rules.items() for kind, values in KINDS.items()
    })  # fmt: skip
    blocks, maps = [runs.about(run)], {}

    def cutoffs(row: Row) -> str:
        if "entropy_factor" not in row["settings"][0]:
            return NONE
        entropies = [(1 - chosen["threshold"]) ** 2 / chosen["entropy_factor"] for chosen in row["settings"]]
        return " / ".join(dict.fromkeys(f"{value:.2g}" for value in entropies))

    for source, title in runs.sections(run):
        here = runs.by_name(rows, source)
        blocks.append(f"## {title}")
        maps[title] = np.array([here[f"{value:g}, chosen"]["curve"] for value in FACTORS])
        for kind in KINDS:
            mine = {name: here[f"{name}, {kind}"] for name in rules}
            blocks += [f"Lambda {kind}:", compared(mine, [PAPER], chosen="threshold", more={"cut-off": cutoffs})]
    figure = plots.map_figure(maps, ("lambda", THRESHOLDS), ("entropy_factor", FACTORS), AXES)
    write(run, "The entropy factor", blocks, NOTE_FACTOR, factor=figure)


NOTE_FACTOR = (
    f"Speed-up over plain decoding, total over total; over {PAPER}: against the published factor at the same lambda, "
    "or at the lambda chosen for it; 95 % bootstrap intervals over prompts, paired, bold where they exclude 0. Chosen: "
    "on one half of the prompts / on the other. Cut-off: the entropy in nats above which a draft stops at that "
    "lambda, before Algorithm 1 moves it; lambda cannot put it above 1 over the factor."
)

STARTS = (0.3, 0.5, 0.6, 0.7, 0.9)  # the paper's
FIXED, DYNAMIC, STEEP = "fixed", "Algorithm 1", "Algorithm 1, ten times the step"
MOVES: dict[str, dict[str, Any]] = {FIXED: {"step": 0.0}, DYNAMIC: {}, STEEP: {"step": 0.1}}


def moving_lambda(options: TraceOptions, console: Console) -> None:
    """A fixed lambda, Algorithm 1, and ten times its step; chosen, and by start."""
    starts = {"": THRESHOLDS} | {f" from {start:g}": (start,) for start in STARTS}
    variants = {
        name + words: variant(rule("adaedl"), [fixed | {"threshold": value} for value in values])
        for words, values in starts.items() for name, fixed in MOVES.items()
    }  # fmt: skip
    run = runs.open_traces("adaedl-lambda", options, console)
    rows = runs.sweep(run, variants)
    blocks = [runs.about(run)]
    lines, per_text = {}, lambda row: f"{tables.total(row, 'rounds') / len(row['rounds']):.0f}"
    for source, title in runs.sections(run):
        whole = runs.by_name(rows, source)
        blocks += [f"## {title}", compared({key: whole[key] for key in MOVES}, [FIXED], chosen="threshold")]
        for start in STARTS:
            mine = {key: whole[f"{key} from {start:g}"] for key in MOVES}
            blocks += [f"From {start:g}:", compared(mine, [FIXED], more={"rounds a text": per_text})]
        lines[title] = {key: (THRESHOLDS, whole[key]["curve"]) for key in MOVES}
    dashes = zip(MOVES, COLOURS[1:], ("-", "--", ":"), strict=False)
    styles = {key: {"color": colour, "ls": style, "lw": 2} for key, colour, style in dashes}
    figure = plots.lines_figure(lines, ("lambda, or where it starts", AXES), styles)
    write(run, "Static against dynamic lambda", blocks, NOTE_LAMBDA, lambdas=figure)


NOTE_LAMBDA = (
    "Speed-up over plain decoding, total over total, and gains in percent, each with its 95 % bootstrap interval over "
    "prompts, paired; bold: the interval excludes 0. Chosen: lambda on one half / on the other. Ten times the step: "
    "Algorithm 1 with epsilon 0.1 instead of 0.01."
)

PROGRAM = "python -m experiments.adaedl"
papers = command(Tables, paper_tables, __doc__, f"{PROGRAM} tables")
lambdas = command(TraceOptions, moving_lambda, __doc__, f"{PROGRAM} lambda")
factors = command(TraceOptions, factor, __doc__, f"{PROGRAM} factor")
main = with_studies(papers, tables=papers, factor=factors, **{"lambda": lambdas})

if __name__ == "__main__":
    sys.exit(main())
