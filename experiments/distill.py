"""From a target to a drafter: write data, label it, train, judge and export.

Question:  How good a drafter does this much computing buy, for any target that can be loaded?
Command:   python -m experiments.distill configs/distill_smollm2.py [--stage write|label|train|judge] ...
           python -m experiments.distill configs/distill_smollm2.py --smoke   (all stages on next to nothing)
Time:      the config says, three minutes with --smoke; every stage goes on where it was stopped, however it was stopped
Output:    runs/<name>/ with data/ (token shards), train/ (checkpoints, metrics.jsonl, curve.png), judge/ (answers,
           judgement.json, table.md) and drafter/ (Hugging Face format, with its model card) and drafter-orbax/

Stages run in this order, and one alone with --stage. --intervals.minutes ends a call of training after so long.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from configs.base import load_config, override
from configs.base_distillation import DistillConfig, small
from experiments.lib import distill_judge, distill_train, distill_write
from experiments.lib.commands import config_words, exit_codes, terminal
from specdec_jax.compilation_cache import enable
from specdec_jax.distillation.lock import locked
from specdec_jax.distillation.training import check_rows
from specdec_jax.loading import load_model
from specdec_jax.sharding import use_mesh

SMOKE = "--smoke"
STAGES: dict[str, Callable[..., None]] = {
    "write": distill_write.write,
    "label": distill_write.label,
    "train": distill_train.train,
    "judge": distill_judge.judge_and_export,
}


@exit_codes(FloatingPointError, interrupted="interrupted; the same command goes on")
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the config given first on the command line; 2 on bad input."""
    words = config_words("distill", __doc__, arguments)
    if words:
        stages, rest = _stages(words[1:])
        distill(_config(words[0], rest), stages, terminal())
    return 0


def distill(config: DistillConfig, stages: Sequence[str], console: Console) -> Path:
    """Runs the stages in the config's run folder. Raises ValueError, OSError: bad input, a full disk, a folder in
    use."""
    folder = Path(config.out or f"runs/{config.name}")
    use_mesh(config.mesh)
    if "train" in stages:
        check_rows(config.packing)
    with locked(folder):
        enable()
        with console.status("Loading the target"):
            target = load_model(config.target, dtype=config.dtype)
        for stage in stages:
            STAGES[stage](config, folder, target, console)
    return folder


def _config(path: str, arguments: list[str]) -> DistillConfig:
    """The config, made small by --smoke, with the other arguments over it."""
    config, rest = load_config(path), [argument for argument in arguments if argument != SMOKE]
    if not isinstance(config, DistillConfig):
        raise ValueError(f"the config must be a DistillConfig, got {type(config).__name__}")
    config = small(config) if SMOKE in arguments else config
    return override(config, rest, f"python -m experiments.distill {path}") if rest else config


def _stages(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The stages asked for (all, without --stage), and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stage", action="append", nargs="?", const="", default=[])
    asked, rest = parser.parse_known_args(arguments)
    for stage in asked.stage:
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}; there are {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in asked.stage] or list(STAGES), rest


if __name__ == "__main__":
    sys.exit(main())
