"""Record what every stopping rule would see: traces of lossless runs, one a temperature.

Question:  What does the drafter's distribution look like along the target's own text, and would it be accepted?
Command:   python -m experiments.record --prompts FILE.jsonl [--temperatures 0 0.7 1] [--limit 8] ...
           python -m experiments.record configs/evidence.py --data FOLDER   (all pairs of the archive in results/)
Time:      about 2.5 s a prompt and temperature on 2 cores (128 tokens, tails of 16)
Output:    trace-<temperature>.npz in --out with manifest.json; of a config PAIR/TOKENS-seedSEED/trace-<temperature>.npz

Batches that are there are not recorded again. Processes with the same --out, on any hosts that see it, share them:
start the command as often as you like. `python -m experiments.policies trace-0.7.npz` runs any rule over a trace. The
answers are the target's own, decoded plainly.
"""

import hashlib
import itertools
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from configs.base import EvidenceConfig, RecordedPair, describe
from experiments.lib.commands import LoadedPair, Output, Served, bar, command, config_command
from experiments.lib.prompts import Prompt, load_prompts, task_of
from experiments.lib.run_folder import MANIFEST, RunFolder, git_state, package_versions
from specdec_jax.costs.machine import processor
from specdec_jax.loading.across import probability_shared
from specdec_jax.locks import claimed
from specdec_jax.metrics.judging import alike, answers
from specdec_jax.ranges import Between
from specdec_jax.replay.trace import Trace, join, load_trace, save_trace, select
from specdec_jax.replay.tracing import trace_texts
from specdec_jax.text.generation import encode
from specdec_jax.text.sampling_params import MinP, NewTokens, Seed, Temperatures, TopK, TopP

SEEDS = 1000  # between the seeds of two cells, more than prompts have
USUAL = 1.0  # temperatures above it are recorded later
Key = tuple[str, float, int]  # pair, temperature and limit of tokens: of all seeds' cells
Encoded = tuple[Prompt, list[int], list[int] | None]  # a prompt, its tokens, and its answer's where that is recorded


@dataclass(frozen=True)
class Record(Output, Served):
    """Record traces of a pair of models along the target's own answers."""

    prompts: str = "configs/prompts/demo.jsonl"  # A JSONL file, FILE:n for every n-th of its prompts, or hub:NAME.
    temperatures: Temperatures = (0.0, 0.7, 1.0)  # One trace each; 0 is greedy.
    top_k: TopK = 0  # 0 is off.
    top_p: TopP = 1.0  # 1 is off.
    min_p: MinP = 0.0  # 0 is off.
    max_new_tokens: NewTokens = 128  # Most tokens of an answer.
    max_draft_length: Annotated[int, Between(1)] = 16  # The longest draft that can be replayed.
    limit: int | None = None  # Only the first prompts.
    split: str | None = None  # Only prompts of this split.
    chat: bool = True  # Put prompts through the chat template.
    system: str | None = None  # System prompt.
    batch: Annotated[int, Between(1)] = 16  # Number of texts per batch.
    seed: Seed = 0  # Prompt i is sampled, accepted and continued with seed + i.


def record(config: Record, console: Console) -> list[Path]:
    """Writes what is missing and returns the traces' paths."""
    prompts = load_prompts(config.prompts, config.limit, config.split)
    pair = config.load(console)
    encoded = _encoded(config, pair, prompts)
    about = describe(config) | ({"first": config.limit} if config.limit else {})  # a trace has all texts or is another
    folder = RunFolder.create("record", about, config.out).path
    return [_trace(config, pair, encoded, folder, temperature, console) for temperature in config.temperatures]


class Cell(NamedTuple):
    """A trace: the texts of a pair at a temperature, with a seed, of up to so many tokens."""

    pair: RecordedPair
    temperature: float
    seed: int
    tokens: int

    @property
    def path(self) -> Path:
        """Below the folder of the recording."""
        return Path(self.pair.name, f"{self.tokens}-seed{self.seed}", f"trace-{self.temperature:g}.npz")

    @property
    def key(self) -> Key:
        """Of its group."""
        return self.pair.name, self.temperature, self.tokens


def cells(config: EvidenceConfig) -> list[Cell]:
    """In the order of recording: every pair's first seed, long texts, high temperatures, then more seeds."""
    every = []
    for pair in config.pairs:
        for temperature in dict.fromkeys(pair.temperatures):
            for number in range(pair.seeds if temperature > 0 else 1):
                at_length = number == 0 and temperature <= USUAL
                for tokens in (config.max_new_tokens, config.long_tokens) if at_length else (config.max_new_tokens,):
                    every.append(Cell(pair, temperature, SEEDS * number, tokens))
    order = lambda cell: (cell.seed, cell.temperature > USUAL, cell.tokens == config.long_tokens, cell.temperature)  # noqa: E731
    return sorted(every, key=order)


def prompts_of(config: EvidenceConfig, pair: RecordedPair) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of a pair, and those of them that are also answered at length. Raises ValueError for a kind of which
    the file has too few, and as `load_prompts`."""
    chosen, at_length = [], []
    for kind in config.kinds:
        each = [prompt for prompt in load_prompts(Path(config.data) / kind.file) if prompt.category in kind.categories]
        if len(each) < pair.prompts:
            raise ValueError(f"{kind.file} has {len(each)} prompts of {kind.name}, {pair.prompts} are asked for")
        spread = [
            each[number * len(each) // pair.prompts]._replace(category=kind.name) for number in range(pair.prompts)
        ]
        few = max(round(pair.prompts / config.long_share), 1)
        chosen += spread
        at_length += [spread[number * pair.prompts // few] for number in range(few)]
    return chosen, at_length


def record_cells(config: EvidenceConfig, console: Console) -> None:
    """Records the cells of a config that are missing, in the order of `cells`. A target's answers are decoded once: its
    other drafters have those of the first one's trace."""
    prompts, loaded = {pair.name: prompts_of(config, pair) for pair in config.pairs}, {}
    written: dict[tuple[Any, ...], Path] = {}
    held: set[str] = set()
    if config.add_to:
        held = {cell["path"] for cell in json.loads(Path(config.add_to, MANIFEST).read_text("utf-8"))["cells"]}
    for cell in cells(config):
        pair, path = cell.pair, Path(config.out) / cell.path
        if str(cell.path) in held and not path.exists():
            continue
        before = written.setdefault((pair.target, pair.prompts, pair.chat, pair.batch, *cell[1:]), path)
        if path.exists():
            continue
        options = {name: getattr(pair, name) for name in ("target", "drafter", "chat", "batch")}
        options |= {"max_draft_length": config.max_draft_length, "max_new_tokens": cell.tokens, "seed": cell.seed}
        options = Record(prompts=config.name, **options)
        if pair.name not in loaded:
            loaded.clear()  # one pair at a time fits into memory, with its programs
            jax.clear_caches()
            loaded[pair.name] = options.load(console)
        encoded = _encoded(options, loaded[pair.name], prompts[pair.name][cell.tokens == config.long_tokens])
        if before.exists():
            trace = load_trace(before)
            texts = [trace.tokens[text, :length].tolist() for text, length in enumerate(trace.length)]
            encoded = [(prompt, tokens, text) for (prompt, tokens, _), text in zip(encoded, texts, strict=True)]
        started = time.perf_counter()
        _trace(options, loaded[pair.name], encoded, path.parent, cell.temperature, console)
        console.print(f"{cell.path}: {time.perf_counter() - started:.0f} s, {path.stat().st_size / 1e6:.1f} MB")


def _encoded(config: Record, pair: LoadedPair, prompts: Sequence[Prompt]) -> list[Encoded]:
    options = {"chat": config.chat, "system": config.system}
    return [(prompt, encode(pair[0], prompt.turns[0], **options), None) for prompt in prompts]


def _trace(
    config: Record, pair: LoadedPair, encoded: Sequence[Encoded], folder: Path, temperature: float, console: Console
) -> Path:
    """Writes the batches that are missing, and the trace when none is; its path."""
    tokens = [each for _, each, _ in encoded]
    path, where, files = folder / f"trace-{temperature:g}.npz", folder / f"parts-{temperature:g}", {}
    for members in alike([len(each) for each in tokens], config.batch):
        digest = hashlib.sha256(repr([(member, tokens[member]) for member in members]).encode()).hexdigest()[:12]
        files[f"{digest}.npz"] = members

    def missing() -> list[str]:
        if path.exists():
            return []
        return [name for name in files if not (where / name).exists()] or [path.name]

    with bar(console, f"Temperature {temperature:g}", len(encoded), 0, unit="prompts") as update:
        for name in claimed(where, missing):
            if name == path.name:
                order = [*itertools.chain(*files.values())]
                save_trace(path, select(join([load_trace(where / part) for part in files]), np.argsort(order)))
            else:
                here = {member: encoded[member] for member in files[name]}
                save_trace(where / name, _batch(config, pair, here, temperature))
                update(sum(len(members) for part, members in files.items() if (where / part).exists()))
    trace = load_trace(path)
    accepted = trace.accepted.sum() / trace.num_positions
    console.print(f"{path}: {trace.num_texts} texts, {trace.num_positions} positions, {accepted:.3f} accepted")
    shutil.rmtree(where, ignore_errors=True)
    return path


def _batch(config: Record, pair: LoadedPair, prompts: Mapping[int, Encoded], temperature: float) -> Trace:
    """Answers of some prompts, by index, and their trace."""
    target, drafter = pair
    tokens = [each for _, each, _ in prompts.values()]
    warp = {"temperature": temperature, "top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}
    seeds = [(config.seed + member) % 2**32 for member in prompts]
    texts = [text for *_, text in prompts.values() if text is not None]
    if not texts:
        texts = answers(target, tokens, max_new_tokens=config.max_new_tokens, warp=warp, seed=seeds, batch=len(tokens))
    shared = probability_shared(target, drafter.params)
    about = {"target": target.name, "drafter": drafter.name, "dtype": config.dtype, "warp": warp, "seed": config.seed}
    about |= {"batch": config.batch}  # prompts whose chunks have over 512 rows in all are prefilled by XLA
    about |= {"prompts": Path(config.prompts).name, "versions": package_versions()}
    about |= {"git": git_state(), "processor": processor()}
    about |= {"ids": [prompt.id for prompt, *_ in prompts.values()]}
    about |= {"tasks": [task_of(prompt) for prompt, *_ in prompts.values()]}
    about |= {} if shared is None else {"probability_shared": shared}
    options = {"limit": config.max_new_tokens, "max_draft_length": config.max_draft_length, "about": about}
    models, params = (target.model, drafter.model), (target.params, drafter.params)
    return trace_texts(models, params, list(zip(tokens, texts, strict=True)), warp=warp, seed=seeds, **options)


records, of_config = command(Record, record, __doc__), config_command("record", record_cells, __doc__)


def main(arguments: Sequence[str] | None = None) -> int:
    """A config where the first word names one, options otherwise."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return (of_config if words and words[0].endswith(".py") else records)(words)


if __name__ == "__main__":
    raise SystemExit(main())
