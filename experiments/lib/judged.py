"""A drafter judged along its target's own answers: the answers, the figures, and the table of them."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from experiments.lib.cells import WORDS, interval, markdown
from experiments.lib.distill_write import bar
from experiments.lib.options import LoadedPair
from experiments.lib.prompts import MT_BENCH, Prompt
from specdec_jax.loading import LoadedModel
from specdec_jax.metrics.acceptance import MACRO, TaskFigures, best_draft_length, by_task, expected_speedup
from specdec_jax.metrics.judging import answers, judge
from specdec_jax.text.generation import encode


def task_of(prompt: Prompt) -> str:
    """Its category; those of MT-bench are one task, as in Spec-Bench (arXiv 2401.07851)."""
    return "chat" if prompt.category in MT_BENCH else prompt.category


def encoded(target: LoadedModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Prompts as the target is asked them."""
    return [encode(target, prompt.turns[0]) for prompt in prompts]


def written(
    target: LoadedModel,
    prompts: Sequence[list[int]],
    temperature: float,
    most: int,
    seed: int,
    console: Console,
    past_end: bool = False,
) -> list[list[int]]:
    """The target's own answers of up to `most` tokens; prompt i is answered with seed + i."""
    with bar(console, f"Answers at {temperature:g}", len(prompts), 0, unit="prompts") as update:
        return answers(
            target,
            prompts,
            max_new_tokens=most,
            warp={"temperature": temperature},
            seed=seed,
            past_end=past_end,
            progress=lambda done, _: update(done),
        )


def figures_along(
    models: LoadedPair,
    asked: Sequence[list[int]],
    found: Sequence[list[int]],
    tasks: Sequence[str],
    title: str,
    console: Console,
) -> dict[str, TaskFigures]:
    """Figures by task of (target, drafter) along answers to the prompts; the title is the progress bar's."""
    with bar(console, title, len(asked), 0, unit="prompts") as update:
        texts = list(zip(asked, found, strict=True))
        return by_task(judge(models[0], models[1], texts, progress=lambda done, _: update(done)), tasks)


def in_spans(
    asked: Sequence[list[int]], found: Sequence[list[int]], span: int
) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Prompts and answers cut into spans of output positions: (what came before, the span, its name) of each."""
    cuts = [(row, start) for row, answer in enumerate(found) for start in range(0, len(answer), span)]
    cuts.sort(key=lambda cut: cut[1])
    before = [[*asked[row], *found[row][:start]] for row, start in cuts]
    return before, [found[row][start : start + span] for row, start in cuts], [f"from {start}" for _, start in cuts]


def as_json(figures: TaskFigures) -> dict[str, Any]:
    """The figures of a task."""
    acceptance = {f"{temperature:g}": list(interval) for temperature, interval in figures.acceptance.items()}
    return figures._asdict() | {"agreement": list(figures.agreement), "acceptance": acceptance}


def step_cost(target: LoadedModel, drafter: LoadedModel, console: Console) -> dict[str, Any]:
    """Milliseconds of a target pass over one token and of a drafter step, greedy, and their ratio c."""
    from experiments.step_cost import StepCost, measure_passes  # which compares dtypes by this module

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
        rows = [_row(task, entry, ratio) for task, entry in tasks.items()]
        parts += [f"**{name}** (c = {ratio:.3f})", markdown([*heads, "best k", "predicted"], rows)]
    return "\n\n".join(parts) + "\n"


def _row(task: str, entry: TaskFigures, ratio: float) -> list[str]:
    best = best_draft_length(entry.agreement.estimate, ratio)
    speed = float(expected_speedup(entry.agreement.estimate, best, ratio))
    shares = [interval(value, ".3f", WORDS) for value in (entry.agreement, *entry.acceptance.values())]
    return ["mean of tasks" if task == MACRO else task, str(entry.texts), *shares, str(best), f"{speed:.2f}"]
