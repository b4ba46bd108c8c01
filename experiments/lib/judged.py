"""How good is a drafter? Judged along the target's own answers, without training or exporting anything.

Question:  At how many positions would this drafter's token be the target's, and what does that promise?
Command:   python -m experiments.distill judge --drafter FOLDER [--prompts demo.jsonl spec_bench.jsonl:4]
Time:      about 3 s a prompt and temperature on 2 cores
Expected:  the built-in drafter on the demo: 0.67 greedy; docs/drafters.md has a table
Output:    runs/judge-<time>/ with manifest.json, results.jsonl (a line a file, temperature and task) and table.md
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console

from experiments.lib.cells import WORDS, interval, markdown
from experiments.lib.commands import command
from experiments.lib.distill_write import bar
from experiments.lib.options import LoadedPair, Output, Served
from experiments.lib.prompts import MT_BENCH, Prompt, load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish
from experiments.step_cost import StepCost, measure_passes
from specdec_jax.loading import LoadedModel
from specdec_jax.metrics.acceptance import MACRO, TaskFigures, best_draft_length, by_task, expected_speedup
from specdec_jax.metrics.judging import answers, judge
from specdec_jax.ranges import Between, check_fields
from specdec_jax.text.generation import encode
from specdec_jax.text.sampling_params import NewTokens, Seed, Temperatures


@dataclass(frozen=True)
class Judge(Output, Served):
    """Judge a drafter."""

    prompts: tuple[str, ...] = ("configs/prompts/demo.jsonl",)
    """JSONL files, FILE:n for every n-th prompt, or hub:NAME."""
    temperatures: Temperatures = (0.0, 0.7)
    """Temperatures of the answers."""
    max_new_tokens: NewTokens = 128
    """Most tokens of an answer."""
    seed: Seed = 0
    """Prompt i is answered with seed + i."""
    span: Annotated[int | None, Between(1)] = None
    """Judge by output position instead of by task, in spans of so many tokens."""
    past_end: bool = False
    """Answers go on when the target would end them."""


def judge_drafter(config: Judge, console: Console) -> None:
    """Judges and writes the run folder."""
    check_fields(config)
    sources = {source: load_prompts(source) for source in config.prompts}
    target, drafter = config.load(console)
    folder = RunFolder.create("judge", config, config.out)
    ratio = step_cost(target, drafter, console)["ratio"]
    figures = {}
    for source, prompts in sources.items():
        prompt_tokens, tasks = encoded(target, prompts), [task_of(prompt) for prompt in prompts]
        for temperature in config.temperatures:
            past = " past their end" if config.past_end else ""
            name = f"{source.rpartition('/')[2]}, answers at {temperature:g}{past}"
            options = temperature, config.max_new_tokens, config.seed, console, config.past_end
            texts = list(zip(prompt_tokens, written(target, prompt_tokens, *options), strict=True))
            parts = tasks
            if config.span is not None:
                texts, parts = in_spans(texts, config.span)
            figures[name] = figures_along((target, drafter), texts, parts, f"Judging at {temperature:g}", console)
            if config.span is not None:
                del figures[name][MACRO]  # spans of one answer are no tasks
            for task, entry in figures[name].items():
                fields = {name: value for name, value in as_json(entry).items() if name in ("agreement", "acceptance")}
                folder.append({"source": name, "task": task, "texts": entry.texts} | fields | {"ratio": ratio})
    publish(folder, report(figures, ratio), console)


def task_of(prompt: Prompt) -> str:
    """Its category; those of MT-bench are one task, as in Spec-Bench (arXiv 2401.07851)."""
    return "chat" if prompt.category in MT_BENCH else prompt.category


def encoded(target: LoadedModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The token ids of prompts in the target's chat template."""
    return [encode(target, prompt.turns[0]) for prompt in prompts]


def written(
    target: LoadedModel,
    prompts: Sequence[list[int]],
    temperature: float,
    max_new_tokens: int,
    seed: int,
    console: Console,
    past_end: bool = False,
) -> list[list[int]]:
    """The target's own answers; prompt i is answered with seed + i."""
    with bar(console, f"Answers at {temperature:g}", len(prompts), 0, unit="prompts") as update:
        options = {"max_new_tokens": max_new_tokens, "warp": {"temperature": temperature}, "past_end": past_end}
        return answers(target, prompts, seed=seed, progress=lambda done, _: update(done), **options)


def figures_along(
    models: LoadedPair, texts: Sequence[tuple[list[int], list[int]]], tasks: Sequence[str], title: str, console: Console
) -> dict[str, TaskFigures]:
    """Figures by task of (target, drafter) along texts, (prompt, answer) each; the title is the progress bar's."""
    with bar(console, title, len(texts), 0, unit="prompts") as update:
        return by_task(judge(models[0], models[1], texts, progress=lambda done, _: update(done)), tasks)


def in_spans(
    texts: Sequence[tuple[list[int], list[int]]], span: int
) -> tuple[list[tuple[list[int], list[int]]], list[str]]:
    """Texts cut into spans of output positions, (everything before, the span) each, and the spans' names."""
    cuts = [(start, *text) for text in texts for start in range(0, len(text[1]), span)]
    cuts.sort(key=lambda cut: cut[0])
    spans = [([*prompt, *answer[:start]], answer[start : start + span]) for start, prompt, answer in cuts]
    return spans, [f"from {start}" for start, *_ in cuts]


def as_json(figures: TaskFigures) -> dict[str, Any]:
    """The figures of a task."""
    acceptance = {f"{temperature:g}": list(interval) for temperature, interval in figures.acceptance.items()}
    return figures._asdict() | {"agreement": list(figures.agreement), "acceptance": acceptance}


def step_cost(target: LoadedModel, drafter: LoadedModel, console: Console) -> dict[str, Any]:
    """Milliseconds of a target pass over one token and of a drafter step, greedy, and their ratio c."""
    with console.status("Measuring a drafter step against a target pass"):
        costs = measure_passes(StepCost(dtypes=("served",), widths=(1,)), {"served": target}, drafter)
    pass_ms, step_ms = 1e3 * costs["target served 1"].median, 1e3 * costs["drafter 0"].median
    return {"pass_ms": pass_ms, "step_ms": step_ms, "ratio": step_ms / pass_ms}


def report(figures: dict[str, dict[str, TaskFigures]], ratio: float) -> str:
    """A table of every file and temperature, with the speed-up the acceptance predicts at its best static length."""
    parts = []
    for name, tasks in figures.items():
        temperatures = list(next(iter(tasks.values())).acceptance)
        heads = ["task", "texts", "greedy agreement", *(f"acceptance at {t:g}" for t in temperatures)]
        rows = []
        for task, entry in tasks.items():
            best = best_draft_length(entry.agreement.estimate, ratio)
            speed = float(expected_speedup(entry.agreement.estimate, best, ratio))
            shares = [interval(value, ".3f", WORDS) for value in (entry.agreement, *entry.acceptance.values())]
            task = "mean of tasks" if task == MACRO else task
            rows.append([task, str(entry.texts), *shares, str(best), f"{speed:.2f}"])
        parts += [f"**{name}** (c = {ratio:.3f})", markdown([*heads, "best k", "predicted"], rows)]
    return "\n\n".join(parts) + "\n"


main = command(Judge, judge_drafter, __doc__, "python -m experiments.distill judge")
