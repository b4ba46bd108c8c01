"""What TPUs and GPUs would run of a generation, by their own compilers and without one of them.

Question:  Does every program compile for the chip, is every cache donated, does a generation leave the device, how many
           operations is a drafter step, and what does the compiler think a step and a verification cost?
Command:   python -m experiments.accelerators [--chips tpu-v5e h100] [--pairs smollm2 8b-1b] [--programs run] [--small]
Time:      1 to 3 minutes a program of the built-in pair on 2 cores; making the environments takes 2 minutes (TPU,
           1.6 GB) and 7 (GPU, 6 GB) the first time; --small is 2 minutes
Expected:  docs/accelerators.md has the tables
Output:    runs/accelerators-<time>/, with a cost model of each TPU and pair (costs-tpu-v5e-smollm2.json) and programs

Nothing here was timed: times and c are the compiler's estimate. A TPU's program says how many cycles most operations
take; a part of a round takes those, or as long as its weights take to be read if that is longer. GPUs' compilers give
no estimate: there, kernels are counted. A while or a conditional of a GPU's program that no command buffer holds waits
for the host; on a TPU control flow runs on the device. --small compiles two layers for one chip of each kind and
compares with configs/chips/budgets.json: exit code 1 where a budget is exceeded.
"""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from experiments.lib.chips import CHIPS, COMMAND, PATHS, TARGETS, Job, environment
from experiments.lib.commands import Output, exit_codes, parsed, terminal
from experiments.lib.engines import Failed, python_of, run
from experiments.lib.run_folder import RunFolder
from experiments.lib.tables import NONE, markdown, publish
from specdec_jax.costs.cost_model import CostModel, cost_model, save_cost_model
from specdec_jax.decoding import default_widths
from specdec_jax.meshes import mesh_sizes
from specdec_jax.ranges import Between, check_fields

BUDGETS = TARGETS / "budgets.json"
SMALL = {"chips": ("tpu-v5e", "h100"), "pairs": ("tiny",), "programs": ("run",)}
KEYS = ("chip", "pair", "program", "batch")
MOST_SECONDS = 1800  # for one program


@dataclass(frozen=True)
class Accelerators(Output):
    """Compile for chips that are not here."""

    chips: tuple[str, ...] = tuple(CHIPS)  # Names of experiments/lib/chips.py.
    pairs: tuple[str, ...] = ("smollm2",)
    """smollm2-reading (the default pair), smollm2 (a drafter that reads nothing), smollm2-whole (without the draft
    vocabulary), 8b-1b, 70b-8b or tiny (two layers)."""
    programs: tuple[str, ...] = ("prefill", "run", "step", "extend")  # Programs of the decoder.
    batches: Annotated[tuple[int, ...], Between(1)] = (1,)  # Rows.
    max_draft_length: Annotated[int, Between(1)] = 7  # Maximum draft length.
    mesh: str = "data=1,model=1"
    """Chips that share rows and the target's weights, such as data=2,model=4; figures are then of each chip."""
    int8: bool = False  # The matrices of both models in eight bits.
    small: bool = False  # Two layers, one chip of each kind, against configs/chips/budgets.json.
    environments: str = "runs/environments"  # Folder of the compilers' virtual environments.
    install_seconds: float = 1200  # Most time for making an environment; chips without one are skipped with a message.

    def __post_init__(self) -> None:
        for name in self.chips:
            if name not in CHIPS:
                raise ValueError(f"no chip {name!r}: {', '.join(CHIPS)}")
        check_fields(self)
        mesh_sizes(self.mesh)


def study(config: Accelerators, console: Console) -> int:
    """Compiles what is missing and writes the run folder."""
    chosen = {name: getattr(config, name) for name in SMALL}
    if config.small:
        chosen = SMALL | {"chips": [chip for chip in SMALL["chips"] if chip in config.chips]}
    folder = RunFolder.create("accelerators", config, config.out)
    each = itertools.product(chosen["chips"], chosen["pairs"], config.batches, chosen["programs"])
    wanted = [(chip, pair, program, batch) for chip, pair, batch, program in each]
    pythons: dict[str, Path] = {}  # interpreter of every required environment
    for requirements in sorted({CHIPS[key[0]].packages for key in folder.missing(KEYS, wanted)}):
        try:
            with console.status(f"Making the environment of {requirements}"):
                options = {"seconds": config.install_seconds}
                pythons[requirements] = python_of(requirements, Path(config.environments), **options)
        except Failed as error:
            console.print(f"skipped: {error}")
    died = []
    for key in [key for key in folder.missing(KEYS, wanted) if CHIPS[key[0]].packages in pythons]:
        row, (chip, pair, program, batch) = dict(zip(KEYS, key, strict=True)), key
        out = folder.path / "programs" / "-".join(map(str, key))
        job = Job(chip, pair, program, str(out), batch, config.max_draft_length, config.mesh, config.int8)
        command = [str(pythons[CHIPS[chip].packages]), "-m", COMMAND, json.dumps(job._asdict())]
        try:  # in a process of its own; where that dies, the program is tried again by the next run
            with console.status(" ".join(map(str, key))):
                run(command, "the compiler", MOST_SECONDS, env=os.environ | environment(job))
            folder.append(row | json.loads((out / "facts.json").read_text(encoding="utf-8")))
        except Failed as error:
            died.append(row | {"error": str(error)})
    rows = [row for row in [*folder.rows(), *died] if tuple(row[key] for key in KEYS) in wanted]
    for row in rows:
        model = estimated_costs(row, config.max_draft_length)
        if model is not None and row["batch"] == 1:
            save_cost_model(folder.path / f"costs-{row['chip']}-{row['pair']}.json", model)
    publish(folder, report(rows, config.max_draft_length), console)
    if not config.small:
        return 0
    budgets = json.loads(BUDGETS.read_text(encoding="utf-8"))
    rows = [row for row in rows if "device" in row]  # a process that died says nothing of the program
    exceeded = [line for row in rows for line in over_budget(row, budgets[row["chip"]])]
    for line in exceeded:
        console.print(f"over budget: {line}", style="bold red")
    if not exceeded:
        console.print(f"Within the budgets of {len(rows)} programs.")
    return int(bool(exceeded))


def estimated_costs(row: Mapping[str, Any], max_draft_length: int) -> CostModel | None:
    """A TPU's cost model: parts of a sampled round take their cycles, or as long as reading their weights; or None."""
    chip = CHIPS[row["chip"]]
    if chip.platform != "tpu" or row["program"] != "run" or row["error"]:
        return None
    seconds = {}
    for part, paths in row["parts"].items():
        model = "drafter" if part.startswith("draft") else "target" if part.startswith("verify ") else None
        reading = row["weights_read"][model] / chip.bandwidth if model and part != "draft" else 0.0
        seconds[part] = max(paths.get("sampled", {"cycles": 0})["cycles"] / chip.clock, reading)
    widths = default_widths(max_draft_length)
    passes = {width: seconds[f"verify {width} tokens"] + seconds.get("verify", 0.0) for width in widths}
    return cost_model(seconds["draft step"], passes, device=f"{chip.name}, the compiler's estimate", batch=row["batch"])


def report(rows: Sequence[Mapping[str, Any]], max_draft_length: int) -> str:
    """Compilation, memory and host round trips; then operations and estimates by part of a round."""
    programs, names = [], [f"{row['chip']}, {row['pair']}, {row['batch']}" for row in rows]
    for row, pair_name in zip(rows, names, strict=True):
        name = f"{pair_name}: {row['program']}"
        if row["error"]:
            programs.append([name, row["error"], *[""] * 6])
            continue
        free, thunks = CHIPS[row["chip"]].memory - row["argument"], row.get("thunks", {})
        donated = f"{row['alias'] / 1e6:.1f} of {row['caches'] / 1e6:.1f} MB" if row["alias"] else NONE
        memory = f"{row['temp'] / 1e6:.1f} MB of {free / 1e9:.1f} GB"
        trips = [f"{thunks[kind]} {kind}" for kind in ("whiles", "conditionals") if thunks.get(kind)]
        graphs = thunks.get("command_buffers", 0)
        captured = f"none ({graphs} command buffer{'s' * (graphs != 1)})" if thunks else "none"
        passed = ", ".join(f"{count} {kind}" for kind, count in row.get("collectives", {}).items()) or "none"
        sizes = [f"{row['seconds']:.0f}", f"{row['argument'] / 1e6:,.0f} MB", donated, memory]
        programs.append([name, "yes", *sizes, ", ".join(trips) or captured, passed])
    runs = {name: row for name, row in zip(names, rows, strict=True) if row["program"] == "run" and not row["error"]}
    columns = list(dict.fromkeys(part for row in runs.values() for part in sorted(row["parts"])))
    operations, estimates = [], []
    for pair_name, row in runs.items():
        counts = [[row["parts"].get(part, {}).get(path, {}).get("ops", 0) for path in PATHS] for part in columns]
        cells = [" / ".join(map(str, each)) if each[-1] else NONE for each in counts]
        operations.append([pair_name, *cells, str(sum(each[-1] for each in counts))])
        model, bandwidth = estimated_costs(row, max_draft_length), CHIPS[row["chip"]].bandwidth
        if model is not None:
            least = {name: 1e3 * size / bandwidth for name, size in row["weights_read"].items()}
            passes = [f"{1e3 * time:.2f} ms" for time in model.target_pass]
            passes[0] += f" ({least['target']:.2f})"
            step = f"{1e3 * model.drafter_step:.3f} ms ({least['drafter']:.3f})"
            estimates.append([pair_name, step, *passes, f"{model.ratio:.3f}"])
    parts = ["# Compiled without a device", MEMORY_NOTE, markdown(PROGRAM_HEADS, programs)]
    if runs:
        parts += ["## A round", PARTS_NOTE, markdown(["chip, pair, batch", *columns, "program"], operations)]
    if estimates:
        widths = [f"verifying {width}" for width in default_widths(max_draft_length)]
        heads = ["chip, pair, batch", "drafter step", *widths, "c"]
        parts += ["## Estimated costs", COST_NOTE, markdown(heads, estimates)]
    return "\n\n".join([*parts, ""])


PROGRAM_HEADS = ["chip, pair, batch: program", "compiles", "seconds", "arguments", "donated", "temporary"]
PROGRAM_HEADS += ["host round trips", "between chips"]
MEMORY_NOTE = (
    "Donated: bytes of arguments that results overwrite, of the bytes of all caches. Temporary memory: what there is "
    "beside arguments and results, of the chip's memory that is free then. Host round trips: whiles and conditionals "
    "whose predicate the host reads, by construction none on a TPU. Between chips: collectives in the program, of all "
    "widths. Seconds: compiling."
)
PARTS_NOTE = (
    "Operations (kernels on a GPU, instructions with an estimate on a TPU) that run once in each part: where all rows "
    "are greedy / some are sampled / all that is compiled. A drafter step is one turn of the draft loop."
)
COST_NOTE = (
    "The compiler's estimate, not measured. Drafter step and verification of the sampled path; in brackets the time "
    "that reading the weights takes at the published bandwidth. c is the drafter step over the narrowest verification."
)


def over_budget(row: Mapping[str, Any], budget: Mapping[str, Any]) -> list[str]:
    """One line per quantity of a program that exceeds its budget."""
    if row["error"]:
        return [f"{row['chip']} does not compile: {row['error']}"]
    thunks = row.get("thunks", {})
    values = {
        "operations of a sampled drafter step": row["parts"]["draft step"]["sampled"]["ops"],
        "operations of the program": sum(part["all"]["ops"] for part in row["parts"].values()),
        "copies": thunks.get("copies", row["instructions"]["copy"]),
        "bytes of temporary memory": row["temp"],
        "host round trips": thunks.get("whiles", 0) + thunks.get("conditionals", 0),
    }
    lines = [
        f"{row['chip']}: {values[name]:,} {name}, {limit['most']:,} allowed ({limit['why']})"
        for name, limit in budget.items()
        if values[name] > limit["most"]
    ]
    return lines + ([] if row["alias"] >= row["caches"] else [f"{row['chip']}: not every cache is donated"])


@exit_codes()
def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles and reports; 1 where a budget is exceeded, 2 on invalid input."""
    return study(parsed(Accelerators, __doc__, arguments), terminal())


if __name__ == "__main__":
    raise SystemExit(main())
