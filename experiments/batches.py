"""How do rules fare as the batch grows, when rows wait for each other and wide passes are no longer nearly free?

Question:  What is drafting worth at each batch, with draft lengths by row or by what the whole batch gains?
Command:   python -m experiments.batches [--batches 1 2 4 8 16] [--temperatures 0 0.7]
Time:      five minutes a batch on 2 cores, half of it compiling; 35 at 32 rows
Expected:  two cores with AVX2, greedily: survival(together=True) 1.10 times plain decoding at 2 rows, as fast as it
           from 4 on (docs/batches.md)
Output:    runs/batches-<time>/, with speedup.png; results.jsonl has a line a batch, temperature, method and repeat

The clock stops when the first row is done, so that none stands idle: in a file of requests the next one would take its
place. Methods of a repeat take turns of half of their rounds, so that what else the machine does falls on all of them
alike; a speed-up is over plain decoding of the same repeat, by the median over repeats. Costs are measured
for each batch and given to rules that weigh them; verification widths are those that the costs choose.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Annotated

import numpy as np
from rich.console import Console

from experiments.lib.commands import Output, Served, Smoke, command
from experiments.lib.plots import Line, lines_figure
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.tables import at_temperature, interval, markdown, publish
from experiments.lib.turns import in_turns
from specdec_jax.compilation_cache import compile_together
from specdec_jax.costs.this_machine import sentence
from specdec_jax.metrics.intervals import Interval
from specdec_jax.ranges import Between
from specdec_jax.text.generation import prepare, start
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import NewTokens, SamplingParams, Temperatures
from specdec_jax.text.strategies import choose

PLAIN = "plain"
SLICES = 2  # turns of a run; each fills the buffers of a batch anew, at 16 rows in a third of a pass
KEY = ("batch", "temperature", "method", "repeat")
COUNTS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")  # over rows


@dataclass(frozen=True)
class Batches(Output, Smoke, Served):
    """Throughput by batch."""

    drafter: str = "smollm2-drafter-reading@8192"
    """As target."""
    prompts: str = "configs/prompts/demo.jsonl"  # A JSONL file; rows take its prompts in turn.
    batches: Annotated[tuple[int, ...], Between(1)] = (1, 2, 4, 8, 16)  # Rows decoded at once.
    temperatures: Temperatures = (0.0, 0.7)  # Temperatures of all rows.
    max_new_tokens: NewTokens = 64  # Tokens of every row.
    repeats: Annotated[int, Between(1)] = 5  # Repeats of every figure.
    policies: tuple[str, ...] = ("static(draft_length=1)", "adaedl", "goodput", "survival", "survival(together=True)")
    """Rules besides plain decoding, as `--policy` elsewhere."""
    costs: str | None = None  # As everywhere; none: measured, for each batch.


def batches(config: Batches, console: Console) -> None:
    """Measures what is missing and writes the run folder. Raises ValueError, FileNotFoundError for invalid input."""
    rules = {words: choose("policy", words) for words in config.policies}
    prompts = [prompt.turns[0][: 200 if config.smoke else None] for prompt in load_prompts(config.prompts)]
    folder = RunFolder.create("batches", config, config.out)
    target, drafter = config.load(console, encoders=True)
    methods, repeats = [PLAIN, *rules], range(config.repeats)
    keys = [(b, t, m, r) for b in config.batches for r in repeats for t in config.temperatures for m in methods]
    for batch, missing in groupby(folder.missing(KEY, keys), lambda key: key[0]):
        pairs = {PLAIN: measured_pair(target, None, costs=config.costs, batch=batch)}
        for name, policy in rules.items():
            pairs[name] = measured_pair(target, drafter, policy=policy, costs=config.costs, batch=batch)
        costs = next((pair.costs for pair in pairs.values() if pair.costs is not None), None)
        console.print(f"batch {batch}" + (f": {sentence(costs)}" if costs else ""), style="dim")
        sampling = SamplingParams(max_new_tokens=config.max_new_tokens, stop_ids=())
        slots = {name: prepare(pair, prompts, sampling).options["slots"] for name, pair in pairs.items()}
        first = {name: prepare(pair, prompts[:1] * batch, sampling, slots=slots[name]) for name, pair in pairs.items()}
        compile_together(partial(start, pair, first[name]) for name, pair in pairs.items())
        for (temperature, repeat), together in groupby(missing, lambda key: (key[1], key[3])):
            sampling = replace(sampling, temperature=temperature, seed=1000 * repeat)
            rows = [prompts[(repeat * batch + row) % len(prompts)] for row in range(batch)]
            with console.status(f"batch {batch}, {at_temperature(temperature)}, repeat {repeat + 1}"):
                runs = {}
                for key in together:
                    pair = pairs[key[2]]
                    request = prepare(pair, rows, sampling, slots=slots[key[2]])
                    # the first run of each width takes longer, compiled or not
                    whole = pair.decoder.run(pair.params, start(pair, request).state, leave=1)
                    pace = math.ceil(int(np.max(whole.statistics.num_rounds)) / SLICES)
                    runs[key] = pair, start(pair, request).state, pace
                for key, (state, seconds) in in_turns(runs, leave=1).items():
                    counts = {name: int(np.sum(getattr(state.statistics, name))) for name in COUNTS}
                    folder.append(dict(zip(KEY, key, strict=True)) | {"seconds": seconds, **counts})
    _report(config, folder, console)


def _report(config: Batches, folder: RunFolder, console: Console) -> None:
    """Speed-ups and tokens/s by batch, a table and a panel of the picture for each temperature."""
    rates = {tuple(row[key] for key in KEY): row["num_emitted_tokens"] / row["seconds"] for row in folder.rows()}
    parts = ["Speed-up over plain decoding of the same batch: median of the repeats, and least to most; then tokens/s."]
    panels: dict[str, dict[str, Line]] = {}
    for temperature in config.temperatures:
        speedups: dict[str, list[Interval]] = {method: [] for method in config.policies}
        lines = []
        for batch in config.batches:
            of = {
                m: np.array([rates[batch, temperature, m, r] for r in range(config.repeats)])
                for m in (PLAIN, *speedups)
            }
            for method, values in speedups.items():
                ratios = of[method] / of[PLAIN]  # within the same repeat
                values.append(Interval(float(np.median(ratios)), ratios.min(), ratios.max()))
            cells = [f"{interval(values[-1])}, {np.median(of[method]):.0f}" for method, values in speedups.items()]
            lines.append([str(batch), f"{np.median(of[PLAIN]):.0f}", *cells])
        panels[at_temperature(temperature)] = {name: (config.batches, values) for name, values in speedups.items()}
        heads = ["batch", "plain, tokens/s", *speedups]
        parts += [f"**{at_temperature(temperature).capitalize()}**", markdown(heads, lines)]
    picture = lines_figure(panels, ("rows", "speed-up over plain decoding"), ticks=config.batches, log=True)
    publish(folder, "\n\n".join(parts) + "\n", console, speedup=picture)


main = command(Batches, batches, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
