"""How good is a drafter? Judged along the target's own answers, without training or exporting anything.

Question:  At how many positions would this drafter's token be the target's, and what does that promise?
Command:   python -m experiments.judge --drafter FOLDER [--prompts configs/prompts/demo.jsonl spec_bench.jsonl:4]
Time:      about 3 s a prompt and temperature on 2 cores
Expected:  the built-in drafter on the demo: 0.67 greedy; docs/distillation.md has the tables
Output:    runs/judge-<time>/ with manifest.json, results.jsonl (a line a file, temperature and task) and table.md
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from experiments.lib.distill_judge import report, step_cost, task_of
from experiments.lib.distill_write import bar
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import TABLE, RunFolder
from experiments.lib.studies import run
from experiments.lib.terminal import Whole
from specdec_jax.compilation_cache import enable
from specdec_jax.distillation.judging import answers, judge
from specdec_jax.loading import LoadedModel, check_same_vocabulary, load_model
from specdec_jax.metrics.acceptance import TaskFigures, by_task
from specdec_jax.text.generation import encode


@dataclass(frozen=True)
class Judge:
    """Judge a drafter."""

    drafter: str = "smollm2-drafter"
    """A built-in name, a folder in Hugging Face format, a .gguf file, an Orbax folder, or a hub id."""
    target: str = "smollm2"
    """As drafter."""
    prompts: tuple[str, ...] = ("configs/prompts/demo.jsonl",)
    """JSONL files, FILE:n for every n-th prompt, or hub:NAME."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """Of the answers."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    dtype: str = "bfloat16"
    """Of both models."""
    seed: int = 0
    """Prompt i is answered with seed + i."""
    out: str | None = None
    """Run folder; none: runs/judge-<time>."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges; 2 on bad input."""
    return run(Judge, judge_drafter, __doc__, arguments)


def judge_drafter(config: Judge, console: Console) -> None:
    """Judges what is missing and writes the run folder."""
    sources = {source: load_prompts(source) for source in config.prompts}
    enable()
    with console.status("Loading the models"):
        target, drafter = (load_model(name, dtype=config.dtype) for name in (config.target, config.drafter))
    check_same_vocabulary(target, drafter)
    folder = RunFolder.create("judge", config, config.out)
    with console.status("Measuring a drafter step against a target pass"):
        cost = step_cost(target, drafter)
    figures = {}
    for source, prompts in sources.items():
        tokens = [encode(target, prompt.turns[0], chat=True, system=None) for prompt in prompts]
        tasks = [task_of(prompt) for prompt in prompts]
        for temperature in config.temperatures:
            name = f"{source.rpartition('/')[2]}, answers at {temperature:g}"
            figures[name] = along(config, target, drafter, tokens, tasks, temperature, console)
            for task, entry in figures[name].items():
                row = {"source": name, "task": task, "texts": entry.texts, "agreement": list(entry.agreement)}
                acceptance = {f"{temperature:g}": list(value) for temperature, value in entry.acceptance.items()}
                folder.append(row | {"acceptance": acceptance, "ratio": cost["ratio"]})
    table = report(figures, cost["ratio"])
    folder.write_text(TABLE, table + "\n")
    console.print(Whole(table))
    console.print(f"Written to {folder.path}/")


def along(
    config: Judge,
    target: LoadedModel,
    drafter: LoadedModel,
    prompts: Sequence[Sequence[int]],
    tasks: Sequence[str],
    temperature: float,
    console: Console,
) -> dict[str, TaskFigures]:
    """Figures by task along the target's answers to prompts of token ids."""
    warp = {"temperature": temperature}
    with bar(console, f"Answers at {temperature:g}", len(prompts), 0, unit="prompts") as update:
        found = answers(
            target,
            prompts,
            max_new_tokens=config.max_new_tokens,
            warp=warp,
            seed=config.seed,
            progress=lambda done, _: update(done),
        )
    texts = list(zip(prompts, found, strict=True))
    with bar(console, f"Judging at {temperature:g}", len(prompts), 0, unit="prompts") as update:
        judgement = judge(target, drafter, texts, progress=lambda done, _: update(done))
    return by_task(judgement, tasks)


if __name__ == "__main__":
    sys.exit(main())
