"""Stages 1 to 3 of a distillation: the target writes, labels what has no labels, and the drafter learns from both."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from configs.base import describe
from configs.base_distillation import DistillConfig
from experiments.lib.commands import bar
from experiments.lib.plots import panels
from experiments.lib.run_folder import environment, write_text
from specdec_jax.contrib.block.llama_block import LlamaBlockConfig, block_config, with_block
from specdec_jax.decoding.cache_feed import check_reads
from specdec_jax.distillation import loop
from specdec_jax.distillation.batches import BatchOrder, Corpus
from specdec_jax.distillation.conversations import Author, Pool
from specdec_jax.distillation.initial import drafter_config, initial_params
from specdec_jax.distillation.labelling import build_labeller, label_shard
from specdec_jax.distillation.prompts import HeldOut, Openings, RequestSource, read_openings, read_texts
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.distillation.training import TrainState, build_step, build_validation, init_state, judged_params
from specdec_jax.distillation.unrolled import Unroll
from specdec_jax.distillation.writing import check_layers
from specdec_jax.drafters.draft_models.llama_reading import LlamaReadingConfig, reading_config, with_reading
from specdec_jax.loading import LoadedModel, load_model
from specdec_jax.loading.families import family_of
from specdec_jax.loading.new_folder import replacing
from specdec_jax.locks import claimed
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.text.json_lines import json_lines

DOCUMENTS = "documents"
OWN_FACTS = ("file", "sha256", "tokens", "conversations", "labels", "hidden", "layers")  # of a manifest, by itself
LEAST_WORDS = 40  # minimum length of a paragraph of a package's description


def write(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Writes blocks until there are enough tokens. A block that was cut short is written again, to the same tokens."""
    openings, pools = read_requests(config)
    fields = ("target", "held_out", "short", "long", "cycle", "temperatures", "labels", "label_dtype", "seed", "dtype")
    about = {name: describe(getattr(config, name)) for name in fields}
    requests = json.dumps(describe((openings, pools)), sort_keys=True)
    about["requests"] = hashlib.sha256(requests.encode()).hexdigest()[:12]
    data = ShardFolder(folder / "data", about)  # refuses shards that other settings wrote
    if data.num_tokens >= config.tokens:
        console.print(f"Data: {data.num_tokens:,} tokens are there")
        return
    held_out = HeldOut(text for path in config.held_out for text in read_texts(path))
    source = RequestSource(openings, pools, pools[DOCUMENTS])
    options = {name: getattr(config, name) for name in ("temperatures", "labels", "label_dtype", "seed")}
    models = target.model, target.params, target.tokenizer
    author = Author(*models, source, held_out, layers=config.hidden_layers, **options)
    if config.hidden_layers and target.model.hidden.streams is not None:
        size = config.tokens * len(config.hidden_layers) * target.model.hidden.width * 2
        states = f"{config.tokens:,} tokens' hidden states of {len(config.hidden_layers)} layers"
        console.print(f"Data: {states} will take {size / 1e9:.1f} GB")

    def kind_of(number: int) -> tuple[str, Pool]:
        """Whether a block is "long" or "short", and its rows."""
        kind = config.cycle[number % len(config.cycle)]
        return kind, config.long if kind == "long" else config.short

    def blocks_missing() -> list[str]:
        """Blocks that are surely needed, whichever process writes them: those before may have as many as fit."""
        data.refresh()
        there = {Path(entry["file"]).stem: entry["tokens"] for entry in data.entries}
        tokens, names = 0, []
        while tokens < config.tokens:
            names.append(f"{len(names):05d}")
            tokens += there.get(names[-1], kind_of(len(names) - 1)[1].most_tokens)
        return [name for name in names if name not in there]

    with bar(console, "Writing", config.tokens, data.num_tokens) as update:
        for name in claimed(data.path, blocks_missing):
            number, before = int(name), data.num_tokens
            kind, pool = kind_of(number)
            shard, facts = author.block(
                number, pool, long=kind == "long", progress=lambda done, _, before=before: update(before + done)
            )
            data.add(name, shard, rows=kind, layers=list(config.hidden_layers), **facts)
    console.print(f"Data: {data.num_tokens:,} tokens in {len(data.entries)} shards, {data.path}")


def label(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Labels the shards that other settings labelled, or that lack hidden states."""
    data = ShardFolder(folder / "data")
    if not data.entries:
        raise ValueError(f"{data.path} holds no shards: run --stage write first")
    if not config.labels:
        console.print("Labels: computed while training")
        return
    layers, vocab = list(config.hidden_layers), target.model.spec.vocab_size
    labeller = build_labeller(target.model, config.labels, layers=config.hidden_layers)

    def labels_missing() -> list[str]:
        """Shards with another number of labels than configured, or without hidden states."""
        data.refresh()
        names = [Path(entry["file"]).stem for entry in data.entries]
        stale = [layers and layers != layers_of(entry) for entry in data.entries]
        return [name for at, name in enumerate(names) if data.labels_of(at) != config.labels or stale[at]]

    with bar(console, "Labelling", data.num_tokens, 0) as update:
        for name in claimed(data.path, labels_missing):
            index = [Path(entry["file"]).stem for entry in data.entries].index(name)
            entry, shard = data.entries[index], data.load(index, hidden=False)
            labelled = label_shard(labeller, target.params, shard, vocab, config.label_dtype)
            facts = {key: entry[key] for key in entry if key not in OWN_FACTS}
            data.add(name, labelled, **facts | {"layers": layers})
            missing = set(labels_missing())
            update(sum(entry["tokens"] for entry in data.entries if Path(entry["file"]).stem not in missing))
    console.print(f"Labels: {config.labels} a position")


def layers_of(entry: Mapping[str, Any]) -> list[int]:
    """The layers whose hidden states a shard of the manifest holds."""
    return entry["layers"] if "hidden" in entry else []


def read_requests(config: DistillConfig) -> tuple[tuple[Openings, ...], dict[str, list[str]]]:
    """Kinds of requests, whole prompts as one of them, and what stands for each name in braces, documents among it."""
    openings, pools = read_openings(config.openings)
    pools |= {path.stem: read_texts(path) for path in sorted(Path(config.texts).glob("*.jsonl"))}
    if DOCUMENTS not in pools:
        texts = set()  # paragraphs of prose from the descriptions of installed packages
        for package in importlib.metadata.distributions():
            description = package.metadata.get_payload() or package.metadata.get("Description") or ""
            for words in map(str.split, str(description).split("\n\n")):
                if len(words) >= LEAST_WORDS and sum(word.isalpha() for word in words) > 0.7 * len(words):
                    texts.add(" ".join(words))
        pools[DOCUMENTS] = sorted(texts)
    prompts = [text for path in config.prompts for text in read_texts(path)]
    if prompts:  # braces in them are no pools
        texts = tuple(text.replace("{", "(").replace("}", ")") for text in prompts)
        openings = (*openings, Openings("prompts", texts, sum(entry.weight for entry in openings) / 2))
    return openings, pools


VALIDATION_BATCHES = 8
SETTINGS = "training.json"  # the settings of the training, next to its checkpoints
FIELDS = ("target", "shape", "start_from", "packing", "schedule", "loss", "labels", "chunk", "dtype", "seed")
Figures = dict[str, float]


def train(config: DistillConfig, folder: Path, target: LoadedModel, console: Console) -> None:
    """Trains to the last step of the schedule, from the newest checkpoint there is."""
    corpus, held_out = corpora(config, data := ShardFolder(folder / "data"), target.model.spec.vocab_size)
    state, drafter = initial_state(config, target, corpus.counts)
    options, target_params = _settings(config, target)
    step = build_step(drafter, config.schedule, config.loss, **options)
    order = BatchOrder(corpus, config.packing, config.seed)
    measure: Any = None if held_out is None else by_draft(config, target, drafter, held_out, config.unroll)
    where = folder / "train"
    where.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        fields = (*FIELDS, "unroll") if config.shape.reads else FIELDS
        settings = json.loads(json.dumps({name: describe(getattr(config, name)) for name in fields}))
        settings |= {"validation": config.validation, "data": [entry["sha256"] for entry in data.entries]}
        path = where / SETTINGS
        earlier = json.loads(path.read_text(encoding="utf-8"))["config"] if path.is_file() else settings
        changed = sorted(key for key in {*settings, *earlier} if settings.get(key) != earlier.get(key))
        if changed:  # weights trained half this way and half that have no recipe
            other = ", ".join(changed)
            raise ValueError(f"{where} was begun with another {other}: move it away, or choose another --out")
        if not path.is_file():
            write_text(path, json.dumps({"config": settings, **environment()}, indent=2) + "\n")
    if config.start_from is not None:
        console.print(f"Starting from the exported weights of {config.start_from}, with a fresh optimiser")
    with bar(console, "Training", config.schedule.steps * config.packing.tokens, 0) as update:

        def validate(state: TrainState) -> dict[str, float]:
            first, *later = measure(judged_params(state))
            means = {f"validation_{name}": value for name, value in first.items()}
            return means | {"validation_last_agreement": (later or [first])[-1]["agreement"]}

        def report(step: int, means: dict[str, float]) -> None:
            update(step * config.packing.tokens)
            if "validation_acceptance" in means:
                console.print(
                    f"step {step:6d}  loss {means['loss']:.3f}  acceptance {means['acceptance']:.3f}  held out: "
                    f"loss {means['validation_loss']:.3f}  acceptance {means['validation_acceptance']:.3f}  "
                    f"greedy agreement {means['validation_agreement']:.3f}"
                )

        run = lambda state, batch: step(state, batch, target_params)  # noqa: E731
        loop.train(where, state, run, order, config.schedule.steps, config.intervals, report, measure and validate)
    if jax.process_index() == 0:
        rows = [row for _, row in json_lines(where / loop.METRICS)]
        figure, ((losses, shares),) = panels(("", ""), width=5.0, sharex=True)
        both = ("acceptance", "validation_acceptance", "agreement", "validation_agreement")
        for axes, names, unit in ((losses, ("loss", "validation_loss"), "loss (nats)"), (shares, both, "share")):
            for name in names:
                points = [(row["step"], row[name]) for row in rows if name in row] or [(np.nan, np.nan)]
                marker = "o" if name.startswith("validation") else None
                axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), marker=marker)
            axes.set(xlabel="step", ylabel=unit)
            axes.legend(frameon=False)
        with replacing(where / "curve.png") as path:
            figure.savefig(path)
    console.print(f"Training: {where / loop.METRICS}, {where / 'curve.png'}")


def corpora(config: DistillConfig, data: ShardFolder, vocab_size: int) -> tuple[Corpus, Corpus | None]:
    """The training corpus and the one held out, or None. Raises ValueError for shards without what training needs."""
    if not data.entries:
        raise ValueError(f"{data.path} holds no shards: run --stage write first")
    for index, entry in enumerate(data.entries if config.labels else ()):
        if (stored := data.labels_of(index)) != config.labels:
            held = f"{data.path / entry['file']} has {stored} labels per position"
            raise ValueError(f"{held}, labels is {config.labels}: run --stage label")
    layers, reads = list(config.hidden_layers), config.shape.reads if config.labels else ()
    for entry in data.entries if reads else ():
        if layers_of(entry) != layers:
            raise ValueError(f"{data.path / entry['file']} lacks hidden states of layers {layers}: run --stage label")
    missing = [layer for layer in reads if layer not in layers]
    if missing:
        wanted = f"the drafter reads layer {missing[0]} (shape.reads) and the data holds {config.hidden_layers}"
        raise ValueError(f"{wanted}: name it in hidden_layers")
    places = [layers.index(layer) for layer in reads]
    shards = [data.load(index, hidden=bool(reads)) for index in range(len(data.entries))]
    held = min(config.validation, len(shards) - 1)
    return Corpus(shards[held:], vocab_size, places), Corpus(shards[:held], vocab_size, places) if held else None


def _settings(config: DistillConfig, target: LoadedModel) -> tuple[dict[str, Any], Any]:
    """What a step and its validation have in common, and the target's parameters if training runs it."""
    model, params = (None, None) if config.labels else (target.model, target.params)
    return {"dtype": config.dtype, "chunk": config.chunk, "unroll": config.unroll, "target": model}, params


def as_model(config: DistillConfig, target: LoadedModel, state: TrainState, drafter: Any, name: str) -> LoadedModel:
    """The drafter as it is judged and served."""
    params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), judged_params(state))
    model = family_of(drafter).language_model(drafter, config.dtype)
    return LoadedModel(model, params, target.tokenizer, name, drafter)


def initial_state(config: DistillConfig, target: LoadedModel, counts: Any) -> tuple[TrainState, Any]:
    """The state before the first step and the drafter's configuration."""
    if config.start_from is None:
        drafter = drafter_config(config.shape, target.config)
        params = initial_params(config.shape, target.config, target.params, counts, config.seed)
    else:
        start = load_model(config.start_from, dtype="float32", share_from=math.inf)
        drafter, params = start.config, start.params
        if isinstance(drafter, LlamaReadingConfig) and drafter.target_layers != config.shape.reads:
            read = f"start_from {config.start_from!r} reads layers {drafter.target_layers}"
            raise ValueError(f"{read}, shape.reads is {config.shape.reads}: they must be the same")
        check_reads(target.model, start.model)
    if config.shape.reads and not isinstance(drafter, LlamaReadingConfig):
        check_layers(target.model, config.shape.reads)
        if type(drafter) is not LlamaConfig:
            kind = f"start_from {config.start_from!r} is a {type(drafter).__name__}"
            raise ValueError(f"shape.reads is for drafters of family 'llama', {kind}")
        drafter = reading_config(drafter, config.shape.reads, target.model.hidden.width)
        params = with_reading(drafter, params, jnp.float32, config.seed)
    if config.shape.block:
        if not isinstance(drafter, LlamaBlockConfig):
            drafter = block_config(drafter, config.shape.block)
            params = with_block(drafter, params, jnp.float32)
        if config.unroll.steps > drafter.block_size:
            raise ValueError(f"unroll.steps is {config.unroll.steps}, and a block has {drafter.block_size} tokens")
    return init_state(params, config.schedule), drafter


def by_draft(
    config: DistillConfig, target: LoadedModel, drafter: Any, held_out: Corpus, unroll: Unroll
) -> Callable[[Any], list[Figures]]:
    """A function of parameters: figures of each draft of a round along the text held out, if the drafts before it were
    accepted. `drafter` is its configuration."""
    batches = list(map(BatchOrder(held_out, config.packing, 0).at, range(VALIDATION_BATCHES)))
    settings, target_params = _settings(dataclasses.replace(config, unroll=unroll), target)
    measure = build_validation(drafter, config.loss, **settings)

    def figures(params: Any) -> list[Figures]:
        sums = zip(*[measure(params, batch, target_params) for batch in batches], strict=True)
        whole = [jax.tree.map(lambda *leaves: float(np.sum(leaves)), *each) for each in sums]
        names = ("loss", "agreement", "acceptance", "surprise")
        return [{name: getattr(each, name) / each.weight for name in names} for each in whole]

    return figures
