"""Which tokens does text use most? The ranking that `DRAFTER@8192` reads its draft vocabulary from.

Command:   python -m experiments.distill rank_tokens --data runs/distill-smollm2/data --out DRAFTER_FOLDER
           python -m experiments.distill rank_tokens --model org/name --texts mine.jsonl --out DRAFTER_FOLDER
Time:      seconds
Output:    token_ranking.npy in --out, beside the drafter's weights; prints how much of the text each size covers

`--data` is what `experiments.distill` wrote: the target's answers count, and its other tokens where answers tie;
`--texts` is a .jsonl with `text` in every line, or a run's results.jsonl. The built-in drafters have theirs from the
first command. Counts stand for how often a drafter would have to propose a token, so use text like that of serving.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console

from experiments.lib.commands import command
from specdec_jax.distillation.prompts import read_texts
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.distillation.writing import BY_ASSISTANT
from specdec_jax.loading import load_model
from specdec_jax.loading.draft_vocabulary import RANKING
from specdec_jax.loading.new_folder import replacing
from specdec_jax.ranges import Between, check_fields

SIZES = (1024, 2048, 4096, 8192, 12288, 16384, 32768)


@dataclass(frozen=True)
class RankTokens:
    """Rank the tokens of a text by how often they occur."""

    out: Path  # Folder of the drafter's weights.
    data: Path | None = None  # Token shards of experiments.distill.
    texts: Path | None = None  # A .jsonl file with `text` in every line; needs --model.
    model: str = "smollm2"  # Whose tokenizer reads the texts; --data are tokens already.
    most: Annotated[int, Between(1)] = 16384  # Tokens to keep.


def rank_tokens(config: RankTokens, console: Console) -> None:
    """Counts and writes. Raises ValueError, FileNotFoundError for invalid input."""
    counts = count(config)
    ranked = rank(counts)[: config.most]
    config.out.mkdir(parents=True, exist_ok=True)
    with replacing(config.out / RANKING) as path:
        np.save(path, ranked)
    covered = np.cumsum(counts[ranked, 0]) / counts[:, 0].sum()
    for size in [size for size in SIZES if size < len(ranked)] + [len(ranked)]:
        console.print(f"{size:6,} tokens cover {covered[size - 1]:.1%}")
    console.print(f"Written to {config.out / RANKING}", soft_wrap=True)


def count(config: RankTokens) -> np.ndarray:
    """[V, 2]: how often each token stands in answers, and anywhere. Raises ValueError, FileNotFoundError."""
    check_fields(config)
    if (config.data is None) == (config.texts is None):
        raise ValueError("give either --data or --texts")
    if config.data is not None:
        if not config.data.is_dir():
            raise FileNotFoundError(f"no folder of token shards at {config.data}")
        pairs = [(shard.tokens, shard.writer == BY_ASSISTANT) for shard in ShardFolder(config.data)]
        size = max((int(tokens.max()) + 1 for tokens, _ in pairs if len(tokens)), default=1)
        counts = np.zeros((size, 2), np.int64)
        for tokens, answer in pairs:
            counts[:, 0] += np.bincount(tokens[answer], minlength=size)
            counts[:, 1] += np.bincount(tokens, minlength=size)
        return counts
    tokenizer = load_model(config.model).tokenizer
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for text in read_texts(str(config.texts)):
        tokens = [*tokenizer.encode(text), *tokenizer.eos_ids]  # the end of an answer can be proposed
        counts += np.bincount(tokens, minlength=len(counts))
    return np.stack([counts, counts], axis=1)


def rank(counts: np.ndarray) -> np.ndarray:
    """Tokens seen, by counts [V, 2]; the second column decides ties. Raises ValueError where nothing was counted."""
    order = np.lexsort((-counts[:, 1], -counts[:, 0]))
    seen = order[counts[order].sum(axis=1) > 0]
    if not counts[:, 0].sum():
        raise ValueError("there are no tokens to count")
    return seen.astype(np.uint16 if len(counts) <= 2**16 else np.int32)


main = command(RankTokens, rank_tokens, __doc__, "python -m experiments.distill rank_tokens")
