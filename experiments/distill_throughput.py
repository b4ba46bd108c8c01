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
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from configs.base import load_config
from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.distill_train import begin, timed_steps
from experiments.lib.distill_write import DOCUMENTS, read_requests
from experiments.lib.options import Output
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish
from specdec_jax.distillation.batches import Corpus
from specdec_jax.distillation.conversations import Author, Pool
from specdec_jax.distillation.labelling import build_labeller
from specdec_jax.distillation.prompts import HeldOut, RequestSource
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.loading import LoadedModel, load_model, refuse_encoders
from specdec_jax.sharding import use_mesh

SIDE = 2048  # of the square matrices whose product is the limit


@dataclass(frozen=True)
class Throughput(Output):
    """Measure the stages of a distillation."""

    config: str = "configs/distill_smollm2.py"
    """Whose target, rows and drafter."""
    data: str = "runs/distill-smollm2/data"
    """Shards to label and train on; without them, what is written here."""
    only: tuple[str, ...] = ()
    """write, label, train; none: all."""
    steps: int = 12
    """Timed steps of training, and calls of the others."""


def throughput(asked: Throughput, console: Console) -> None:
    """Measures and writes the run folder."""
    wrong = [part for part in asked.only if part not in PARTS]
    if wrong:
        raise ValueError(f"unknown part {wrong[0]!r}; there are {', '.join(PARTS)}")
    config = load_config(asked.config)
    refuse_encoders("distill_throughput", config.target)
    folder = RunFolder.create("distill_throughput", asked, asked.out)
    use_mesh(config.mesh)
    target = load_model(config.target, dtype=config.dtype)
    publish(folder, report(measure(asked, config, target)), console)


def measure(asked: Throughput, config: Any, target: LoadedModel) -> list[dict[str, Any]]:
    """A row a part: tokens/s (median and quartiles), arithmetic a token, the limit."""
    limit = arithmetic_limit()
    data = ShardFolder(asked.data)
    shard = data.load(0) if data.entries else _write_some(config, target)
    rows = []
    for part in asked.only or PARTS:
        rates, flops = PARTS[part](config, target, shard, asked.steps)
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
    heads = ["stage", "tokens/s (quartiles)", "GFLOP a token", "GFLOP/s", "of the limit", "most memory so far, GiB"]
    lines = []
    for row in rows:
        low, middle, high = np.quantile(row["rates"], (0.25, 0.5, 0.75))
        speed = middle * row["flops"]
        cells = [f"{middle:,.0f} ({low:,.0f} to {high:,.0f})", f"{row['flops'] / 1e9:.3f}", f"{speed / 1e9:,.0f}"]
        lines.append([row["part"], *cells, f"{speed / row['limit']:.0%}", f"{row['memory']:.1f}"])
    limit = f"Limit: {rows[0]['limit'] / 1e9:,.0f} GFLOP/s, a bfloat16 product of {SIDE} by {SIDE}."
    return f"{markdown(heads, lines)}\n\n{limit}\n"


def _writing(config: Any, target: LoadedModel, shard: Shard, calls: int) -> tuple[list[float], float]:
    """Tokens/s of calls of the writer on short rows, after the one that compiles, and arithmetic a token."""
    times: list[float] = []
    pool = Pool(config.short.batch, config.short.slots, 32 * (calls + 1))
    _author(config, target).block(0, pool, long=False, progress=lambda *_: times.append(time.monotonic()))
    return [32 * pool.batch / seconds for seconds in np.diff(times)], 2.0 * _size(target.params)


def _labelling(config: Any, target: LoadedModel, shard: Shard, calls: int) -> tuple[list[float], float]:
    """The same of calls of the labeller."""
    label = build_labeller(target.model, config.labels)
    texts = [text.astype(np.int32) for text in np.split(shard.tokens, shard.offsets[1:-1])]
    texts = [text for text in texts if 256 < len(text) <= 448][:8]
    if not texts:
        raise ValueError("labelling is measured on texts of 257 to 448 tokens, and the shard has none")
    tokens = sum(map(len, texts))
    label(target.params, texts)
    times = _seconds(lambda: label(target.params, texts), calls)
    return [tokens / seconds for seconds in times], 2.0 * _size(target.params)


def _training(config: Any, target: LoadedModel, shard: Shard, steps: int) -> tuple[list[float], float]:
    """The same of training steps, of positions."""
    begun = begin(config, target, Corpus([shard], target.model.spec.vocab_size))
    drafter = begun.drafter
    body = _size(begun.state.params) - drafter.vocab_size * drafter.hidden_size
    columns = config.packing.candidates or drafter.vocab_size
    rates = [batch.tokens.size / seconds for batch, seconds in timed_steps(begun, steps)]
    return rates, 6.0 * (body + columns * drafter.hidden_size)


PARTS = {"write": _writing, "label": _labelling, "train": _training}


def _size(params: Any) -> int:
    """Weights; tied: the head is the embedding, met once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _write_some(config: Any, target: LoadedModel) -> Shard:
    return _author(config, target).block(0, Pool(16, config.short.slots, config.short.slots), long=False)[0]


def _author(config: Any, target: LoadedModel) -> Author:
    openings, pools = read_requests(config)
    source = RequestSource(openings, pools, pools[DOCUMENTS])
    return Author(target.model, target.params, target.tokenizer, source, HeldOut(()), labels=config.labels)


def _seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Of each call, after one that is not timed."""
    return timeit.repeat(lambda: jax.block_until_ready(call()), number=1, repeat=repeats + 1)[1:]


main = command(Throughput, throughput, __doc__)

if __name__ == "__main__":
    sys.exit(main())
