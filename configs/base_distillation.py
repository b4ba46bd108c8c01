"""The config of a distillation. `configs/distill_smollm2.py` is one; copy it for your own target."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tyro

from specdec_jax.distillation.batches import Packing
from specdec_jax.distillation.conversations import Pool, Temperatures
from specdec_jax.distillation.initial import Shape
from specdec_jax.distillation.loop import Intervals
from specdec_jax.distillation.losses import forward_kl
from specdec_jax.distillation.training import Schedule
from specdec_jax.distillation.unrolled import Unroll
from specdec_jax.strategy import nearest

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class DistillConfig:
    """A drafter from a target: what is written, how it is trained, on what it is judged. Raises ValueError."""

    name: str
    """Names the run folder and the drafter."""
    schedule: Schedule
    """Steps, learning rate, decay."""
    target: str = "smollm2"
    """A built-in name, a folder in Hugging Face format, a .gguf file, or a hub id (org/name, org/name@revision)."""
    tokens: int = 2_000_000
    """Written at least."""
    texts: str = "runs/texts"
    """A folder of .jsonl files, a `text` in every line: documents.jsonl, and a file for each further pool of the
    openings (german.jsonl). Without it, documents are the descriptions of installed packages."""
    prompts: tuple[str, ...] = ()
    """JSONL files of whole prompts to answer as well; one in three requests is then one of them."""
    held_out: tuple[str, ...] = ("configs/prompts/demo.jsonl",)
    """JSONL files of prompts that nothing written may share eight words in a row with."""
    openings: str = "configs/prompts/openings.json"
    """What requests look like: kinds, their first words, and what stands for a name in braces."""
    short: Pool = Pool(96, 448, 1024)  # noqa: RUF009 - frozen
    """Rows of most kinds."""
    long: Pool = Pool(48, 896, 1536)  # noqa: RUF009 - frozen
    """Rows of the kinds that start from a document."""
    cycle: tuple[str, ...] = ("short", "long", "short", "long", "short")
    """Which rows the blocks use, in turn."""
    temperatures: Temperatures = Temperatures()  # noqa: RUF009 - frozen
    """What the target writes at."""
    labels: int = 16
    """Log-probabilities stored per position; 0: none, and every training step runs the target for its distributions
    and hidden states, which suits a GPU. Then packing.candidates must be 0 (the whole vocabulary)."""
    label_dtype: str = "float16"
    """Theirs: float16 or float32."""
    hidden_layers: tuple[int, ...] = ()
    """The target's layers whose hidden states are stored with every token, for a drafter that reads them: i is what the
    i-th layer leaves, 0 the embedding."""
    shape: Shape = Shape()  # noqa: RUF009 - frozen
    """The drafter's size and what it starts from."""
    start_from: str | None = None
    """An exported drafter to go on from, with a fresh optimiser."""
    packing: Packing = Packing()  # noqa: RUF009 - frozen
    """Rows and weights of a batch."""
    unroll: Unroll = Unroll()  # noqa: RUF009 - frozen
    """How a drafter that reads its target is trained on its own states."""
    loss: tyro.conf.Suppress[tyro.conf.Fixed[Callable[..., Any]]] = forward_kl
    """Set in the file."""
    intervals: Intervals = Intervals()  # noqa: RUF009 - frozen
    """How often training writes."""
    chunk: int = 256
    """Positions of the loss at once."""
    validation: int = 2
    """Shards, the first ones, that are not trained on."""
    judge: tuple[str, ...] = ("configs/prompts/demo.jsonl",)
    """JSONL files of prompts along whose answers the drafter is judged, FILE:4 for every fourth of them; `category`
    names the task."""
    judge_tokens: int = 128
    """Most tokens of an answer."""
    judge_temperatures: tuple[float, ...] = (0.0, 0.7)
    """Temperatures of the answers."""
    dtype: str = "bfloat16"
    """Dtype of matrix products: bfloat16 or float32. Master weights are float32."""
    seed: int = 0
    """Seed of everything."""
    mesh: str | None = None
    """Devices, as data=4,model=2: rows of what is written, labelled and trained on are divided over data, the target's
    weights over model, which training leaves idle. None: the first device."""
    out: str | None = None
    """Run folder; none: runs/<name>."""

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("labels", 0), ("chunk", 1), ("validation", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)!r}")
        if self.judge_tokens < 1:
            raise ValueError(f"judge_tokens must be 1 or more, got {self.judge_tokens!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}{nearest(self.dtype, DTYPES)}")
        if self.label_dtype not in ("float16", "float32"):
            raise ValueError(f"label_dtype is float16 or float32, got {self.label_dtype!r}")
        if not self.cycle or any(entry not in ("short", "long") for entry in self.cycle):
            raise ValueError(f"cycle is made of 'short' and 'long', got {self.cycle!r}")
        if not self.labels and (self.packing.candidates or self.hidden_layers):
            stored = "packing.candidates to 0" if self.packing.candidates else "hidden_layers to ()"
            raise ValueError(f"without labels (labels=0) training runs the target: set {stored}")
        if self.packing.tokens % self.chunk:
            fits = max(n for n in range(1, self.chunk + 1) if self.packing.tokens % n == 0)
            raise ValueError(
                f"chunk ({self.chunk}) must divide the tokens of a batch ({self.packing.tokens}): set chunk to {fits}"
            )
        if max(self.short.slots, self.long.slots) > self.packing.slots[-1]:
            raise ValueError(
                f"rows of {max(self.short.slots, self.long.slots)} do not fit packing.slots {self.packing.slots}: "
                f"end packing.slots with that, or set short.slots and long.slots to at most {self.packing.slots[-1]}"
            )
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name goes into a folder's name: letters, digits, '_', '-' and '.', got {self.name!r}")


def small(config: DistillConfig) -> DistillConfig:
    """The same stages on next to nothing, to see them work: minutes on two CPU cores, and a drafter of no use.

    The target, the drafter's shape, its loss and what is asked stay; a run folder of its own keeps both apart.
    """
    judged = config.judge[0].rpartition(":") if config.judge else ("", "", "")
    return dataclasses.replace(
        config,
        name=f"{config.name}-smoke",
        tokens=2500,
        short=Pool(16, 192, 96),
        long=Pool(16, 192, 96),
        cycle=("short",),
        packing=dataclasses.replace(config.packing, slots=(192,), tokens=768),
        schedule=dataclasses.replace(config.schedule, steps=10, warmup=1, accumulate=1),
        intervals=dataclasses.replace(config.intervals, save_every=5, log_every=5),
        chunk=256,
        validation=1,
        judge=(f"{judged[0] if judged[2].isdigit() else config.judge[0]}:6",) if config.judge else (),
        judge_tokens=16,
        judge_temperatures=(0.0,),
    )
