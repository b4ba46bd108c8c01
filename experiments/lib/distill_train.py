"""Stage 3 of a distillation: the drafter learns the target's distributions."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from configs.base import describe
from configs.base_distillation import DistillConfig
from experiments.lib.distill_write import bar
from experiments.lib.run_folder import environment
from specdec_jax.distillation import loop
from specdec_jax.distillation.batches import Batch, BatchOrder, Corpus
from specdec_jax.distillation.initial import drafter_config, initial_params
from specdec_jax.distillation.labelling import build_labeller
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.distillation.training import Sums, TrainState, build_step, build_validation, init_state, judged_params
from specdec_jax.loading import LoadedModel, load_model
from specdec_jax.loading.new_folder import replacing

VALIDATION_BATCHES = 8
SETTINGS = "training.json"  # what the training was told, beside its checkpoints


def train(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Trains to the last step of the schedule, from the newest checkpoint there is."""
    data = ShardFolder(folder / "data")
    held = min(config.validation, len(data.entries) - 1)
    if not data.entries:
        raise ValueError(f"{data.path} holds no shards: run --stage write first")
    shards = list(data)
    vocab = target.model.spec.vocab_size
    label = _labeller(config, target)
    corpus = Corpus(shards[held:], vocab)
    order = BatchOrder(corpus, config.packing, config.seed, label)
    state, drafter = initial_state(config, target, corpus.counts)
    step = build_step(drafter, config.schedule, config.loss, dtype=config.dtype, chunk=config.chunk)
    validate = None
    if held:
        aside = BatchOrder(Corpus(shards[:held], vocab), config.packing, 0, label)
        validate = _validation(config, drafter, [aside.at(i) for i in range(VALIDATION_BATCHES)])
    where = folder / "train"
    where.mkdir(parents=True, exist_ok=True)
    _write_settings(where, config, corpus)
    if config.start_from is not None:
        console.print(f"Starting from the exported weights of {config.start_from}, with a fresh optimiser")
    total = config.schedule.steps * config.packing.tokens
    with bar(console, "Training", total, 0) as update:
        report = _reporter(config, console, update)
        loop.train(where, state, step, order, config.schedule.steps, config.intervals, report, validate)
    save_curve(where)
    console.print(f"Training: {where / loop.METRICS}, {where / 'curve.png'}")


def initial_state(config: DistillConfig, target: LoadedModel, counts: Any) -> tuple[TrainState, Any]:
    """The state before the first step and the drafter's configuration."""
    if config.start_from is None:
        drafter = drafter_config(config.shape, target.config)
        params = initial_params(config.shape, target.config, target.params, counts, config.seed)
    else:
        start = load_model(config.start_from, dtype="float32")
        drafter, params = start.config, start.params
    return init_state(params, config.schedule), drafter


def save_curve(where: Path) -> None:
    """Draws loss and acceptance over steps from metrics.jsonl into curve.png."""
    rows = [json.loads(line) for line in (where / loop.METRICS).read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, names, title in (
        (axes[0], ("loss", "validation_loss"), "loss (nats)"),
        (axes[1], ("acceptance", "validation_acceptance", "agreement", "validation_agreement"), "share"),
    ):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            marker = "o" if name.startswith("validation") else None
            axis.plot(*zip(*points, strict=True) if points else ([], []), label=name.replace("_", " "), marker=marker)
        axis.set_xlabel("step")
        axis.set_ylabel(title)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    with replacing(where / "curve.png") as temporary:
        figure.savefig(temporary, dpi=120)
    plt.close(figure)


def _labeller(config: DistillConfig, target: LoadedModel) -> Any:
    if config.labels:
        return None
    label = build_labeller(target.model, config.labels_online)
    return lambda texts: label(target.params, texts)


def _validation(config: DistillConfig, drafter: Any, batches: list[Batch]) -> Any:
    measure = build_validation(drafter, config.loss, dtype=config.dtype, chunk=config.chunk)

    def validate(state: TrainState) -> dict[str, float]:
        sums = [measure(judged_params(state), batch) for batch in batches]
        total = Sums(*(float(np.sum([np.asarray(value) for value in values])) for values in zip(*sums, strict=True)))
        names = ("loss", "agreement", "acceptance", "surprise")
        return {f"validation_{name}": getattr(total, name) / total.weight for name in names}

    return validate


def _reporter(config: DistillConfig, console: Console, update: Any) -> Any:
    def report(step: int, means: dict[str, float]) -> None:
        update(step * config.packing.tokens)
        if "validation_acceptance" in means:
            console.print(
                f"step {step:6d}  loss {means['loss']:.3f}  acceptance {means['acceptance']:.3f}  held out: "
                f"loss {means['validation_loss']:.3f}  acceptance {means['validation_acceptance']:.3f}  "
                f"greedy agreement {means['validation_agreement']:.3f}"
            )

    return report


def _write_settings(where: Path, config: DistillConfig, corpus: Corpus) -> None:
    """Refuses to go on with other settings: weights trained half this way and half that are nobody's recipe."""
    fields = (
        "target",
        "shape",
        "start_from",
        "packing",
        "schedule",
        "loss",
        "labels",
        "labels_online",
        "dtype",
        "seed",
    )
    told = json.loads(json.dumps({name: describe(getattr(config, name)) for name in fields}))
    path = where / SETTINGS
    if path.is_file():
        earlier = json.loads(path.read_text(encoding="utf-8"))["config"]
        changed = sorted(key for key in {*told, *earlier} if told.get(key) != earlier.get(key))
        if changed:
            raise ValueError(
                f"{where} was begun with another {', '.join(changed)}: move it away, or choose another --out"
            )
        return
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"config": told, **environment()}, indent=2) + "\n", encoding="utf-8")
