"""How few bytes can a drafter be stored in before it shows in what is accepted?

Command:   python -m experiments.compare_formats --drafter runs/distill-smollm2/drafter [--kinds BF16 Q8_0 Q4_1]
Time:      3 minutes on 2 cores
Output:    a table: size on disk, greedy agreement and acceptance along the target's answers to the demo prompts
Expected:  docs/distillation.md has the table of the built-in drafter

Every kind is written as a GGUF file and loaded back, so that what is judged is what was stored.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.lib.cells import markdown
from experiments.lib.commands import command
from experiments.lib.judged import encoded, figures_along, task_of, written
from experiments.lib.options import Models
from experiments.lib.prompts import read_prompts
from experiments.lib.terminal import Whole
from specdec_jax.compilation_cache import enable
from specdec_jax.contrib.gguf_writer import save_gguf
from specdec_jax.loading import load_model, refuse_encoders
from specdec_jax.metrics.acceptance import MACRO


@dataclass(frozen=True)
class Formats(Models):
    """Judge a drafter in several storage formats."""

    kinds: tuple[str, ...] = ("BF16", "Q8_0", "Q5_1", "Q4_1", "Q4_0")
    """GGUF types."""
    prompts: str = "configs/prompts/demo.jsonl"
    """Whose answers are judged along."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""


def compare_formats(config: Formats, console: Console) -> None:
    """Prints the table, as it is where no terminal reads it; progress is no part of that."""
    table = compare(config, Console(stderr=True))
    print(table) if not sys.stdout.isatty() else console.print(Whole(table))


def compare(config: Formats, console: Console) -> str:
    """A line a kind, answers at temperature 0 and 0.7 together."""
    refuse_encoders("compare_formats", config.target, config.drafter)
    enable()
    prompts = read_prompts(config.prompts)
    target, drafter = load_model(config.target), load_model(config.drafter, dtype="float32")
    tokens = encoded(target, prompts)
    found = [answer for t in (0.0, 0.7) for answer in written(target, tokens, t, config.max_new_tokens, 0, console)]
    tasks = [task_of(prompt) for prompt in prompts] * 2
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in config.kinds:
            path = Path(folder) / f"{kind}.gguf"
            save_gguf(path, drafter.config, drafter.params, drafter.tokenizer, kind=kind)
            whole = figures_along((target, load_model(path)), tokens * 2, found, tasks, kind, console)[MACRO]
            shares = [whole.agreement, whole.acceptance[0.7], whole.acceptance[1.0]]
            cells = [f"{share.estimate:.3f}" for share in shares]
            rows.append([kind, f"{path.stat().st_size / 1e6:.1f}", *cells])
    return markdown(["stored as", "MB", "greedy agreement", "acceptance at 0.7", "at 1.0"], rows)


main = command(Formats, compare_formats, __doc__)

if __name__ == "__main__":
    sys.exit(main())
