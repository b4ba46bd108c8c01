"""How few bytes can a drafter be stored in before it shows in what is accepted?

Command:   python -m experiments.compare_formats --drafter runs/distill-smollm2/drafter [--kinds BF16 Q8_0 Q4_1]
Time:      3 minutes on 2 cores
Output:    a table: size on disk, greedy agreement and acceptance along the target's answers to the demo prompts
Expected:  docs/distillation.md has the table of the built-in drafter

Every kind is written as a GGUF file and loaded back, so that what is judged is what was stored.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.lib.commands import exit_codes, told
from experiments.lib.distill_judge import task_of
from experiments.lib.prompts import read_prompts
from experiments.lib.terminal import Whole
from specdec_jax.compilation_cache import enable
from specdec_jax.distillation.judging import answers, judge
from specdec_jax.loading import load_model, save_gguf
from specdec_jax.metrics.acceptance import MACRO, by_task
from specdec_jax.text.generation import encode


@dataclass(frozen=True)
class Formats:
    """Judge a drafter in several storage formats."""

    drafter: str = "smollm2-drafter"
    """A built-in name, a folder in Hugging Face format, a .gguf file, or a hub id."""
    target: str = "smollm2"
    """As drafter."""
    kinds: tuple[str, ...] = ("BF16", "Q8_0", "Q5_1", "Q4_1", "Q4_0")
    """GGUF types."""
    prompts: str = "configs/prompts/demo.jsonl"
    """Whose answers are judged along."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""


@exit_codes()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 on bad input."""
    config = told(Formats, __doc__, arguments)
    table = compare(config)
    print(table) if not sys.stdout.isatty() else Console().print(Whole(table))
    return 0


def compare(config: Formats) -> str:
    """A line a kind, answers at temperature 0 and 0.7 together."""
    enable()
    prompts = read_prompts(config.prompts)
    target, drafter = load_model(config.target), load_model(config.drafter, dtype="float32")
    tokens = [encode(target, prompt.turns[0]) for prompt in prompts]
    texts = []
    for temperature in (0.0, 0.7):
        found = answers(target, tokens, max_new_tokens=config.max_new_tokens, warp={"temperature": temperature})
        texts += list(zip(tokens, found, strict=True))
    tasks = [task_of(prompt) for prompt in prompts] * 2
    lines = [
        "| stored as | MB | greedy agreement | acceptance at 0.7 | at 1.0 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for kind in config.kinds:
            path = Path(folder) / f"{kind}.gguf"
            save_gguf(path, drafter.config, drafter.params, drafter.tokenizer, kind=kind)
            whole = by_task(judge(target, load_model(path), texts), tasks)[MACRO]
            cells = [whole.agreement, whole.acceptance[0.7], whole.acceptance[1.0]]
            shown = " | ".join(f"{cell.estimate:.3f}" for cell in cells)
            lines.append(f"| {kind} | {path.stat().st_size / 1e6:.1f} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
