"""What do a model's weights in fewer bits change, and how much memory do they save?

Question:  Of a model with its weights in several dtypes: how far are the next distributions from those of the first
           dtype, and how much memory do the weights take? (step_cost --dtypes bfloat16 int8: how long is a pass?)
Command:   python -m experiments.step_cost precision [--target smollm2] [--dtypes bfloat16 int8 float32]
Time:      5 minutes on 2 cores; seconds with --smoke (a tiny random model)
Expected:  SmolLM2's weights take 135.4 MB in int8, 269.0 MB in bfloat16; other figures in docs/models.md
Output:    runs/precision-<time>/ with manifest.json, results.jsonl (a line a dtype) and table.md

Distributions are compared along prompts and the answers that the first dtype writes to them greedily, at the positions
of the answers. All dtypes are in memory at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from experiments.lib.commands import Output, Smoke, command
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import tiny_pair
from experiments.lib.tables import NONE, WORDS, interval, markdown, publish
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.machine import device
from specdec_jax.loading import LoadedModel, load_model, refuse_encoders
from specdec_jax.loading.precision import precision
from specdec_jax.meshes import bytes_here
from specdec_jax.metrics.agreement import changes_along
from specdec_jax.metrics.intervals import mean_interval
from specdec_jax.metrics.judging import answers
from specdec_jax.ranges import check_fields
from specdec_jax.text.generation import encode
from specdec_jax.text.sampling_params import NewTokens

TINY: dict[str, Any] = {"target": "tiny", "max_new_tokens": 8, "limit": 2}


@dataclass(frozen=True)
class PrecisionStudy(Output, Smoke):
    """Compare a model's dtypes."""

    target: str = "smollm2"
    """A built-in name, a folder in Hugging Face format, a .gguf file, or a hub id (org/name, org/name@revision)."""
    dtypes: tuple[str, ...] = ("bfloat16", "int8", "float32")
    """Dtypes of the weights; the others are compared with the first."""
    prompts: str = "configs/prompts/demo.jsonl"  # A JSONL file, FILE:n for every n-th prompt, or hub:NAME.
    limit: int | None = None  # Only the first prompts.
    max_new_tokens: NewTokens = 128  # Most tokens of an answer.
    mesh: str | None = None  # Several devices, such as model=4, that share the weights.

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.dtypes)) < max(2, len(self.dtypes)):
            raise ValueError(f"there must be two dtypes or more, each once, got {self.dtypes}")
        for dtype in self.dtypes:
            precision(dtype)


def study(config: PrecisionStudy, console: Console) -> None:
    """Measures and writes the run folder."""
    config = replace(config, **TINY) if config.smoke else config
    prompts = load_prompts(config.prompts, config.limit)
    if not config.smoke:
        refuse_encoders("precision", config.target)
    folder = RunFolder.create("precision", config, config.out)
    if not folder.rows():
        enable()
        with console.status("Loading the model in every dtype"):
            models = {
                dtype: tiny_pair(dtype)[0] if config.smoke else load_model(config.target, dtype=dtype)
                for dtype in config.dtypes
            }
        first = models[config.dtypes[0]]
        tokens = [encode(first, prompt.turns[0]) for prompt in prompts]
        with console.status("Writing the answers"):
            texts = answers(first, tokens, max_new_tokens=config.max_new_tokens, warp={"temperature": 0.0})
        with console.status("Comparing distributions"):
            texts = list(zip(tokens, texts, strict=True))
            changes = {dtype: compared(first, model, texts) for dtype, model in models.items()}
        for dtype, model in models.items():
            row = {"dtype": dtype, "device": device(), "bytes": bytes_here(model.params), "texts": len(prompts)}
            folder.append(row | changes[dtype])
    rows, lines, reference = folder.rows(), [], config.dtypes[0]
    for row in rows:
        cells = [interval(row["divergence"], ".5f", WORDS), interval(row["same_top"], ".2%", WORDS)]
        cells += [interval(row["mean_change"], ".3f", WORDS), f"{row['largest_change']:.2f}"]
        cells = cells if row["dtype"] != reference else [NONE] * 4
        lines.append([row["dtype"], f"{row['bytes'] / 1e6:.1f}", *cells])
    about = (
        f"{config.target} on {rows[0]['device']}: against {reference} along {rows[0]['tokens']:,} tokens of answers to "
        f"{rows[0]['texts']} prompts (means over prompts, 95 %)."
    )
    heads = ["weights", "MB", f"KL divergence from {reference}, nats a token", "same most probable token"]
    changed = markdown([*heads, "change of a logit, mean", "largest"], lines)
    publish(folder, f"{about}\n\n{changed}\n", console)


def compared(first: LoadedModel, other: LoadedModel, texts: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Means over texts (prompt, answer) of what `changes_along` gives along the answers, and the largest change."""
    means, largest = [], 0.0
    for prompt, answer in texts:
        if answer:
            changes = changes_along((first.model, other.model), (first.params, other.params), [*prompt, *answer])
            along = [values[len(prompt) - 1 :] for values in changes]
            means.append([float(np.mean(values)) for values in along[:3]])
            largest = max(largest, float(along[3].max()))
    names = "divergence", "same_top", "mean_change"
    figures = {name: list(mean_interval(values)) for name, values in zip(names, np.transpose(means), strict=True)}
    return figures | {"largest_change": largest, "tokens": sum(len(answer) for _, answer in texts)}


main = command(PrecisionStudy, study, __doc__, "python -m experiments.step_cost precision")
