"""Methods side by side: plain decoding against static lengths and adaptive rules, on one set of prompts.

Question:  How much faster is each method than plain decoding of the same target, and is its greedy output the same?
Command:   python -m experiments.compare configs/demo.py [--out runs/mine] [--max-new-tokens 32] [--repeats 3] ...
Time:      the config says; a first run compiles each method once, before its first row
Output:    a run folder with manifest.json, results.jsonl (a line a prompt, method, temperature and repeat), table.md,
           speedup.png. A stopped run goes on where it was with the same --out.

Methods alternate inside every prompt, so that a slow minute of the machine hits all of them. Each is compiled, and
decodes a prompt untimed, when its turn comes first; each result is a line on the screen as soon as it is measured.
Seconds are decoding only: prompt processing is reported apart, compilation is left out.
"""

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from configs.base import CompareConfig, Method, load_config
from experiments.lib.commands import config_words, exit_codes
from experiments.lib.plots import save_speedups
from experiments.lib.prompts import Prompt, load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.summary import summarise
from experiments.lib.table import markdown_table, rich_table
from specdec_jax.app.views.interrupts import interrupts_end_here
from specdec_jax.app.views.live import progress, show_live
from specdec_jax.compilation_cache import enable, kept
from specdec_jax.decoding.state import slots_for
from specdec_jax.loading import load_model
from specdec_jax.metrics.agreement import compare_outputs
from specdec_jax.metrics.repetition import repeated_share
from specdec_jax.text.generation import Pair, Request, build_pair, decode, encode, prepare
from specdec_jax.text.sampling_params import SamplingParams

CLOSE_GAP = 0.1  # logits; a greedy flip below it is rounding in bfloat16


class Job(NamedTuple):
    """One thing to measure."""

    temperature: float
    prompt: Prompt
    repeat: int
    method: Method

    @property
    def key(self) -> tuple[Any, ...]:
        return self.temperature, self.prompt.id, self.repeat, self.method.name


class Question(NamedTuple):
    """What every method is asked."""

    prompt: str
    sampling: SamplingParams
    slots: int


@exit_codes(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the config given first on the command line; 2 on bad input."""
    words = config_words("compare", __doc__, arguments)
    if words:
        compare(
            load_config(words[0], words[1:], "python -m experiments.compare"), Console(highlight=False, markup=False)
        )
    return 0


def compare(config: CompareConfig, console: Console) -> RunFolder:
    """Measures everything the config asks for, or what is still missing of it, and writes the run folder.

    Raises:
        ValueError, FileNotFoundError: bad input, before anything is written or compiled.
    """
    prompts = load_prompts(config.prompts, config.limit, config.split)
    cache = enable()
    with console.status("Loading the models"):
        pairs = load_pairs(config)
    requests = _requests(config, pairs, prompts)
    folder = RunFolder.create(config.name, config, config.out)
    jobs = _jobs(config, prompts)
    known = {(row["temperature"], row["prompt_id"], row["repeat"], row["method"]): row for row in folder.rows()}
    missing = [job for job in jobs if job.key not in known]
    compiled: set[str] = set()
    try:
        with progress(console) as bar:
            task = bar.add_task("Measuring", total=len(jobs), completed=len(jobs) - len(missing))
            for job in missing:
                pair, request = pairs[job.method.name], requests[job.key[:2]]
                if job.method.name not in compiled:
                    bar.update(task, description=f"Compiling {job.method.name}; {kept(cache)}")
                    _warm_up(config, job.method, pair, request, folder, console)
                    compiled.add(job.method.name)
                bar.update(task, description=f"{job.method.name:12s} {job.prompt.id}, temperature {job.temperature:g}")
                known[job.key] = _measure(config, job, pair, request, known)
                folder.append(known[job.key])
                console.print(_line(config, job, known))
                bar.advance(task)
        if missing and config.live:
            last = missing[-1]
            _show_live(config, last, pairs[last.method.name], requests[last.key[:2]], console)
    except KeyboardInterrupt:
        console.print(f"\nTo go on: the same command with --out {folder.path}")
        raise
    _report(config, folder, [known[job.key] for job in jobs], console)
    return folder


def load_pairs(config: CompareConfig) -> dict[str, Pair]:
    """Both models once, and a decoder for each method. Methods of equal static options share a compiled program."""
    target = load_model(config.target, dtype=config.dtype)
    needs_drafter = any(method.policy is not None and method.drafter is None for method in config.chosen_methods())
    drafter = load_model(config.drafter, dtype=config.dtype) if needs_drafter else None
    pairs = {}
    for method in config.chosen_methods():
        if method.policy is None:
            pairs[method.name] = build_pair(target, None)
            continue
        pairs[method.name] = build_pair(
            target,
            drafter if method.drafter is None else method.drafter,
            dtype=config.dtype,
            policy=method.policy,
            verifier=method.verifier,
            max_draft_length=method.max_draft_length or config.max_draft_length,
            verification_widths=config.verification_widths,
        )
    return pairs


def _requests(
    config: CompareConfig, pairs: dict[str, Pair], prompts: Iterable[Prompt]
) -> dict[tuple[float, str], Question]:
    """What every method is asked, by (temperature, prompt); with equal cache slots, so that shapes are equal too.

    Raises:
        ValueError: a prompt that does not fit into the target's context.
    """
    target = next(iter(pairs.values())).target
    widest = max(max(pair.decoder.parts.widths) for pair in pairs.values())
    lengths = [len(encode(target, prompt.turns[0], chat=config.chat, system=config.system)) for prompt in prompts]
    for prompt, length in zip(prompts, lengths, strict=True):
        if length + config.max_new_tokens > target.model.spec.context:
            raise ValueError(
                f"prompt {prompt.id!r} of {length} tokens and {config.max_new_tokens} new ones exceed the context of "
                f"{config.target}, {target.model.spec.context}"
            )
    slots = slots_for(max(lengths), config.max_new_tokens, widest)
    return {
        (temperature, prompt.id): Question(prompt.turns[0], _sampling(config, temperature), slots)
        for temperature in config.temperatures
        for prompt in prompts
    }


def _sampling(config: CompareConfig, temperature: float) -> SamplingParams:
    names = ("max_new_tokens", "top_k", "top_p", "min_p", "seed")
    return SamplingParams(temperature=temperature, **{name: getattr(config, name) for name in names})


def _jobs(config: CompareConfig, prompts: Sequence[Prompt]) -> list[Job]:
    order = itertools.product(config.temperatures, prompts, range(config.repeats), config.chosen_methods())
    return [Job(*entry) for entry in order]


def _prepare(config: CompareConfig, pair: Pair, asked: Question) -> Request:
    has_model = jax.tree.leaves(pair.params.drafter)  # a calibration is of models
    said = {"chat": config.chat, "system": config.system, "calibration": config.calibration if has_model else None}
    return prepare(pair, [asked.prompt], asked.sampling, slots=asked.slots, **said)


def _warm_up(
    config: CompareConfig, method: Method, pair: Pair, asked: Question, folder: RunFolder, console: Console
) -> None:
    """Compiles a method and decodes a prompt untimed with it."""
    with interrupts_end_here():
        decoded = decode(pair, _prepare(config, pair, asked))
    seconds = round(decoded.results[0].compile_seconds, 3)
    folder.add_compile_seconds({method.name: seconds})
    console.print(f"{method.name:14s} compiled in {seconds:.1f} s")


def _line(config: CompareConfig, job: Job, known: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """What was just measured, and how much faster than the baseline it was."""
    row, plain = known[job.key], known.get((*job.key[:3], config.chosen_methods()[0].name))
    rate = row["num_emitted_tokens"] / row["seconds"]
    line = f"{job.method.name:14s} {job.prompt.id:16s} temperature {job.temperature:<4g} {rate:6.1f} tokens/s"
    return line if plain is None else f"{line} {rate * plain['seconds'] / plain['num_emitted_tokens']:6.2f}"


def _show_live(config: CompareConfig, job: Job, pair: Pair, asked: Question, console: Console) -> None:
    """One generation as it is decoded; a stream is a program of its own to compile."""
    said = {"chat": config.chat, "system": config.system}
    show_live(console, pair, job.method.name, asked.prompt, asked.sampling, **said)


def _measure(
    config: CompareConfig, job: Job, pair: Pair, question: Question, known: dict[tuple[Any, ...], dict[str, Any]]
) -> dict[str, Any]:
    """One row: a timed generation and, under greedy, whether it equals plain decoding."""
    asked = _prepare(config, pair, question)
    (result,), state = decode(pair, asked)
    counts = {
        name: result.statistics[name]
        for name in result.statistics
        if name.startswith("num_") or name.endswith("_passes") or name == "acceptance_histogram"
    }
    plain = known.get((*job.key[:3], config.chosen_methods()[0].name))
    return {
        "prompt_id": job.prompt.id,
        "category": job.prompt.category,
        "method": job.method.name,
        "temperature": job.temperature,
        "repeat": job.repeat,
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds,
        **counts,
        "accepted_at": [int(n) for n in jax.device_get(state.statistics.accepted_at)[0]],
        "repeated_share": repeated_share(result.tokens),
        "finish_reason": result.finish_reason,
        **_equality(job, pair, result.prompt_tokens, result.tokens, plain),
        "policy_hyperparameters": _plain_hyperparameters(
            {**pair.policy.given, **asked.options.get("policy_hyperparameters", {})}
        ),
        "tokens": result.tokens,
        "text": result.text,
    }


def _plain_hyperparameters(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Numbers as JSON has them; None is a hyperparameter's own way to say that its rule decides."""
    return {name: np.asarray(value).tolist() for name, value in hyperparameters.items() if value is not None}


def _equality(
    job: Job, pair: Pair, prompt: list[int], tokens: list[int], plain: dict[str, Any] | None
) -> dict[str, Any]:
    if job.temperature > 0 or plain is None:
        return {"equals_plain": None, "first_difference": None}
    difference = compare_outputs(pair.target.model, pair.params.target, prompt, plain["tokens"], tokens)
    return {
        "equals_plain": difference is None,
        "first_difference": None if difference is None else difference._asdict(),
    }


def _report(config: CompareConfig, folder: RunFolder, rows: list[dict[str, Any]], console: Console) -> None:
    summaries = summarise(rows)
    equality = equality_summary(rows)
    folder.write_text("table.md", markdown_table(summaries, config.name) + "\n" + equality + "\n")
    with folder.replacing("speedup.png") as path:
        save_speedups(rows, path, title=f"{config.name}: {config.target}, drafter {config.drafter}, {config.dtype}")
    console.print(rich_table(summaries, config.name))
    console.print(equality)
    console.print(f"Written to {folder.path}/: manifest.json, results.jsonl, table.md, speedup.png")


def equality_summary(rows: Iterable[dict[str, Any]]) -> str:
    """One sentence on greedy equality, and a line for every output that differs."""
    compared = [row for row in rows if row["equals_plain"] is not None]
    different = [row for row in compared if not row["equals_plain"]]
    if not compared:
        return "No greedy outputs to compare."
    if not different:
        return f"Greedy: all {len(compared)} outputs equal plain decoding token for token."
    lines = [
        f"Greedy: {len(compared) - len(different)} of {len(compared)} outputs equal plain decoding token for token."
    ]
    for row in different:
        at = row["first_difference"]
        gap = at["logit_gap"]
        why = "one of them had ended" if gap is None else f"logit gap {gap:.3f}"
        kind = " (a numerical near tie)" if gap is not None and gap < CLOSE_GAP else ""
        lines.append(f"  {row['method']} on {row['prompt_id']}: diverges at token {at['position']}, {why}{kind}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
