"""Spec-Bench's answer files and its speed report: two averages a task, which differ and are both printed.

Question:  How much faster is a method than plain decoding on Spec-Bench's tasks, as Spec-Bench counts it and in total?
Command:   python -m experiments.spec_bench BASELINE.jsonl METHOD.jsonl [METHOD.jsonl ...] [--retokenise FOLDER]
           python -m experiments.spec_bench RUN/ [--out FOLDER]    files of a run of experiments.compare
Time:      seconds
Output:    a table a method; or, for a run folder, a file <method>-temp<temperature>.jsonl for each of both in --out,
           and beside it .aiperf.jsonl, the acceptance records of NVIDIA's AIPerf

Answer files are those of https://github.com/hemingkx/Spec-Bench (arXiv 2401.07851): a JSON object a question, with new
tokens, seconds and decoding steps a turn. Its report (evaluation/speed.py) takes each question's tokens/s, averages
over the questions of a task, and divides the method's average by the baseline's: "ratio of means" here. "Total" is all
tokens over all seconds, in which slow questions weigh more. The eight categories of MT-bench are one task.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console

from experiments.lib.commands import command
from experiments.lib.prompts import MT_BENCH
from experiments.lib.run_folder import read_manifest, read_rows
from experiments.lib.tables import NONE, Whole, markdown
from specdec_jax.contrib.engine_logs.rounds import aiperf_summary, write_lines
from specdec_jax.loading.tokenizer import tokenizer_from_folder
from specdec_jax.text.json_lines import json_lines

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")  # in the report's order
OVERALL = "overall"


class Choice(NamedTuple):
    """One answer to all turns of a question. Lists have one entry per turn; accept_lengths has one per round."""

    index: int
    turns: list[str]
    decoding_steps: list[int]
    new_tokens: list[int]
    wall_time: list[float]  # seconds, prompt processing included
    accept_lengths: list[int]  # tokens a round brought, so 1 each in plain decoding


class Answer(NamedTuple):
    """A line of an answer file."""

    question_id: int | str
    category: str
    model_id: str
    choices: list[Choice]
    tstamp: float  # seconds since 1970


class TaskSpeed(NamedTuple):
    """A method against the baseline on one task. Several choices of a question are added up."""

    task: str
    questions: int
    mean_accepted_tokens: float | None  # per round; None without rounds
    baseline_tokens_per_second: float  # mean of the questions' tokens/s
    tokens_per_second: float  # the same of the method
    speedup_ratio_of_means: float  # Spec-Bench's speed-up: the two above divided
    speedup_mean_of_ratios: float  # mean of the questions' speed-ups, what `experiments.compare` calls mean
    speedup_total: float  # all tokens over all seconds, divided by the baseline's


@dataclass(frozen=True)
class SpecBench:
    """Compare answer files, or make them of a run folder."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """The baseline's answer file and one or more methods', or one run folder."""
    out: Path | None = None  # Where a run folder's answer files go; none: RUN/answers.
    retokenise: Path | None = None
    """Folder with the model's tokenizer.json: count the baseline's tokens in its text, as Spec-Bench does."""


def spec_bench(config: SpecBench, console: Console) -> None:
    """Prints the tables or writes the files. Raises ValueError, FileNotFoundError for invalid input."""
    if len(config.paths) == 1 and config.paths[0].is_dir():
        for path in export(config.paths[0], config.out):
            console.print(str(path), soft_wrap=True)
        return
    if len(config.paths) < 2:
        raise ValueError(f"give a baseline's and a method's answer file, or a run folder, got {config.paths}")
    baseline, *methods = map(read_answers, config.paths)
    tokenizer = tokenizer_from_folder(config.retokenise) if config.retokenise else None
    count = None if tokenizer is None else lambda text: len(tokenizer.encode(text))
    heads = ["task", "n", "mean accepted", "baseline tokens/s", "method tokens/s"]
    for path, method in zip(config.paths[1:], methods, strict=True):
        lines = []
        for row in speeds(baseline, method, count):
            accepted = NONE if row.mean_accepted_tokens is None else f"{row.mean_accepted_tokens:.2f}"
            speed = [f"{value:.1f}" for value in (row.baseline_tokens_per_second, row.tokens_per_second)]
            lines.append([row.task, str(row.questions), accepted, *speed, *(f"{ratio:.3f}" for ratio in row[5:])])
        console.print(f"Speed-ups of {path.name} against {config.paths[0].name}", style="bold")
        console.print(Whole(markdown([*heads, "ratio of means", "mean of ratios", "total"], lines)))


def task_of(category: str) -> str:
    """The task a category belongs to: itself, or "mt_bench"."""
    return "mt_bench" if category in MT_BENCH else category


def speeds(
    baseline: Sequence[Answer], method: Sequence[Answer], count: Callable[[str], int] | None = None
) -> list[TaskSpeed]:
    """Speeds by task, Spec-Bench's first, then others by name, then overall. `count` counts the baseline's tokens.

    Raises:
        ValueError: a question that only one of them answers, or an answer without tokens or time.
    """
    plain = {answer.question_id: _tokens_and_seconds(answer, count) for answer in baseline}
    fast = {answer.question_id: _tokens_and_seconds(answer) for answer in method}
    alone = [*(name for name in plain if name not in fast), *(name for name in fast if name not in plain)]
    if alone:
        role = "baseline" if alone[0] in plain else "method"
        raise ValueError(f"question {alone[0]!r} is answered by the {role} only ({len(alone)} such questions)")
    by_task: dict[str, list[Answer]] = defaultdict(list)
    for answer in method:
        by_task[task_of(answer.category)].append(answer)
    order = [*(task for task in TASKS if task in by_task), *sorted(task for task in by_task if task not in TASKS)]
    rows = []
    for task, answers in [*((task, by_task[task]) for task in order), (OVERALL, method)]:
        before, after = (np.array([cost[answer.question_id] for answer in answers], float).T for cost in (plain, fast))
        slow, quick = before[0] / before[1], after[0] / after[1]  # tokens/s of the questions
        accepted = [n for answer in answers for choice in answer.choices for n in choice.accept_lengths]
        ratios = quick.mean() / slow.mean(), (quick / slow).mean()
        totals = after[0].sum() / after[1].sum() / (before[0].sum() / before[1].sum())
        taken = float(np.mean(accepted)) if accepted else None
        rows.append(TaskSpeed(task, len(answers), taken, *map(float, (slow.mean(), quick.mean(), *ratios, totals))))
    return rows


def _tokens_and_seconds(answer: Answer, count: Callable[[str], int] | None = None) -> tuple[int, float]:
    written = [choice.new_tokens if count is None else map(count, choice.turns) for choice in answer.choices]
    tokens = sum(n for numbers in written for n in numbers)
    seconds = sum(s for choice in answer.choices for s in choice.wall_time)
    if tokens <= 0 or not seconds > 0:
        raise ValueError(f"question {answer.question_id!r} of {answer.model_id!r}: {tokens} tokens in {seconds} s")
    return tokens, seconds


def read_answers(path: str | Path) -> list[Answer]:
    """The answers of a file, in its order; fields that are not used, such as answer_id, are dropped.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line of another shape, a question answered twice, or no line; the message says file:line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no answer file {str(path)!r}")
    answers: dict[int | str, Answer] = {}
    for number, entry in json_lines(path):
        where = f"{path}:{number}"
        try:
            choices = [Choice(*(choice[field] for field in Choice._fields)) for choice in entry["choices"]]
            answer = Answer(**{field: entry[field] for field in Answer._fields if field != "choices"}, choices=choices)
            lengths = {(len(c.turns), len(c.new_tokens), len(c.wall_time), len(c.decoding_steps)) for c in choices}
            sum(number for c in choices for number in (*c.new_tokens, *c.wall_time, *c.accept_lengths))  # are numbers
        except KeyError as error:
            raise ValueError(f"{where}: no {error} in this answer") from None
        except TypeError:
            raise ValueError(f"{where}: not an answer of Spec-Bench: {json.dumps(entry)[:60]}") from None
        if not choices or any(len(set(numbers)) > 1 for numbers in lengths):
            raise ValueError(f"{where}: question {answer.question_id!r} needs as many numbers as turns, got {lengths}")
        if answer.question_id in answers:
            raise ValueError(f"{where}: question {answer.question_id!r} is answered a second time")
        answers[answer.question_id] = answer
    if not answers:
        raise ValueError(f"{path}: no answers in it")
    return list(answers.values())


def export(folder: str | Path, out: str | Path | None = None) -> list[Path]:
    """Writes the files of a run of `experiments.compare`, two a method and temperature; returns the answers' paths.

    A repeat of a prompt is a choice. Only first turns are decoded there. Rounds come as a histogram, so accept_lengths
    are sorted, not in time.

    Raises:
        ValueError: not such a run folder; the message says what is missing.
    """
    folder = Path(folder)
    out = folder / "answers" if out is None else Path(out)
    files: dict[str, dict[str, Answer]] = defaultdict(dict)
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    try:
        started = datetime.fromisoformat(read_manifest(folder)["started"]).timestamp()
        for row in read_rows(folder):
            name = re.sub(r"[^\w.-]", "_", f"{row['method']}-temp{row['temperature']:g}")
            prompt = str(row["prompt_id"])
            number = int(prompt) if prompt.isdecimal() else prompt
            answer = files[name].setdefault(prompt, Answer(number, row["category"], name, [], started))
            choice = Choice(
                index=len(answer.choices),
                turns=[row["text"]],
                decoding_steps=[row["num_rounds"]],
                new_tokens=[row["num_emitted_tokens"]],
                wall_time=[row["prefill_seconds"] + row["seconds"]],
                accept_lengths=[1 + n for n, rounds in enumerate(row["acceptance_histogram"]) for _ in range(rounds)],
            )
            answer.choices.append(choice)
            counts = row["acceptance_histogram"], row["num_draft_tokens"], row["num_emitted_tokens"]
            records[name].append(aiperf_summary(*counts, f"{prompt}-{choice.index}"))
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} is no run folder of experiments.compare ({error})") from None
    if not files:
        raise ValueError(f"{str(folder)!r} has no results")
    out.mkdir(parents=True, exist_ok=True)
    for name, answers in files.items():
        entries = [each._asdict() | {"choices": [c._asdict() for c in each.choices]} for each in answers.values()]
        write_lines(out / f"{name}.jsonl", entries)
        write_lines(out / f"{name}.aiperf.jsonl", records[name])
    return [out / f"{name}.jsonl" for name in files]


main = command(SpecBench, spec_bench, __doc__)

if __name__ == "__main__":
    sys.exit(main())
