"""What does lossy verification buy, and what does it cost? Speed beside quality, in one paired run.

Question:  How much faster than rejection is each lossy verifier at several settings, and how far does its text leave
           the target's distribution: per position, in likelihood under the target, and under greedy in tokens that
           differ?
Command:   python -m experiments.compare lossy [--each 3] [--variants "lenience(lenience=0.5)" typical ...]
Hardware:  2 CPU cores, the built-in pair in bfloat16
Time:      about 2 s a prompt, temperature and variant after compiling: 15 minutes for 15 prompts, 2 temperatures and 13
           variants; --smoke runs on tiny random models in a minute
Expected:  lenience and typical give more tokens a round the further they relax; easd fewer than rejection, since it
           redraws. Log-likelihood is no score to maximise: text that repeats itself has a high one.
Output:    runs/lossy-<time>/ with manifest.json, results.jsonl (a line a prompt, variant, temperature and repeat),
           table.md and lossy.png; a stopped run goes on where it was with the same --out

Variants alternate inside every prompt, so that a slow minute hits all of them. Quality is read off the text afterwards,
by both models' passes over it: the log-likelihood of its tokens under the target at temperature 1 without truncation,
and at every position how far the distribution of a token drafted there would be from the target's
(metrics/deviation.py; not known for by_phase).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from experiments.lib.cells import at_temperature
from experiments.lib.commands import command
from experiments.lib.jobs import Job, jobs_of, longest_text
from experiments.lib.lossy_report import PLAIN, REJECTION, picture, report
from experiments.lib.options import Output, Served, Smoke, check_least
from experiments.lib.prompts import Prompt, load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.smoke import tiny_pair
from experiments.lib.terminal import publish
from experiments.lib.trace_runs import costs_or_default
from specdec_jax.compilation_cache import enable
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.state import slots_for
from specdec_jax.metrics.deviation import DISTRIBUTIONS, deviations
from specdec_jax.text.generation import Pair, Request, build_pair, decode, prepare
from specdec_jax.text.pair import measured_pair
from specdec_jax.text.sampling_params import SamplingParams, check_sampling
from specdec_jax.text.strategies import choose
from specdec_jax.types import Verifier

TASKS = ("math", "code", "summarise", "german", "instructions")
KEYS = ("temperature", "prompt_id", "repeat", "variant")
VARIANTS = (
    *(f"lenience(lenience={value})" for value in (0.7, 0.5, 0.3, 0.1)),
    *(f"typical(epsilon={epsilon}, delta={delta})" for epsilon, delta in ((0.3, 0.9), (0.09, 0.3), (0.03, 0.1))),
    *(f"easd(drafter_entropy={value}, target_entropy={value})" for value in (1.0, 2.0, 3.0)),
    "by_phase(lenience=0.3)",
)


@dataclass(frozen=True)
class Lossy(Output, Smoke, Served):
    """Weigh lossy verifiers against rejection."""

    prompts: tuple[str, ...] = tuple(f"configs/prompts/{task}.jsonl" for task in TASKS)
    """JSONL files, FILE:n for every n-th prompt, or hub:NAME; their half for judging."""
    each: int = 3
    """Most prompts of a file."""
    variants: tuple[str, ...] = VARIANTS
    """Verifiers as NAME or NAME(key=value, ...); plain decoding and rejection are always there."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0 is greedy."""
    repeats: int = 1
    """Generations of each, with seeds of their own."""
    max_new_tokens: int = 128
    """Most tokens of a text."""
    policy: str = "static(draft_length=4)"
    """When to stop drafting."""
    costs: str | None = None
    """cost_model.json of experiments.step_cost, for the predicted speed; none: the one in configs/costs."""
    seed: int = 0
    """Of the first repeat."""


class Variant(NamedTuple):
    """A verifier, as called on the command line; no verifier is plain decoding."""

    name: str
    verifier: Verifier | None
    pair: Pair


def study(config: Lossy, console: Console) -> None:
    """Measures what is missing and writes the run folder."""
    policy = choose("policy", config.policy)
    chosen = {name: choose("verifier", name) for name in dict.fromkeys((REJECTION, *config.variants))}
    prompts, costs = prompts_of(config), costs_or_default(config.costs)
    check_least(config, 1, "each", "repeats", "max_new_tokens")
    check_sampling(config)
    enable()
    target, drafter = tiny_pair() if config.smoke else config.load(console)
    variants = [Variant(PLAIN, None, build_pair(target, None))]
    for name, verifier in chosen.items():  # those that differ in hyperparameters only share a program
        variants.append(
            Variant(
                name, verifier, measured_pair(target, drafter, policy=policy, verifier=verifier, max_draft_length=7)
            )
        )
    longest = longest_text(config, target, prompts)
    folder = RunFolder.create("lossy", config, config.out)
    measure(config, jobs_of(config, prompts, variants), variants, longest, folder, console)
    rows = folder.rows()
    publish(folder, report(rows, costs), console, lossy=picture(rows, costs))


def measure(
    config: Lossy, jobs: Sequence[Job], variants: Sequence[Variant], longest: int, folder: RunFolder, console: Console
) -> None:
    """Appends a row for each job that has none. A program is played once untimed before its first."""
    there = {tuple(row[key] for key in KEYS) for row in folder.rows()}
    missing = [job for job in jobs if job.key not in there]
    judge = next(variant.pair for variant in variants if variant.name == REJECTION)
    slots = slots_for(longest, 0, max(max(variant.pair.decoder.parts.widths) for variant in variants))
    ready: set[int] = set()  # decoders that are compiled
    with console.status("Measuring") as status:
        for number, job in enumerate(missing, start=1):
            temperature = at_temperature(job.temperature)
            status.update(f"{number} of {len(missing)}: {job.method.name} on {job.prompt.id}, {temperature}")
            asked, pair = _asked(config, job, slots), job.method.pair
            if id(pair.decoder) not in ready:
                decode(pair, asked)
                ready.add(id(pair.decoder))
            folder.append(measured(job, asked, judge, longest))


def prompts_of(config: Lossy) -> list[Prompt]:
    """The prompts, their ids preceded by their file's. Raises as `load_prompts` does."""
    if config.smoke:
        return [Prompt(name, "made up", (text,)) for name, text in (("one", "Why is the sky blue?"), ("two", "1 + 1"))]
    found = []
    for source in config.prompts:
        stem = Path(source.rpartition(":")[0] or source).stem
        found += [prompt._replace(id=f"{stem}/{prompt.id}") for prompt in load_prompts(source, config.each, "judge")]
    return found


def _asked(config: Lossy, job: Job, slots: int) -> Request:
    most = 12 if config.smoke else config.max_new_tokens
    sampling = SamplingParams(max_new_tokens=most, temperature=job.temperature, seed=config.seed + job.repeat)
    return prepare(job.method.pair, [job.prompt.turns[0]], sampling, slots=slots)


def measured(job: Job, asked: Request, judge: Pair, longest: int) -> dict[str, Any]:
    """One row: a timed generation, and what its text is worth."""
    result = decode(job.method.pair, asked).results[0]
    counts = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "drafter_passes")
    return {
        "temperature": job.temperature,
        "prompt_id": job.prompt.id,
        "category": job.prompt.category,
        "repeat": job.repeat,
        "variant": job.method.name,
        "seconds": result.seconds,
        **{name: result.statistics[name] for name in counts},
        **quality(job, judge, result.prompt_tokens, result.tokens, longest),
        "tokens": result.tokens,
        "text": result.text,
    }


def quality(job: Job, judge: Pair, prompt: list[int], tokens: list[int], longest: int) -> dict[str, Any]:
    """Means over the text's tokens; texts are filled up to one length, so that one program judges all."""
    verifier = job.method.verifier
    known = verifier is not None and verifier.name in DISTRIBUTIONS
    name, hyperparameters = REJECTION, {}
    if verifier is not None and known:
        name = verifier.name
        hyperparameters = {key: np.float32(value) for key, value in verifier.hyperparameters.items()}
        hyperparameters |= {key: value for key, value in verifier.options.items() if key == "top_n"}
    text = np.zeros((1, max(longest, 2)), np.int32)
    text[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    warp = make_warp(1, job.temperature)
    found = deviations(judge.decoder, judge.params, text, verifier=name, hyperparameters=hyperparameters, warp=warp)
    at = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    mean = {field: float(np.asarray(values)[0, at].mean()) for field, values in found._asdict().items()}
    if verifier is not None and not known:
        mean |= {"total_variation": None, "divergence": None}
    return mean


main = command(Lossy, study, __doc__, "python -m experiments.compare lossy")
