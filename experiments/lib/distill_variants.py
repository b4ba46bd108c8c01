"""Losses and initialisations of a drafter at equal cost: the same data, the same seconds of training.

Question:  What is worth a user's hour: another loss, or another beginning?
Command:   python -m experiments.distill compare configs/distill_variants.py [--data FOLDER] [--seconds 150] ...
Time:      the config says; two and a half minutes of training a variant, and one of compiling and judging
Output:    paces.json, results.jsonl (a line a variant) and table.md in --out; what is there is not run again

Every variant's step is timed first, so that it is the timing alone that wants a quiet machine; a schedule then has as
many steps as fit in the seconds, warm-up and decay scaled with them. Judged along conversations of the shards held out:
greedy agreement and acceptance over the whole vocabulary.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from configs.base_distillation import DistillConfig, VariantsConfig
from experiments.lib.commands import bar, config_command
from experiments.lib.distill_train import as_model, begin, by_draft
from experiments.lib.run_folder import write_text
from experiments.lib.tables import WORDS, Whole, interval, markdown
from specdec_jax.compilation_cache import enable
from specdec_jax.distillation.batches import Corpus
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.distillation.unrolled import Unroll
from specdec_jax.distillation.writing import BY_ASSISTANT
from specdec_jax.loading import LoadedModel, load_model, refuse_encoders
from specdec_jax.locks import locked
from specdec_jax.meshes import use_mesh
from specdec_jax.metrics.acceptance import MACRO, by_task
from specdec_jax.metrics.judging import judge
from specdec_jax.text.json_lines import json_lines

RESULTS = "results.jsonl"
PACES = "paces.json"
TIMED = 9  # steps whose time decides how many fit
ANSWER, LEAST = 128, 8  # most and least tokens of an answer judged


def compare(config: VariantsConfig, console: Console) -> list[dict[str, Any]]:
    """Trains and judges what is missing, and prints the table."""
    refuse_encoders("distill compare", config.base.target)
    data, out, held = ShardFolder(config.data), Path(config.out), config.base.validation
    every = {name: dataclasses.replace(config.base, **changes) for name, changes in config.variants.items()}
    drafts = max((variant.unroll.steps for variant in every.values() if variant.shape.reads), default=0)
    if len(data.entries) <= held:
        raise ValueError(f"{data.path} holds {len(data.entries)} shards; {held} are held out and some must be left")
    with locked(out):
        enable()
        use_mesh(config.base.mesh)
        target = load_model(config.base.target, dtype=config.base.dtype)
        texts, tasks = held_out_texts([data.load(index, hidden=False) for index in range(held)], config.texts)
        path = out / RESULTS
        rows = [row for _, row in json_lines(path)] if path.is_file() else []
        done = {row["variant"] for row in rows}
        variants = {name: every[name] for name in config.only or every if name not in done}
        paces = json.loads((out / PACES).read_text()) if (out / PACES).is_file() else {}  # seconds per step
        missing = [name for name in variants if name not in paces]
        with bar(console, "timing", len(missing), 0, unit="variants") as update:
            for at, name in enumerate(missing, 1):
                paces[name] = pace(variants[name], data, target)
                update(at)
                write_text(out / PACES, json.dumps(paces, indent=1) + "\n")
        for name, variant in variants.items():
            steps = max(int(config.seconds / paces[name]), 10)
            drafter, facts, held_out = train(name, variant, steps, data, target, console)
            facts["seconds"] = round(steps * paces[name], 1)
            figures = by_task(judge(target, drafter, texts), tasks)
            facts["agreement"] = list(figures[MACRO].agreement)
            for temperature, share in figures[MACRO].acceptance.items():
                facts[f"acceptance_{temperature:g}"] = list(share)
            facts["by_kind"] = {kind: entry.agreement.estimate for kind, entry in figures.items()}
            if variant.shape.reads:
                unroll = Unroll(min(drafts, getattr(drafter.config, "block_size", drafts)))
                facts["by_draft"] = by_draft(dataclasses.replace(variant, unroll=unroll), target, drafter, held_out)
            rows.append({"variant": name, **facts})
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    heads, cells = ["variant", "parameters", "steps", "greedy agreement", "acceptance at 0.7", "at 1.0", "by draft"], []
    for row in rows:  # by draft: agreement of each draft of a round on the text of all writers, if it reads
        shares = [interval(row[key], ".3f", WORDS) for key in ("agreement", "acceptance_0.7", "acceptance_1")]
        shares.append(", ".join(f"{draft['agreement']:.3f}" for draft in row.get("by_draft", ())))
        cells.append([row["variant"], f"{row['parameters'] / 1e6:.1f} M", str(row["steps"]), *shares])
    table = markdown(heads, cells)
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    console.print(Whole(table))
    return rows


def pace(config: DistillConfig, data: ShardFolder, target: LoadedModel) -> float:
    """The median of TIMED steps, seconds, without the first one of each row length, which compiles."""
    (state, _, step, order, _), seconds, shapes = begin(config, target, data), [], set()
    for index in itertools.count():
        batch, began = order.at(index), time.monotonic()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        if batch.tokens.shape in shapes:
            seconds.append(time.monotonic() - began)
        shapes.add(batch.tokens.shape)
        if len(seconds) == TIMED:
            break
    return float(np.median(seconds))


def train(
    name: str, config: DistillConfig, steps: int, data: ShardFolder, target: LoadedModel, console: Console
) -> tuple[LoadedModel, dict[str, Any], Corpus | None]:
    """Trains a variant for so many steps: the drafter, facts of its training, and the text held out."""
    config = dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, steps=steps, warmup=steps // 10))
    state, drafter, step, order, held_out = begin(config, target, data)
    with bar(console, name, steps, 0, unit="steps") as update:
        for at in range(steps):
            state, metrics = step(state, order.at(at))
            jax.block_until_ready(metrics)
            update(at + 1)
    model = as_model(config, target, state, drafter, name)
    facts = {"parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)), "steps": steps}
    facts |= {"positions": steps * config.packing.tokens, "training_acceptance": float(metrics.acceptance)}
    return model, facts, held_out


def held_out_texts(shards: Sequence[Shard], count: int) -> tuple[list[tuple[list[int], list[int]]], list[str]]:
    """(prompt, answer) pairs and their kinds: first answers of conversations, kinds in turn."""
    by_kind: dict[str, list[tuple[list[int], list[int]]]] = {}
    for shard in shards:
        for at, (start, stop) in enumerate(zip(shard.offsets[:-1], shard.offsets[1:], strict=True)):
            answered = np.flatnonzero(shard.writer[start:stop] == BY_ASSISTANT)
            size = int(np.argmax(np.append(np.diff(answered), 2) > 1)) + 1  # the first answer, up to the next turn
            if size >= LEAST:
                first, tokens = int(answered[0]), shard.tokens[start:stop].tolist()
                answer = tokens[first : first + min(size, ANSWER)]
                by_kind.setdefault(shard.kinds[shard.kind[at]], []).append((tokens[:first], answer))
    each = -(-count // len(by_kind))
    picked = [(text, kind) for kind, texts in sorted(by_kind.items()) for text in texts[:each]]
    return [text for text, _ in picked], [kind for _, kind in picked]


main = config_command("distill compare", compare, __doc__)
