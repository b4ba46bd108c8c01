"""From a target to a drafter: write data, label it, train, judge and export.

Question:  How good a drafter does this much computing buy, for any target that can be loaded?
Command:   python -m experiments.distill configs/distill_smollm2.py [--stage write|label|train|judge] ...
           python -m experiments.distill configs/distill_smollm2.py --smoke   (all stages on next to nothing)
           python -m experiments.distill judge|rank_tokens ...   (--help says what each is for)
Time:      the config says, three minutes with --smoke; every stage goes on where it was stopped, however it was stopped
Output:    runs/<name>/ with data/ (token shards), train/ (checkpoints, metrics.jsonl, curve.png), judge/ (answers,
           judgement.json, table.md) and drafter/ (Hugging Face format, with its model card) and drafter-orbax/

Stages run in this order, and one alone with --stage. --intervals.minutes ends a call of training after so long. `judge`
judges any drafter along the target's answers, `rank_tokens` writes the ranking that a draft vocabulary is read from.
With --distributed the processes of a launch (docs/scaling.md) share the work: each writes and labels blocks of its own,
all train together, and the first judges.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from rich.console import Console

from configs.base import load_config, override
from configs.base_distillation import DistillConfig, small
from experiments.lib import distill_judge, distill_train
from experiments.lib.commands import command, config_words, exit_codes, terminal, with_studies
from specdec_jax.compilation_cache import enable
from specdec_jax.distillation.initial import drafter_config
from specdec_jax.distillation.prompts import read_texts
from specdec_jax.distillation.shards import ShardFolder
from specdec_jax.distillation.training import check_rows, stack
from specdec_jax.distillation.writing import BY_ASSISTANT
from specdec_jax.loading import download, load_model, refuse_encoders
from specdec_jax.loading.draft_vocabulary import RANKING
from specdec_jax.loading.new_folder import replacing
from specdec_jax.locks import locked
from specdec_jax.meshes import make_spanning_mesh, use_mesh
from specdec_jax.processes import Share, join, watch_others
from specdec_jax.ranges import Between, check_fields

SMOKE = "--smoke"
DISTRIBUTED = "--distributed"
STAGES: dict[str, Callable[..., None]] = {
    "write": distill_train.write,
    "label": distill_train.label,
    "train": distill_train.train,
    "judge": distill_judge.judge_and_export,
}


@exit_codes(FloatingPointError, interrupted="interrupted; the same command goes on")
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the config given first on the command line; 2 on invalid input."""
    words = config_words("distill", __doc__, arguments)
    if words:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--stage", action="append", nargs="?", const="", default=[])
        options, rest = parser.parse_known_args(words[1:])
        for stage in options.stage:
            if stage not in STAGES:
                raise ValueError(f"unknown stage {stage!r}; there are {', '.join(STAGES)}")
        stages = [stage for stage in STAGES if stage in options.stage] or list(STAGES)
        share = join() if DISTRIBUTED in rest else None  # first of all: JAX's devices are those of all
        console = terminal() if share is None or share.index == 0 else Console(quiet=True)
        config = load_config(words[0], (), "distill")
        config = small(config) if SMOKE in rest else config
        rest = [word for word in rest if word not in (SMOKE, DISTRIBUTED)]
        distill(override(config, rest, f"python -m experiments.distill {words[0]}"), stages, console, share)
    return 0


def distill(config: DistillConfig, stages: Sequence[str], console: Console, share: Share | None = None) -> Path:
    """Runs the stages in the config's run folder; `share`: with the other processes of a launch. Raises ValueError,
    OSError for invalid input, a full disk or a folder in use."""
    if share and not config.labels and "train" in stages:
        raise ValueError("with --distributed, training uses stored labels: labels must be more than 0")
    folder = Path(config.out or f"runs/{config.name}")
    refuse_encoders("distillation", config.target)
    use_mesh(config.mesh)
    with _training_mesh(config, share):
        if "train" in stages:
            check_rows(config.packing)
    first = share is None or share.index == 0
    with locked(folder) if first else nullcontext():
        with watch_others(folder, share) if share else nullcontext():
            enable()
            download(config.target)
            with console.status("Loading the target"):
                target = load_model(config.target, dtype=config.dtype)
            if "train" in stages and config.start_from is None:  # refuses what cannot be trained
                stack(drafter_config(config.shape, target.config), config.dtype)
            for stage in stages if share is None else [stage for stage in stages if stage != "judge"]:
                with _training_mesh(config, share if stage == "train" else None):
                    STAGES[stage](config, folder, target, console)
        if share and first and "judge" in stages:
            STAGES["judge"](config, folder, target, console)
    return folder


def _training_mesh(config: DistillConfig, share: Share | None) -> AbstractContextManager[Any]:
    """The devices of all processes, where there are several."""
    return nullcontext() if share is None else jax.set_mesh(make_spanning_mesh(config.mesh))


RANK_TOKENS = """Which tokens does text use most? The ranking that `DRAFTER@8192` reads its draft vocabulary from.

Command:   python -m experiments.distill rank_tokens --data runs/distill-smollm2/data --out DRAFTER_FOLDER
           python -m experiments.distill rank_tokens --model org/name --texts mine.jsonl --out DRAFTER_FOLDER
Time:      seconds
Output:    token_ranking.npy in --out, beside the drafter's weights; prints how much of the text each size covers

`--data` is what `experiments.distill` wrote: the target's answers count, and its other tokens where answers tie;
`--texts` is a .jsonl with `text` in every line, or a run's results.jsonl. The built-in drafters have theirs from the
first command. Counts stand for how often a drafter would have to propose a token, so use text like that of serving.
"""
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
    check_fields(config)
    if (config.data is None) == (config.texts is None):
        raise ValueError("give either --data or --texts")
    if config.data is not None and not config.data.is_dir():
        raise FileNotFoundError(f"no folder of token shards at {config.data}")
    if config.data is not None:
        pairs = [(shard.tokens, shard.writer == BY_ASSISTANT) for shard in ShardFolder(config.data)]
        size = max((int(tokens.max()) + 1 for tokens, _ in pairs if len(tokens)), default=1)
    else:
        tokenizer = load_model(config.model).tokenizer
        size = tokenizer.vocab_size
        ends = tokenizer.eos_ids  # the end of an answer can be proposed
        each = [np.array([*tokenizer.encode(text), *ends], int) for text in read_texts(str(config.texts))]
        pairs = [(tokens, np.ones(len(tokens), bool)) for tokens in each]
    counts = np.zeros((size, 2), np.int64)  # how often each token stands in answers, and anywhere
    for tokens, answer in pairs:
        counts[:, 0] += np.bincount(tokens[answer], minlength=size)
        counts[:, 1] += np.bincount(tokens, minlength=size)
    ranked = rank(counts)[: config.most]
    config.out.mkdir(parents=True, exist_ok=True)
    with replacing(config.out / RANKING) as path:
        np.save(path, ranked)
    covered = np.cumsum(counts[ranked, 0]) / counts[:, 0].sum()
    for size in [size for size in SIZES if size < len(ranked)] + [len(ranked)]:
        console.print(f"{size:6,} tokens cover {covered[size - 1]:.1%}")
    console.print(f"Written to {config.out / RANKING}", soft_wrap=True)


def rank(counts: np.ndarray) -> np.ndarray:
    """Tokens seen, by counts [V, 2]; the second column decides ties. Raises ValueError where nothing was counted."""
    order = np.lexsort((-counts[:, 1], -counts[:, 0]))
    seen = order[counts[order].sum(axis=1) > 0]
    if not counts[:, 0].sum():
        raise ValueError("there are no tokens to count")
    return seen.astype(np.uint16 if len(counts) <= 2**16 else np.int32)


ranks = command(RankTokens, rank_tokens, RANK_TOKENS, "python -m experiments.distill rank_tokens")
main = with_studies(main, judge=distill_judge.main, rank_tokens=ranks)

if __name__ == "__main__":
    raise SystemExit(main())
