"""How good is a drafter? Judged along the target's own answers, without training or exporting anything.

Question:  At how many positions would this drafter's token be the target's, and what does that promise?
Command:   python -m experiments.distill judge --drafter FOLDER [--prompts demo.jsonl spec_bench.jsonl:4]
Time:      about 3 s a prompt and temperature on 2 cores
Expected:  the built-in drafter on the demo: 0.67 greedy; docs/distillation.md has the tables
Output:    runs/judge-<time>/ with manifest.json, results.jsonl (a line a file, temperature and task) and table.md
"""

from dataclasses import dataclass

from rich.console import Console

from experiments.lib.commands import command
from experiments.lib.judged import as_json, encoded, figures_along, in_spans, report, step_cost, task_of, written
from experiments.lib.options import Output, Served, check_least
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish
from specdec_jax.metrics.acceptance import MACRO
from specdec_jax.text.sampling_params import check_sampling


@dataclass(frozen=True)
class Judge(Output, Served):
    """Judge a drafter."""

    prompts: tuple[str, ...] = ("configs/prompts/demo.jsonl",)
    """JSONL files, FILE:n for every n-th prompt, or hub:NAME."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """Of the answers."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    seed: int = 0
    """Prompt i is answered with seed + i."""
    span: int | None = None
    """Judge by output position instead of by task, in spans of so many tokens."""
    past_end: bool = False
    """Answers go on when the target would end them."""


def judge_drafter(config: Judge, console: Console) -> None:
    """Judges and writes the run folder."""
    if config.span is not None:
        check_least(config, 1, "span")
    check_sampling(config)
    sources = {source: load_prompts(source) for source in config.prompts}
    target, drafter = config.load(console)
    folder = RunFolder.create("judge", config, config.out)
    cost = step_cost(target, drafter, console)
    figures = {}
    for source, prompts in sources.items():
        asked, tasks = encoded(target, prompts), [task_of(prompt) for prompt in prompts]
        for temperature in config.temperatures:
            past = " past their end" if config.past_end else ""
            name = f"{source.rpartition('/')[2]}, answers at {temperature:g}{past}"
            found = written(target, asked, temperature, config.max_new_tokens, config.seed, console, config.past_end)
            title, texts = f"Judging at {temperature:g}", (asked, found, tasks)
            if config.span is not None:
                texts = in_spans(asked, found, config.span)
            figures[name] = figures_along((target, drafter), *texts, title, console)
            if config.span is not None:
                del figures[name][MACRO]  # spans of one answer are no tasks
            for task, entry in figures[name].items():
                figure = as_json(entry)
                row = {"source": name, "task": task, "texts": entry.texts, "agreement": figure["agreement"]}
                folder.append(row | {"acceptance": figure["acceptance"], "ratio": cost["ratio"]})
    publish(folder, report(figures, cost["ratio"]), console)


main = command(Judge, judge_drafter, __doc__, "python -m experiments.distill judge")
