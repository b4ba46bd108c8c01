"""How good is a drafter? Judged along the target's own answers, without training or exporting anything.

Question:  At how many positions would this drafter's token be the target's, and what does that promise?
Command:   python -m experiments.distill judge --drafter FOLDER [--prompts demo.jsonl spec_bench.jsonl:4]
Time:      about 3 s a prompt and temperature on 2 cores
Expected:  the built-in drafter on the demo: 0.67 greedy; docs/drafters.md has a table
Output:    runs/judge-<time>/ with manifest.json, results.jsonl (a line a file, temperature and task) and table.md
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from rich.console import Console

from configs.base import describe
from configs.base_distillation import DistillConfig
from experiments.lib.commands import LoadedPair, Output, Served, bar, command
from experiments.lib.distill_train import as_model, by_draft, corpora, initial_state
from experiments.lib.prompts import every_nth, load_prompts, task_of
from experiments.lib.run_folder import RunFolder, write_text
from experiments.lib.tables import WORDS, Whole, interval, markdown, publish
from experiments.step_cost import StepCost, measure_passes, timing
from specdec_jax.decoding.teacher_forcing import Text
from specdec_jax.distillation.checkpoints import Checkpoints
from specdec_jax.distillation.exporting import export, model_card
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.distillation.unrolled import Unroll
from specdec_jax.drafters.draft_models.llama_reading import LlamaReadingConfig
from specdec_jax.loading import LoadedModel, load_model
from specdec_jax.metrics.acceptance import MACRO, TaskFigures, best_draft_length, by_task, expected_speedup
from specdec_jax.metrics.judging import answers, judge
from specdec_jax.ranges import Between
from specdec_jax.text.generation import encode
from specdec_jax.text.sampling_params import NewTokens, Seed, Temperatures


@dataclass(frozen=True)
class Judge(Output, Served):
    """Judge a drafter."""

    prompts: tuple[str, ...] = ("configs/prompts/demo.jsonl",)
    """JSONL files, FILE:n for every n-th prompt, or hub:NAME."""
    temperatures: Temperatures = (0.0, 0.7)  # Temperatures of the answers.
    max_new_tokens: NewTokens = 128  # Most tokens of an answer.
    seed: Seed = 0  # Prompt i is answered with seed + i.
    span: Annotated[int | None, Between(1)] = None
    """Judge by output position instead of by task, in spans of so many tokens."""
    past_end: bool = False  # Answers go on when the target would end them.


def judge_drafter(config: Judge, console: Console) -> None:
    """Judges and writes the run folder."""
    sources = {source: load_prompts(source) for source in config.prompts}
    target, drafter = config.load(console)
    folder = RunFolder.create("judge", config, config.out)
    ratio = step_cost(target, drafter, console)["ratio"]
    figures, there = {}, {(row["source"], row["task"]) for row in folder.rows()}
    for source, prompts in sources.items():
        prompt_tokens, tasks = [encode(target, prompt.turns[0]) for prompt in prompts], list(map(task_of, prompts))
        for temperature in config.temperatures:
            past = " past their end" if config.past_end else ""
            name = f"{source}, answers at {temperature:g}{past}"
            options = {"max_new_tokens": config.max_new_tokens, "seed": config.seed, "past_end": config.past_end}
            made = written(target, prompt_tokens, temperature, console, **options)
            texts = list(zip(prompt_tokens, made, strict=True))
            parts = tasks
            if config.span is not None:  # (everything before, the span) each
                cuts = [(start, *text) for text in texts for start in range(0, len(text[1]), config.span)]
                cuts.sort(key=lambda cut: cut[0])
                texts = [([*prompt, *answer[:n]], answer[n : n + config.span]) for n, prompt, answer in cuts]
                parts = [f"from {start}" for start, *_ in cuts]
            figures[name] = figures_along((target, drafter), texts, parts, temperature, console)
            if config.span is not None:
                del figures[name][MACRO]  # spans of one answer are no tasks
            for task, entry in figures[name].items():
                fields = {name: value for name, value in as_json(entry).items() if name in ("agreement", "acceptance")}
                if (name, task) not in there:  # of a run that was stopped
                    folder.append({"source": name, "task": task, "texts": entry.texts} | fields | {"ratio": ratio})
    publish(folder, report(figures, ratio), console)


def written(
    target: LoadedModel, prompts: Sequence[list[int]], temperature: float, console: Console, **options: Any
) -> list[list[int]]:
    """The target's own answers; prompt i is answered with seed + i. `options` are further ones of `answers`."""
    with bar(console, f"Answers at {temperature:g}", len(prompts), 0, unit="prompts") as update:
        options |= {"warp": {"temperature": temperature}, "progress": lambda done, _: update(done)}
        return answers(target, prompts, **options)


def figures_along(
    models: LoadedPair, texts: Sequence[Text], tasks: Sequence[str], temperature: float, console: Console
) -> dict[str, TaskFigures]:
    """Figures by task of (target, drafter) along texts, which were sampled at this temperature."""
    with bar(console, f"Judging at {temperature:g}", len(texts), 0, unit="prompts") as update:
        return by_task(judge(models[0], models[1], texts, progress=lambda done, _: update(done)), tasks)


def as_json(figures: TaskFigures) -> dict[str, Any]:
    """The figures of a task."""
    acceptance = {f"{temperature:g}": list(interval) for temperature, interval in figures.acceptance.items()}
    return figures._asdict() | {"agreement": list(figures.agreement), "acceptance": acceptance}


def step_cost(target: LoadedModel, drafter: LoadedModel, console: Console) -> dict[str, Any]:
    """Milliseconds of a pass of plain decoding and of a drafter step, greedy, and their ratio c."""
    with console.status("Measuring a drafter step against a target pass"):
        times = measure_passes(StepCost(dtypes=("served",), widths=(2,)), {"served": target}, drafter)["served"]
    costs = timing.costs_of(times)  # never negative, also on a busy machine
    return {"pass_ms": 1e3 * costs.plain_pass, "step_ms": 1e3 * costs.drafter_step, "ratio": costs.ratio}


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


def judge_and_export(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Judges the newest checkpoint, exports it to drafter/ and drafter-orbax/, and prints the table."""
    checkpoints = Checkpoints(folder / "train" / "checkpoints", by_itself=True)
    try:
        if (step := checkpoints.latest()) is None:
            raise ValueError(f"{folder / 'train'} holds no checkpoint: run --stage train first")
        like, shape = initial_state(config, target, np.zeros(target.model.spec.vocab_size))
        drafter = as_model(config, target, checkpoints.restore(step, like), shape, config.name)
    finally:
        checkpoints.close()
    cost = step_cost(target, drafter, console)
    where, figures = folder / "judge", {}
    where.mkdir(exist_ok=True)
    for path, temperature in itertools.product(config.judge, config.judge_temperatures):
        stem, prompts = Path(every_nth(path)[0]).stem, load_prompts(path)
        tokens = [encode(target, prompt.turns[0]) for prompt in prompts]
        cache = where / f"answers-{stem}-{temperature:g}.json"
        settings = {"prompts": tokens, "tokens": config.judge_tokens, "target": config.target, "seed": config.seed}
        cached = json.loads(cache.read_text(encoding="utf-8")) if cache.is_file() else {}
        if cached.get("told") != settings:
            options = {"max_new_tokens": config.judge_tokens, "seed": config.seed}
            cached = {"told": settings, "answers": written(target, tokens, temperature, console, **options)}
            write_text(cache, json.dumps(cached) + "\n")
        texts, tasks = list(zip(tokens, cached["answers"], strict=True)), list(map(task_of, prompts))
        judged = figures_along((target, drafter), texts, tasks, temperature, console)
        figures[f"{stem}, answers at {temperature:g}"] = judged
    table = report(figures, cost["ratio"]) + drafts_table(config, folder, target, drafter)
    write_text(where / "table.md", table)
    plain = {name: {task: as_json(entry) for task, entry in tasks.items()} for name, tasks in figures.items()}
    write_text(where / "judgement.json", json.dumps({"step": step, "cost": cost, "figures": plain}, indent=2) + "\n")
    data = ShardFolder(folder / "data")
    start = "" if config.start_from is None else f"from the weights of {config.start_from} with a fresh optimiser; "
    parameters = sum(leaf.size for leaf in jax.tree.leaves(drafter.params))
    fields = {"name": config.name, "target": config.target, "parameters": parameters, "figures": table}
    labels = f"{config.labels} most probable tokens at every position" if config.labels else "whole distributions"
    shards = f"{data.num_tokens:,} tokens written by the target ({len(data.entries)} shards)"
    fields["data"] = f"{shards}, labels: the target's {labels}"
    fields["recipe"] = f"{start}{config.shape}; {config.packing}; {config.schedule}; loss {describe(config.loss)}"
    took = f"{step:,} steps, {step * config.packing.tokens:,} positions"
    fields["cost"] = f"{took}; a drafter step is {cost['ratio']:.3f} of a target pass here"
    for form, name in (("hf", "drafter"), ("orbax", "drafter-orbax")):
        model = (drafter.config, drafter.params, target.tokenizer)
        export(folder / name, *model, card=model_card(fields), formats=(form,), overwrite=True)
    console.print(Whole(table))
    console.print(f"Written to {where}/ and {folder / 'drafter'}/")


def drafts_table(config: DistillConfig, folder: Path, target: LoadedModel, drafter: LoadedModel) -> str:
    """A table of each draft of a round along the text held out, next to the drafter that training started from."""
    if not config.shape.reads:
        return ""
    models = {config.name: drafter}
    if config.start_from is not None:
        models[config.start_from] = load_model(config.start_from, dtype=config.dtype, share_from=math.inf)
    _, held_out = corpora(config, ShardFolder(folder / "data"), target.model.spec.vocab_size)
    lines, unroll = [], Unroll(config.unroll.steps, 1.0)
    for name, model in models.items():
        if isinstance(model.config, LlamaReadingConfig):
            drafts = [] if held_out is None else by_draft(config, target, model.config, held_out, unroll)(model.params)
            for figure in ("agreement", "acceptance"):
                lines.append([name, figure, *(f"{each[figure]:.3f}" for each in drafts)])
    heads = ["drafter", "held out, by draft", *map(str, range(1, config.unroll.steps + 1))]
    return "\n" + markdown(heads, lines) + "\n"


main = command(Judge, judge_drafter, __doc__, "python -m experiments.distill judge")
