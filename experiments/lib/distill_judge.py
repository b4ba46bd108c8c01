"""Stage 4 of a distillation: the drafter is judged along the target's own answers, and exported."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from configs.base import describe
from configs.base_distillation import DistillConfig
from experiments.lib.distill_train import initial_state
from experiments.lib.distill_write import bar
from experiments.lib.prompts import Prompt, every_nth, read_prompts
from experiments.lib.terminal import Whole
from experiments.step_cost import StepCost, measure_passes
from specdec_jax.distillation.checkpoints import Checkpoints
from specdec_jax.distillation.exporting import export, model_card
from specdec_jax.distillation.judging import answers, judge
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.distillation.training import judged_params
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.new_folder import replacing
from specdec_jax.metrics.acceptance import MACRO, TaskFigures, best_draft_length, by_task, expected_speedup
from specdec_jax.models import llama
from specdec_jax.text.generation import encode

# MT-bench's categories, one task as in Spec-Bench (arXiv 2401.07851).
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def judge_and_export(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Judges the newest checkpoint, exports it to drafter/ and drafter-orbax/, and prints the table."""
    drafter, step = trained(config, folder, target)
    with console.status("Measuring a drafter step against a target pass"):
        cost = step_cost(target, drafter)
    figures = {}
    for path in config.judge:
        for temperature in config.judge_temperatures:
            figures[f"{Path(every_nth(path)[0]).stem}, answers at {temperature:g}"] = judge_file(
                config, folder, target, drafter, path, temperature, console
            )
    table = report(figures, cost["ratio"])
    where = folder / "judge"
    _write(where / "table.md", table + "\n")
    plain = {name: {task: _plain(entry) for task, entry in tasks.items()} for name, tasks in figures.items()}
    _write(where / "judgement.json", json.dumps({"step": step, "cost": cost, "figures": plain}, indent=2) + "\n")
    card = model_card(card_fields(config, folder, drafter, step, cost, table))
    for form, name in (("hf", "drafter"), ("orbax", "drafter-orbax")):
        export(
            folder / name,
            drafter.config,
            drafter.params,
            target.tokenizer,
            card=card,
            formats=(form,),
            overwrite=True,
        )
    console.print(Whole(table))
    console.print(f"Written to {where}/ and {folder / 'drafter'}/")


def trained(config: DistillConfig, folder: Path, target: LoadedModel) -> tuple[LoadedModel, int]:
    """The newest checkpoint as a model in the config's dtype, and its step. Raises ValueError without one."""
    checkpoints = Checkpoints(folder / "train" / "checkpoints")
    try:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{folder / 'train'} holds no checkpoint: run --stage train first")
        like, drafter = initial_state(config, target, np.zeros(target.model.spec.vocab_size))
        params = judged_params(checkpoints.restore(step, like))
    finally:
        checkpoints.close()
    params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
    model = llama.language_model(drafter, config.dtype)
    return LoadedModel(model, params, target.tokenizer, config.name, drafter), step


def judge_file(
    config: DistillConfig,
    folder: Path,
    target: LoadedModel,
    drafter: LoadedModel,
    path: str,
    temperature: float,
    console: Console,
) -> dict[str, TaskFigures]:
    """Figures by task along the target's answers to a file's prompts; answers are kept in judge/."""
    path, every = every_nth(path)
    prompts = read_prompts(path)[::every]
    tokens = [encode(target, prompt.turns[0], chat=True, system=None) for prompt in prompts]
    cache = folder / "judge" / f"answers-{Path(path).stem}-{temperature:g}.json"
    told = {"prompts": tokens, "tokens": config.judge_tokens, "target": config.target, "seed": config.seed}
    known = json.loads(cache.read_text(encoding="utf-8")) if cache.is_file() else {}
    if known.get("told") != told:
        with bar(console, f"Answers at {temperature:g}", len(prompts), 0, unit="prompts") as update:
            found = answers(
                target,
                tokens,
                max_new_tokens=config.judge_tokens,
                warp={"temperature": temperature},
                seed=config.seed,
                progress=lambda done, _: update(done),
            )
        known = {"told": told, "answers": found}
        _write(cache, json.dumps(known) + "\n")
    texts = list(zip(tokens, known["answers"], strict=True))
    with bar(console, f"Judging at {temperature:g}", len(prompts), 0, unit="prompts") as update:
        judgement = judge(target, drafter, texts, progress=lambda done, _: update(done))
    return by_task(judgement, [task_of(prompt) for prompt in prompts])


def task_of(prompt: Prompt) -> str:
    """Its category; those of MT-bench are one task."""
    return "chat" if prompt.category in CHAT else prompt.category


def step_cost(target: LoadedModel, drafter: LoadedModel) -> dict[str, Any]:
    """Milliseconds of a target pass over one token and of a drafter step, greedy, and their ratio c."""
    costs = measure_passes(StepCost(dtypes=("served",), widths=(1,)), {"served": target}, drafter)
    pass_ms, step_ms = 1e3 * costs["target served 1"].median, 1e3 * costs["drafter 0"].median
    return {"pass_ms": pass_ms, "step_ms": step_ms, "ratio": step_ms / pass_ms}


def report(figures: dict[str, dict[str, TaskFigures]], ratio: float) -> str:
    """A table of every file and temperature, with the speed-up the acceptance predicts at its best static length."""
    lines = []
    for name, tasks in figures.items():
        temperatures = list(next(iter(tasks.values())).acceptance)
        head = [
            "task",
            "texts",
            "greedy agreement",
            *(f"acceptance at {t:g}" for t in temperatures),
            "best k",
            "predicted",
        ]
        lines += [f"**{name}** (c = {ratio:.3f})", "", _row(head), _row(["---"] * len(head))]
        for task, entry in tasks.items():
            mean = entry.agreement.estimate
            best = best_draft_length(mean, ratio)
            cells = [_interval(entry.agreement), *(_interval(entry.acceptance[t]) for t in temperatures)]
            speed = f"{float(expected_speedup(mean, best, ratio)):.2f}"
            lines.append(_row(["mean of tasks" if task == MACRO else task, str(entry.texts), *cells, str(best), speed]))
        lines.append("")
    return "\n".join(lines)


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


def _interval(interval: Any) -> str:
    if interval.low != interval.low:
        return f"{interval.estimate:.3f}"
    return f"{interval.estimate:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(figures: TaskFigures) -> dict[str, Any]:
    acceptance = {f"{t:g}": list(interval) for t, interval in figures.acceptance.items()}
    return figures._asdict() | {"agreement": list(figures.agreement), "acceptance": acceptance}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
