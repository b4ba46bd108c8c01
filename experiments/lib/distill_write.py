"""Stages 1 and 2 of a distillation: the target writes, and labels what has none."""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.base import describe
from configs.base_distillation import DistillConfig
from specdec_jax.app.views.printing import progress
from specdec_jax.distillation.conversations import Author, Pool
from specdec_jax.distillation.labelling import build_labeller, label_shard
from specdec_jax.distillation.prompts import HeldOut, Openings, RequestSource, read_openings, read_texts
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.loading import LoadedModel
from specdec_jax.locks import claimed

DOCUMENTS = "documents"
# What the manifest says by itself:
OWN_FACTS = ("file", "sha256", "tokens", "conversations", "labels", "hidden", "layers")
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
    author = Author(
        target.model,
        target.params,
        target.tokenizer,
        source,
        held_out,
        temperatures=config.temperatures,
        labels=config.labels,
        label_dtype=config.label_dtype,
        layers=config.hidden_layers,
        seed=config.seed,
    )
    if config.hidden_layers and target.model.hidden.streams is not None:
        size = config.tokens * len(config.hidden_layers) * target.model.hidden.width * 2
        states = f"{config.tokens:,} tokens' hidden states of {len(config.hidden_layers)} layers"
        console.print(f"Data: {states} will take {size / 1e9:.1f} GB")
    with bar(console, "Writing", config.tokens, data.num_tokens) as update:
        for name in claimed(data.path, lambda: _blocks_missing(config, data)):
            number, before = int(name), data.num_tokens
            kind, pool = _kind(config, number)
            shard, facts = author.block(
                number, pool, long=kind == "long", progress=lambda done, _, before=before: update(before + done)
            )
            data.add(name, shard, rows=kind, layers=list(config.hidden_layers), **facts)
    console.print(f"Data: {data.num_tokens:,} tokens in {len(data.entries)} shards, {data.path}")


def _kind(config: DistillConfig, number: int) -> tuple[str, Pool]:
    """Whether a block is "long" or "short", and its rows."""
    kind = config.cycle[number % len(config.cycle)]
    return kind, config.long if kind == "long" else config.short


def _blocks_missing(config: DistillConfig, data: ShardFolder) -> list[str]:
    """Blocks that are surely needed, whichever process writes them: those before may have as many tokens as fit."""
    data.refresh()
    there = {entry["file"]: entry["tokens"] for entry in data.entries}
    tokens, number, missing = 0, 0, []
    while tokens < config.tokens:
        name = f"{number:05d}"
        _, pool = _kind(config, number)
        if f"{name}.safetensors" not in there:
            missing.append(name)
        tokens += there.get(f"{name}.safetensors", pool.most_tokens)
        number += 1
    return missing


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
    with bar(console, "Labelling", data.num_tokens, 0) as update:
        for name in claimed(data.path, lambda: _labels_missing(config, data)):
            index = [Path(entry["file"]).stem for entry in data.entries].index(name)
            entry, shard = data.entries[index], data.load(index, hidden=False)
            labelled = label_shard(labeller, target.params, shard, vocab, config.label_dtype)
            facts = {key: entry[key] for key in entry if key not in OWN_FACTS}
            data.add(name, labelled, **facts | {"layers": layers})
            missing = set(_labels_missing(config, data))
            update(sum(entry["tokens"] for entry in data.entries if Path(entry["file"]).stem not in missing))
    console.print(f"Labels: {config.labels} a position")


def _labels_missing(config: DistillConfig, data: ShardFolder) -> list[str]:
    """Shards with another number of labels than configured, or without hidden states."""
    data.refresh()
    layers = list(config.hidden_layers)
    return [
        Path(entry["file"]).stem
        for index, entry in enumerate(data.entries)
        if data.labels_of(index) != config.labels or (layers and layers != layers_of(entry))
    ]


def layers_of(entry: Mapping[str, Any]) -> list[int]:
    """The layers whose hidden states a shard of the manifest holds."""
    return entry["layers"] if "hidden" in entry else []


def read_requests(config: DistillConfig) -> tuple[tuple[Openings, ...], dict[str, list[str]]]:
    """Kinds of requests, whole prompts as one of them, and what stands for each name in braces, documents among it."""
    openings, pools = read_openings(config.openings)
    pools |= {path.stem: read_texts(path) for path in sorted(Path(config.texts).glob("*.jsonl"))}
    if DOCUMENTS not in pools:
        pools[DOCUMENTS] = installed_documents()
    prompts = [text for path in config.prompts for text in read_texts(path)]
    if prompts:  # braces in them are no pools
        texts = tuple(text.replace("{", "(").replace("}", ")") for text in prompts)
        openings = (*openings, Openings("prompts", texts, sum(entry.weight for entry in openings) / 2))
    return openings, pools


def installed_documents() -> list[str]:
    """Paragraphs of prose from the descriptions of installed packages, in a fixed order."""
    texts = set()
    for package in importlib.metadata.distributions():
        description = package.metadata.get_payload() or package.metadata.get("Description") or ""
        for paragraph in str(description).split("\n\n"):
            words = paragraph.split()
            if len(words) >= LEAST_WORDS and sum(word.isalpha() for word in words) > 0.7 * len(words):
                texts.add(" ".join(words))
    return sorted(texts)


@contextmanager
def bar(console: Console, title: str, total: int, done: int, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
    """A progress bar with its rate; gives the function that moves it."""
    with progress(console) as shown:
        task = shown.add_task(title, total=total, completed=done)

        def update(now: int) -> None:
            speed = shown.tasks[0].speed
            rate = "" if not speed else f", {speed:,.{0 if speed >= 10 else 1}f} {unit}/s"
            shown.update(task, completed=min(now, total), description=f"{title}{rate}")

        yield update
