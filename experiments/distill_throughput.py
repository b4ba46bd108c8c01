"""How fast are data written, labelled and trained on, and what share of the machine's arithmetic is that?

Question:  Is a distillation bound by arithmetic here, or is something wasted?
Command:   python -m experiments.distill_throughput [--data runs/distill-smollm2/data] [--only train]
Time:      3 minutes on 2 cores
Output:    runs/distill_throughput-<time>/ with manifest.json, table.md
Expected:  docs/performance.md has the table of the machine it was run on

The limit is the best of a large bfloat16 product on the same devices, measured in the same run. Arithmetic of a token:
twice the weights it meets in a forward pass, six times in a training step (attention over the context is left out, so
the share is a lower bound). --only one of them, in a process of its own, says its memory.
"""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from configs.base import load_config
from experiments.lib.commands import exit_codes, told
from experiments.lib.distill_train import initial_state
from experiments.lib.distill_write import DOCUMENTS, read_requests
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import Whole
from specdec_jax.distillation.batches import BatchOrder, Corpus
from specdec_jax.distillation.conversations import Author, Pool
from specdec_jax.distillation.labelling import build_labeller
from specdec_jax.distillation.prompts import HeldOut, RequestSource
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.distillation.training import build_step
from specdec_jax.loading import LoadedModel, load_model

PARTS = ("write", "label", "train")
SIDE = 2048  # of the square matrices whose product is the limit


@dataclass(frozen=True)
class Throughput:
    """Measure the stages of a distillation."""

    config: str = "configs/distill_smollm2.py"
    """Whose target, rows and drafter."""
    data: str = "runs/distill-smollm2/data"
    """Shards to label and train on; without them, what is written here."""
    only: tuple[str, ...] = ()
    """write, label, train; none: all."""
    steps: int = 12
    """Timed steps of training, and calls of the others."""
    out: str | None = None
    """Run folder; none: runs/distill_throughput-<time>."""


@exit_codes()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the measurement; 2 on bad input."""
    asked = told(Throughput, __doc__, arguments)
    wrong = [part for part in asked.only if part not in PARTS]
    if wrong:
        raise ValueError(f"unknown part {wrong[0]!r}; there are {', '.join(PARTS)}")
    config = load_config(asked.config)
    folder = RunFolder.create("distill_throughput", asked, asked.out)
    target = load_model(config.target, dtype=config.dtype)
    rows = measure(asked, config, target)
    table = report(rows)
    folder.write_text("table.md", table + "\n")
    Console().print(Whole(table))
    return 0


def measure(told: Throughput, config: Any, target: LoadedModel) -> list[dict[str, Any]]:
    """A row a part: tokens/s (median and quartiles), arithmetic a token, the limit."""
    parts = told.only or PARTS
    limit = arithmetic_limit()
    data = ShardFolder(told.data)
    size = sum(leaf.size for leaf in jax.tree.leaves(target.params))  # tied: the head is the embedding, met once
    shard = data.load(0) if data.entries else _write_some(config, target)
    rows = []
    for part in parts:
        if part == "write":
            rates, flops = _writing(config, target, told.steps), 2 * size
        elif part == "label":
            rates, flops = _labelling(config, target, shard, told.steps), 2 * size
        else:
            rates, flops = _training(config, target, [shard], told.steps)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append({"part": part, "rates": rates, "flops": flops, "limit": limit, "memory": memory})
    return rows


def arithmetic_limit() -> float:
    """Operations a second of a large bfloat16 product, the best of ten."""
    left = jnp.ones((SIDE, SIDE), jnp.bfloat16)
    product = jax.jit(lambda a, b: jnp.matmul(a, b.T, preferred_element_type=jnp.float32))
    return 2 * SIDE**3 / min(_seconds(lambda: product(left, left), 10))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A line a part."""
    lines = ["| stage | tokens/s (quartiles) | GFLOP a token | GFLOP/s | of the limit | most memory so far, GiB |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        low, middle, high = np.quantile(row["rates"], (0.25, 0.5, 0.75))
        speed = middle * row["flops"]
        cells = [f"{middle:,.0f} ({low:,.0f} to {high:,.0f})", f"{row['flops'] / 1e9:.3f}", f"{speed / 1e9:,.0f}"]
        lines.append(f"| {row['part']} | {' | '.join(cells)} | {speed / row['limit']:.0%} | {row['memory']:.1f} |")
    lines += ["", f"Limit: {rows[0]['limit'] / 1e9:,.0f} GFLOP/s, a bfloat16 product of {SIDE} by {SIDE}."]
    return "\n".join(lines)


def _writing(config: Any, target: LoadedModel, calls: int) -> list[float]:
    """Tokens/s of calls of the writer on short rows, after the one that compiles."""
    times: list[float] = []
    pool = Pool(config.short.batch, config.short.slots, 32 * (calls + 1))
    _author(config, target).block(0, pool, long=False, progress=lambda *_: times.append(time.monotonic()))
    return [32 * pool.batch / seconds for seconds in np.diff(times)]


def _labelling(config: Any, target: LoadedModel, shard: Shard, calls: int) -> list[float]:
    label = build_labeller(target.model, config.labels)
    texts = [text.astype(np.int32) for text in np.split(shard.tokens, shard.offsets[1:-1])]
    texts = [text for text in texts if 256 < len(text) <= 448][:8]
    if not texts:
        raise ValueError("labelling is measured on texts of 257 to 448 tokens, and the shard has none")
    tokens = sum(map(len, texts))
    label(target.params, texts)
    return [tokens / seconds for seconds in _seconds(lambda: label(target.params, texts), calls)]


def _training(config: Any, target: LoadedModel, shards: list[Shard], steps: int) -> tuple[list[float], float]:
    """(positions/s, arithmetic a position) of training steps."""
    corpus = Corpus(shards, target.model.spec.vocab_size)
    order = BatchOrder(corpus, config.packing, 0)
    state, drafter = initial_state(config, target, corpus.counts)
    step = build_step(drafter, config.schedule, config.loss, dtype=config.dtype, chunk=config.chunk)
    whole = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    body = whole - drafter.vocab_size * drafter.hidden_size
    columns = config.packing.candidates or drafter.vocab_size
    rates, known = [], set()
    for at in range(steps + 8):
        batch = order.at(at)
        began = time.monotonic()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        if batch.tokens.shape in known:
            rates.append(batch.tokens.size / (time.monotonic() - began))
        known.add(batch.tokens.shape)
    return rates, 6.0 * (body + columns * drafter.hidden_size)


def _write_some(config: Any, target: LoadedModel) -> Shard:
    return _author(config, target).block(0, Pool(16, config.short.slots, config.short.slots), long=False)[0]


def _author(config: Any, target: LoadedModel) -> Author:
    openings, pools = read_requests(config)
    source = RequestSource(openings, pools, pools[DOCUMENTS])
    return Author(target.model, target.params, target.tokenizer, source, HeldOut(()), labels=config.labels)


def _seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.monotonic()
        jax.block_until_ready(call())
        times.append(time.monotonic() - began)
    return times


if __name__ == "__main__":
    sys.exit(main())
