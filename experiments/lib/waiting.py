"""What do rows of a batch that draft for themselves lose by waiting, and which costs should their rules use?

Question:  A round takes as long as its longest draft. How fast are a batch's rows if each follows its own rule, at
           what drafting costs times some factor, and how fast are fixed lengths?
Command:   python -m experiments.batches waiting TRACES... [--factors 1 1.5 2]
Time:      a minute for 12 prompts on 2 cores; seconds with --smoke (made-up traces)
Expected:  no factor gains survival over 0.02; where verification is nearly free a fixed length leads (docs/batches.md)
Output:    runs/waiting-<time>/ with manifest.json and table.md

Rows of a trace are played in step, as many as the batch has, drawn at random: a round's time is the pass that verifies
the longest draft, and the most drafter passes of any row. Every rule has the same rows beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from experiments.lib import trace_runs as runs
from experiments.lib.cells import at_temperature, markdown
from experiments.lib.commands import command
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import TraceFiles
from specdec_jax import stopping
from specdec_jax.costs.cost_model import CostModel, cost_model
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import Trace
from specdec_jax.types import StoppingPolicy

LONGEST = 7
DRAWS = 400  # batches a figure is made of


class Machine(NamedTuple):
    """So many rows, and what their passes cost."""

    about: str
    rows: int
    costs: CostModel


MACHINES = (  # the first two as measured for SmolLM2 and the reading drafter, bfloat16, two cores with AVX2
    Machine("two cores", 2, cost_model(0.096, {1: 1, 2: 1.25, 4: 2.39, 6: 3.16, 8: 4.14})),
    Machine("two cores", 4, cost_model(0.153, {1: 1, 2: 1.68, 4: 2.85, 6: 4.15, 8: 5.68})),
    Machine("as earlier products had", 4, cost_model(0.077, {1: 1, 2: 1.37, 4: 2.04, 6: 2.48, 8: 3.1})),
    Machine("1 % a token", 4, cost_model(0.1, {width: 0.99 + 0.01 * width for width in range(1, 9)})),
    Machine("2 % a token", 16, cost_model(0.1, {width: 0.98 + 0.02 * width for width in range(1, 9)})),
)


@dataclass(frozen=True)
class Waiting(TraceFiles):
    """Play the rows of traces as batches."""

    factors: tuple[float, ...] = (1.0, 1.5, 2.0)
    """Factors on the drafting cost for survival and goodput."""
    lengths: tuple[int, ...] = (1, 2, 3, 5)
    """Fixed draft lengths."""

    @property
    def longest(self) -> int:
        """The longest draft."""
        return LONGEST

    def check(self) -> None:
        """Raises ValueError where options are invalid."""
        super().check()
        if not self.factors or min(self.factors) <= 0 or min(self.lengths, default=1) < 0:
            raise ValueError(f"factors must be above 0 and lengths 0 or more, got {self.factors}, {self.lengths}")


def study(options: Waiting, console: Console) -> None:
    """Replays all rules and writes the table."""
    run = runs.open_traces("waiting", options, console)
    lines = []
    for source in run.sources:
        for machine in MACHINES:
            with console.status(f"{at_temperature(source.temperature)}, {machine.rows} rows, {machine.about}"):
                figures = [f"{value:.2f}" for value in _speedups(options, source.trace, machine)]
            where = f"{source.group}, {at_temperature(source.temperature)}"
            lines.append([where, f"{machine.rows} rows, {machine.about}", *figures])
    adaptive = [f"{name} x {factor:g}" for name in ("survival", "goodput") for factor in options.factors]
    heads = ["trace", "machine", *adaptive, *(f"static {length}" for length in options.lengths)]
    note = "Speed-up over plain decoding of the same batch, all tokens over all time.\n\n"
    publish(run.folder, f"{note}{markdown(heads, lines)}\n", console)


def _speedups(options: Waiting, trace: Trace, machine: Machine) -> list[float]:
    """Speed-ups of survival, goodput and fixed lengths, in the table's order."""
    factors = np.asarray(options.factors)
    more = factors[:, None] * (machine.costs.verification_times(LONGEST) - 1.0)
    step = factors * machine.costs.ratio
    rules: list[tuple[StoppingPolicy, Mapping[str, Any]]] = [
        (stopping.survival(), {"drafter_cost": step, "verification_times": 1.0 + more}),
        (stopping.goodput(), {"drafter_cost": step, "verification_cost": more[:, -1] / LONGEST, "least": 0}),
        (stopping.static(), {"draft_length": np.asarray(options.lengths)}),
    ]
    records = [replay(trace, rule, settings, max_draft_length=LONGEST, record=True).record for rule, settings in rules]
    return [in_step(record, machine, options.seed) for of_rule in records for record in of_rule]  # type: ignore[union-attr]


def in_step(record: np.ndarray, machine: Machine, seed: int) -> float:
    """Speed-up over plain decoding of batches whose rows play a replay's rounds [N, rounds, 4] in step."""
    rng, texts = np.random.default_rng(seed), len(record)
    passes = machine.costs.pass_times(LONGEST)
    rounds, tokens, time = np.sum(record[:, :, 0] >= 0, axis=1), 0.0, 0.0
    for _ in range(DRAWS):
        rows = rng.choice(texts, machine.rows, replace=machine.rows > texts)
        here = record[rows, : rounds[rows].min()].astype(np.int64)
        drafted, _, emitted, made = np.moveaxis(here, 2, 0)
        time += np.sum(passes[drafted.max(axis=0)] + machine.costs.drafter_step * made.max(axis=0))
        tokens += emitted.sum() / machine.rows
    return tokens * machine.costs.plain_pass / time


main = command(Waiting, study, __doc__, "python -m experiments.batches waiting")
