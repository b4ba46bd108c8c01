"""Stage 4 of a distillation: the drafter is judged along the target's own answers, and exported."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from configs.base import describe
from configs.base_distillation import DistillConfig
from experiments.lib.distill_train import as_model, initial_state
from experiments.lib.judged import as_json, encoded, figures_along, report, step_cost, task_of, written
from experiments.lib.options import LoadedPair
from experiments.lib.prompts import every_nth, load_prompts
from experiments.lib.terminal import Whole
from specdec_jax.distillation.checkpoints import Checkpoints
from specdec_jax.distillation.exporting import export, model_card
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.new_folder import replacing
from specdec_jax.metrics.acceptance import TaskFigures


def judge_and_export(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Judges the newest checkpoint, exports it to drafter/ and drafter-orbax/, and prints the table."""
    drafter, step = trained(config, folder, target)
    cost = step_cost(target, drafter, console)
    figures = {
        f"{Path(every_nth(path)[0]).stem}, answers at {temperature:g}": judge_file(
            config, folder, (target, drafter), path, temperature, console
        )
        for path in config.judge
        for temperature in config.judge_temperatures
    }
    table = report(figures, cost["ratio"])
    where = folder / "judge"
    _write(where / "table.md", table)
    plain = {name: {task: as_json(entry) for task, entry in tasks.items()} for name, tasks in figures.items()}
    _write(where / "judgement.json", json.dumps({"step": step, "cost": cost, "figures": plain}, indent=2) + "\n")
    card = model_card(card_fields(config, folder, drafter, step, cost, table))
    for form, name in (("hf", "drafter"), ("orbax", "drafter-orbax")):
        model = (drafter.config, drafter.params, target.tokenizer)
        export(folder / name, *model, card=card, formats=(form,), overwrite=True)
    console.print(Whole(table))
    console.print(f"Written to {where}/ and {folder / 'drafter'}/")


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
    config: DistillConfig, folder: Path, models: LoadedPair, path: str, temperature: float, console: Console
) -> dict[str, TaskFigures]:
    """Figures by task of (target, drafter) along the first's answers to a file's prompts, which judge/ keeps."""
    prompts = load_prompts(path)
    tokens = encoded(models[0], prompts)
    cache = folder / "judge" / f"answers-{Path(every_nth(path)[0]).stem}-{temperature:g}.json"
    told = {"prompts": tokens, "tokens": config.judge_tokens, "target": config.target, "seed": config.seed}
    known = json.loads(cache.read_text(encoding="utf-8")) if cache.is_file() else {}
    if known.get("told") != told:
        found = written(models[0], tokens, temperature, config.judge_tokens, config.seed, console)
        known = {"told": told, "answers": found}
        _write(cache, json.dumps(known) + "\n")
    tasks = [task_of(prompt) for prompt in prompts]
    return figures_along(models, tokens, known["answers"], tasks, f"Judging at {temperature:g}", console)


def card_fields(
    config: DistillConfig, folder: Path, drafter: LoadedModel, step: int, cost: dict[str, Any], table: str
) -> dict[str, Any]:
    """What the model card says."""
    data = ShardFolder(folder / "data")
    size = sum(leaf.size for leaf in jax.tree.leaves(drafter.params))
    seen = step * config.packing.tokens
    start = "" if config.start_from is None else f"from the weights of {config.start_from} with a fresh optimiser; "
    return {
        "name": config.name,
        "target": config.target,
        "parameters": size,
        "data": f"{data.num_tokens:,} tokens written by the target ({len(data.entries)} shards), labels: the target's "
        f"{config.labels or config.labels_online} most probable tokens at every position",
        "recipe": f"{start}{config.shape}; {config.packing}; {config.schedule}; loss {describe(config.loss)}",
        "cost": f"{step:,} steps, {seen:,} positions; a drafter step is {cost['ratio']:.3f} of a target pass here",
        "figures": table,
    }


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
