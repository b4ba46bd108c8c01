"""Stage 4 of a distillation: the drafter is judged along the target's own answers, and exported."""

import json
import math
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from configs.base import describe
from configs.base_distillation import DistillConfig
from experiments.lib.cells import markdown
from experiments.lib.distill_train import as_model, by_draft, corpora, initial_state
from experiments.lib.judged import as_json, encoded, figures_along, report, step_cost, task_of, written
from experiments.lib.options import LoadedPair
from experiments.lib.prompts import every_nth, load_prompts
from experiments.lib.run_folder import write_text
from experiments.lib.terminal import Whole
from specdec_jax.distillation.checkpoints import Checkpoints
from specdec_jax.distillation.exporting import export, model_card
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.drafters.draft_models.llama_reading import LlamaReadingConfig
from specdec_jax.loading import LoadedModel, load_model
from specdec_jax.metrics.acceptance import TaskFigures


def judge_and_export(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Judges the newest checkpoint, exports it to drafter/ and drafter-orbax/, and prints the table."""
    drafter, step = trained(config, folder, target)
    cost = step_cost(target, drafter, console)
    where = folder / "judge"
    where.mkdir(exist_ok=True)
    figures = {
        f"{Path(every_nth(path)[0]).stem}, answers at {temperature:g}": judge_file(
            config, where, (target, drafter), path, temperature, console
        )
        for path in config.judge
        for temperature in config.judge_temperatures
    }
    table = report(figures, cost["ratio"]) + drafts_table(config, folder, target, drafter)
    write_text(where / "table.md", table)
    plain = {name: {task: as_json(entry) for task, entry in tasks.items()} for name, tasks in figures.items()}
    write_text(where / "judgement.json", json.dumps({"step": step, "cost": cost, "figures": plain}, indent=2) + "\n")
    data = ShardFolder(folder / "data")
    start = "" if config.start_from is None else f"from the weights of {config.start_from} with a fresh optimiser; "
    fields = {
        "name": config.name,
        "target": config.target,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(drafter.params)),
        "data": f"{data.num_tokens:,} tokens written by the target ({len(data.entries)} shards), labels: the target's "
        + (f"{config.labels} most probable tokens at every position" if config.labels else "whole distributions"),
        "recipe": f"{start}{config.shape}; {config.packing}; {config.schedule}; loss {describe(config.loss)}",
        "cost": f"{step:,} steps, {step * config.packing.tokens:,} positions; a drafter step is {cost['ratio']:.3f} of "
        "a target pass here",
        "figures": table,
    }
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
    lines = []
    for name, model in models.items():
        if isinstance(model.config, LlamaReadingConfig):
            drafts = by_draft(config, target, model, held_out)
            for figure in ("agreement", "acceptance"):
                lines.append([name, figure, *(f"{each[figure]:.3f}" for each in drafts)])
    heads = ["drafter", "held out, by draft", *map(str, range(1, config.unroll.steps + 1))]
    return "\n" + markdown(heads, lines) + "\n"


def trained(config: DistillConfig, folder: Path, target: LoadedModel) -> tuple[LoadedModel, int]:
    """The newest checkpoint as a model in the config's dtype, and its step. Raises ValueError without one."""
    checkpoints = Checkpoints(folder / "train" / "checkpoints", by_itself=True)
    try:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{folder / 'train'} holds no checkpoint: run --stage train first")
        like, drafter = initial_state(config, target, np.zeros(target.model.spec.vocab_size))
        return as_model(config, target, checkpoints.restore(step, like), drafter, config.name), step
    finally:
        checkpoints.close()


def judge_file(
    config: DistillConfig, where: Path, models: LoadedPair, path: str, temperature: float, console: Console
) -> dict[str, TaskFigures]:
    """Figures by task of (target, drafter) along the target's answers to a file's prompts, which `where` keeps."""
    prompts = load_prompts(path)
    tokens = encoded(models[0], prompts)
    cache = where / f"answers-{Path(every_nth(path)[0]).stem}-{temperature:g}.json"
    settings = {"prompts": tokens, "tokens": config.judge_tokens, "target": config.target, "seed": config.seed}
    cached = json.loads(cache.read_text(encoding="utf-8")) if cache.is_file() else {}
    if cached.get("told") != settings:
        answers = written(models[0], tokens, temperature, config.judge_tokens, config.seed, console)
        cached = {"told": settings, "answers": answers}
        write_text(cache, json.dumps(cached) + "\n")
    texts = list(zip(tokens, cached["answers"], strict=True))
    return figures_along(models, texts, [task_of(prompt) for prompt in prompts], f"Judging at {temperature:g}", console)
