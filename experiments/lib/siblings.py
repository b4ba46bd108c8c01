"""How often is the drafter's second, third or fourth candidate right, and what do combs bring?

Question:  Where the first draft is rejected, what is the chance h that the next candidate is the target's token, by
           depth, entropy, task and temperature; and how much faster are rounds that verify siblings too?
Command:   python -m experiments.entropy siblings TRACES... [--costs cost_model.json]
           traces by: python -m experiments.record --drafter smollm2-drafter-reading@8192 --out runs/PAIR
Time:      a minute a trace on 2 cores; --smoke needs no trace
Expected:  docs/combs.md
Output:    runs/siblings-<time>/ with manifest.json and table.md

Every position of a text is taken for the beginning of a round, whose first rejected draft counts; 95 % intervals over
texts. Combs are replayed.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib.commands import command
from experiments.lib.rules import rule
from experiments.lib.tables import NONE, interval, markdown, percent_more
from experiments.lib.trace_runs import ALL, TraceOptions, costs_or_default, replay_rule
from specdec_jax.contrib.trees.replaying import chances, rejections
from specdec_jax.costs.cost_model import between, cost_model
from specdec_jax.metrics.intervals import ratio_of_totals

EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, float("inf"))  # nats
LEAST = 20  # rejections; of fewer a line says nothing
ORDINALS = ("second", "third", "fourth")
WIDTHS = (1, 2, 4, 8, 16, 32)
TPU = "tpu-v5e"


@dataclass(frozen=True)
class Siblings(TraceOptions):
    """Chances of siblings and what they would bring."""

    max_draft_length: int = 7  # Longest chain.


def study(options: Siblings, console: Console) -> None:
    """Counts, replays and writes the run folder. Raises ValueError, FileNotFoundError for invalid input."""
    run = runs.open_traces("siblings", options, console)
    blocks = [runs.about(run)]
    for source, title in runs.sections(run):
        with console.status(title):
            trace, mine = source.trace, source.costs
            rejected = rejections(trace)
            masks = {"anywhere": np.ones(len(rejected.text), bool)}
            depths = range(int(rejected.depth.max(initial=-1)) + 1)
            masks |= {f"draft {depth + 1}": rejected.depth == depth for depth in depths}
            for low, high in itertools.pairwise(EDGES):
                upper = f"to {high:g}" if np.isfinite(high) else "or more"
                masks[f"{low:g} {upper} nats"] = (rejected.entropy >= low) & (rejected.entropy < high)
            masks |= {task: np.isin(rejected.text, texts) for task, texts in source.tasks.items() if task != ALL}
            lines = []
            for name, mask in masks.items():
                if mask.sum() >= LEAST:
                    cells = []
                    for right, tried in chances(rejected.candidate[mask], rejected.text[mask], trace.num_texts):
                        some = tried > 0
                        cells.append(interval(ratio_of_totals(right[some], tried[some])) if some.any() else NONE)
                    lines.append([name, str(mask.sum()), *cells])
            blocks += [f"## {title}", markdown(["rejected at", "rejections", *ORDINALS], lines)]
            lines = []
            longest, tpu = min(options.max_draft_length, trace.max_draft_length), costs_or_default(TPU)
            machines = {
                mine.device or "the costs given": mine,
                "flat verification": cost_model(mine.ratio, dict.fromkeys(WIDTHS, 1.0)),
                tpu.device: between(tpu, [width for width in WIDTHS if width > 1]),
            }
            for name, costs in machines.items():
                rules = rule("survival"), rule("survival-siblings")
                chain, comb = (replay_rule(trace, each, costs, longest).seconds(costs)[0] for each in rules)
                over_plain = interval(ratio_of_totals(trace.length * costs.plain_pass, chain))
                lines.append([name, over_plain, percent_more(ratio_of_totals(chain, comb))])
            blocks.append(markdown(["machine, replayed", "survival", "survival_tree(siblings=3)"], lines))
    runs.write(run, "Siblings", blocks, NOTES)


NOTES = (
    "Chances that a candidate is the target's token where those before it are not, with 95 % intervals over texts. "
    "Then the rules, replayed: `survival` over plain decoding, `survival_tree(siblings=3)` over it, bold where an "
    "interval excludes 0."
)


main = command(Siblings, study, __doc__, "python -m experiments.entropy siblings")
