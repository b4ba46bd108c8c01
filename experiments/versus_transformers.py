"""Is plain decoding here at least as fast as transformers on torch, with the same weights, dtype and machine?

Question:  tokens/s of plain greedy decoding: this project's program against `AutoModelForCausalLM.generate`
Command:   python -m experiments.versus_transformers --torch-python PATH/TO/python
           where that interpreter has torch and transformers (torch is no requirement here)
Time:      3 minutes on 2 cores
Expected:  docs/performance.md has the figures of the machines it was run on
Output:    runs/versus_transformers-<time>/ with manifest.json and table.md

Each side lives in a process of its own, and the two take turns: one generation here, one there, --repeats times. Ratios
are of neighbours in time, so that a busy machine slows both.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console

from experiments.lib.cells import PARENTHESES, interval, markdown
from experiments.lib.commands import command
from experiments.lib.options import Output
from experiments.lib.run_folder import RunFolder
from experiments.lib.step_checks import PROMPT
from experiments.lib.terminal import publish
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.step_cost import summary
from specdec_jax.loading import save_hf_folder
from specdec_jax.text.generation import Pair, Request, build_pair, decode, prepare
from specdec_jax.text.sampling_params import SamplingParams

TORCH_SIDE = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
path, dtype, new, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
ids = torch.tensor([json.loads(sys.stdin.readline())])
print("ready", flush=True)
for _ in sys.stdin:
    watch = time.perf_counter()
    with torch.inference_mode():
        limits = {"max_new_tokens": new, "min_new_tokens": new}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
    print(json.dumps([out.shape[1] - ids.shape[1], time.perf_counter() - watch]), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Versus(Output):
    """Plain decoding here against transformers on torch, in turns."""

    torch_python: str
    """An interpreter with torch and transformers."""
    dtype: str = "bfloat16"
    """bfloat16 or float32, for both."""
    max_new_tokens: int = 64
    """Tokens of a generation."""
    threads: int = 2
    """torch's threads."""
    repeats: int = 9
    """Generations on each side."""


def versus(config: Versus, console: Console) -> None:
    """Runs both sides in turns and writes the run folder."""
    folder = RunFolder.create("versus_transformers", config, config.out)
    enable()
    pair = build_pair("smollm2", None, dtype=config.dtype)
    request = prepare(pair, [PROMPT], SamplingParams(max_new_tokens=config.max_new_tokens, stop_ids=()))
    with (
        tempfile.TemporaryDirectory() as weights,
        _start_torch(config, pair, request.prompts[0], weights) as other,
    ):
        pairs = [(_ours(pair, request), _theirs(other)) for _ in range(config.repeats + 1)][1:]
        other.stdin.close()  # type: ignore[union-attr]
    publish(folder, report(config, pairs), console)


def _start_torch(config: Versus, pair: Pair, prompt: list[int], folder: str) -> "subprocess.Popen[str]":
    """The other side, with the target's dequantised weights: torch reads a GGUF packed, and casts at every use."""
    weights = Path(folder) / "target"
    save_hf_folder(weights, pair.target.config, pair.target.params, pair.target.tokenizer)
    command = [config.torch_python, "-c", TORCH_SIDE, str(weights), config.dtype]
    command += [str(config.max_new_tokens), str(config.threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(prompt) + "\n")
    process.stdin.flush()
    if process.stdout.readline().strip() != "ready":
        raise ValueError(f"{config.torch_python} could not load the target with torch: see its message above")
    return process


def _ours(pair: Pair, request: Request) -> tuple[int, float]:
    """Tokens and seconds of one generation, prompt included as on the other side."""
    result = decode(pair, request).results[0]
    return result.statistics["num_emitted_tokens"], result.prefill_seconds + result.seconds


def _theirs(process: "subprocess.Popen[str]") -> tuple[int, float]:
    assert process.stdin and process.stdout
    process.stdin.write("go\n")
    process.stdin.flush()
    count, seconds = json.loads(process.stdout.readline())
    return count, seconds


def report(config: Versus, pairs: Sequence[tuple[tuple[int, float], tuple[int, float]]]) -> str:
    """Tokens a second on both sides, and their ratio."""
    ours = summary([count / seconds for (count, seconds), _ in pairs])
    theirs = summary([count / seconds for _, (count, seconds) in pairs])
    ratio = summary([(a / b) / (c / d) for (a, b), (c, d) in pairs])
    about = (
        f"Plain greedy decoding of SmolLM2-135M-Instruct, {config.dtype}, {config.max_new_tokens} tokens, prompt "
        f"included; medians of {config.repeats} alternating generations (quartiles)."
    )
    rows = [
        [f"specdec_jax, jax {jax.__version__}", interval(ours, ".1f", PARENTHESES)],
        ["transformers on torch", interval(theirs, ".1f", PARENTHESES)],
        ["ratio, neighbours in time", interval(ratio, bounds=PARENTHESES)],
    ]
    return f"{about}\n\n{markdown(['', 'tokens/s'], rows)}\n"


main = command(Versus, versus, __doc__)

if __name__ == "__main__":
    sys.exit(main())
