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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from experiments.lib.commands import command
from experiments.lib.prompts import MT_BENCH
from experiments.lib.run_folder import read_manifest, read_rows
from experiments.lib.tables import NONE, Whole, markdown
from specdec_jax.loading.new_folder import write_text
from specdec_jax.loading.tokenizer import tokenizer_from_folder
from specdec_jax.text.json_lines import json_lines, json_text

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")  # in the report's order
OVERALL = "overall"
PER_TURN = ("turns", "new_tokens", "wall_time", "decoding_steps")  # of a choice; seconds are with the prompt's
HEADS = ["task", "n", "mean accepted", "baseline tokens/s", "method tokens/s"]
HEADS += ["ratio of means", "mean of ratios", "total"]
Answer = Mapping[str, Any]  # question_id, category, model_id, and choices, whose accept_lengths are by round


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
    for path, method in zip(config.paths[1:], methods, strict=True):
        lines = []
        for task, questions, accepted, *rates in speeds(baseline, method, count):
            cells = [NONE if accepted is None else f"{accepted:.2f}", *(f"{rate:.1f}" for rate in rates[:2])]
            lines.append([task, str(questions), *cells, *(f"{ratio:.3f}" for ratio in rates[2:])])
        console.print(f"Speed-ups of {path.name} against {config.paths[0].name}", style="bold")
        console.print(Whole(markdown(HEADS, lines)))


def speeds(
    baseline: Mapping[Any, Answer], method: Mapping[Any, Answer], count: Callable[[str], int] | None = None
) -> list[tuple[Any, ...]]:
    """The figures of HEADS by task, Spec-Bench's first, then overall. Choices of a question are added up; `count`
    counts the baseline's tokens. Raises ValueError for a question that one of them answers, or no tokens or time."""
    plain = {name: _tokens_and_seconds(answer, count) for name, answer in baseline.items()}
    fast = {name: _tokens_and_seconds(answer) for name, answer in method.items()}
    alone = [*(name for name in plain if name not in fast), *(name for name in fast if name not in plain)]
    if alone:
        role = "baseline" if alone[0] in plain else "method"
        raise ValueError(f"question {alone[0]!r} is answered by the {role} only ({len(alone)} such questions)")
    by_task: dict[str, list[Any]] = {}
    for name, answer in method.items():
        by_task.setdefault("mt_bench" if answer["category"] in MT_BENCH else answer["category"], []).append(name)
    order = [*(task for task in TASKS if task in by_task), *sorted(by_task.keys() - set(TASKS))]
    rows = []
    for task, questions in [*((task, by_task[task]) for task in order), (OVERALL, list(method))]:
        before, after = (np.array([cost[name] for name in questions], float).T for cost in (plain, fast))
        slow, quick = before[0] / before[1], after[0] / after[1]  # tokens/s of the questions
        accepted = [n for name in questions for choice in method[name]["choices"] for n in choice["accept_lengths"]]
        figures = slow.mean(), quick.mean(), quick.mean() / slow.mean(), (quick / slow).mean()
        totals = after[0].sum() / after[1].sum() / (before[0].sum() / before[1].sum())
        rows.append((task, len(questions), np.mean(accepted) if accepted else None, *figures, totals))
    return rows


def _tokens_and_seconds(answer: Answer, count: Callable[[str], int] | None = None) -> tuple[int, float]:
    choices = answer["choices"]
    tokens = sum(sum(choice["new_tokens"] if count is None else map(count, choice["turns"])) for choice in choices)
    seconds = sum(sum(choice["wall_time"]) for choice in choices)
    if tokens <= 0 or not seconds > 0:
        raise ValueError(
            f"question {answer['question_id']!r} of {answer['model_id']!r}: {tokens} tokens in {seconds} s"
        )
    return tokens, seconds


def read_answers(path: str | Path) -> dict[Any, Answer]:
    """The answers of a file by question, in its order. Raises FileNotFoundError where there is no such file, and
    ValueError with file:line for a line of another shape, a question answered twice, or no line."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no answer file {str(path)!r}")
    answers: dict[Any, Answer] = {}
    for number, entry in json_lines(path):
        where = f"{path}:{number}"
        try:
            name, _, _, choices = (entry[field] for field in ("question_id", "category", "model_id", "choices"))
            lengths = {tuple(len(choice[field]) for field in PER_TURN) for choice in choices}
            for choice in choices:
                sum((*choice["new_tokens"], *choice["wall_time"], *choice["accept_lengths"]))  # are numbers
        except KeyError as error:
            raise ValueError(f"{where}: no {error} in this answer") from None
        except TypeError:
            raise ValueError(f"{where}: not an answer of Spec-Bench: {json.dumps(entry)[:60]}") from None
        if not choices or any(len(set(numbers)) > 1 for numbers in lengths):
            raise ValueError(f"{where}: question {name!r} needs as many numbers as turns, got {lengths}")
        if name in answers:
            raise ValueError(f"{where}: question {name!r} is answered a second time")
        answers[name] = entry
    if not answers:
        raise ValueError(f"{path}: no answers in it")
    return answers


def export(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes the files of a run of `experiments.compare`, two a method and temperature; returns the answers' paths. A
    repeat of a prompt is a choice. Only first turns are decoded there. Rounds come as a histogram, so accept_lengths
    are sorted, not in time. Raises ValueError for another kind of folder; the message says what is missing."""
    files: dict[str, tuple[dict[str, Any], list[Any]]] = {}  # answers by prompt, and records
    try:
        started = datetime.fromisoformat(read_manifest(folder)["started"]).timestamp()
        for row in read_rows(folder):
            name = re.sub(r"[^\w.-]", "_", f"{row['method']}-temp{row['temperature']:g}")
            answers, records = files.setdefault(name, ({}, []))
            prompt, histogram = str(row["prompt_id"]), row["acceptance_histogram"]
            answer = {"question_id": int(prompt) if prompt.isdecimal() else prompt, "category": row["category"]}
            about = {"model_id": name, "choices": [], "tstamp": started}
            choices = answers.setdefault(prompt, answer | about)["choices"]
            choice: dict[str, Any] = {"index": len(choices), "turns": [row["text"]]}
            choice |= {"decoding_steps": [row["num_rounds"]], "new_tokens": [row["num_emitted_tokens"]]}
            choice |= {"wall_time": [row["prefill_seconds"] + row["seconds"]]}
            choice["accept_lengths"] = [1 + n for n, rounds in enumerate(histogram) for _ in range(rounds)]
            counts = histogram, row["num_draft_tokens"], row["num_emitted_tokens"]
            records.append(aiperf_summary(*counts, f"{prompt}-{choice['index']}"))
            choices.append(choice)
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder)!r} is no run folder of experiments.compare ({error})") from None
    if not files:
        raise ValueError(f"{str(folder)!r} has no results")
    out = folder / "answers" if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    for name, (answers, records) in files.items():
        for file, entries in (f"{name}.jsonl", answers.values()), (f"{name}.aiperf.jsonl", records):
            write_text(out / file, "".join(json_text(entry) + "\n" for entry in entries))
    return [out / f"{name}.jsonl" for name in files]


def aiperf_summary(histogram: Sequence[int], drafted: int, emitted: int, name: str) -> dict[str, Any]:
    """AIPerf's acceptance record of a request, without its rounds; `histogram[i]` rounds accepted i tokens.

    `completion_tokens` is one more than the emitted tokens: in other engines the first token comes from prefill and
    belongs to no round.
    """
    rounds, total = int(sum(histogram)), int(sum(count * n for count, n in enumerate(histogram)))
    longest = len(histogram) - 1
    return {
        "engine": "specdec_jax",
        "mean_acceptance_length": 1 + total / max(rounds, 1),
        "draft_acceptance_rate": total / max(drafted, 1),
        "acceptance_histogram": {str(count): int(n) for count, n in enumerate(histogram) if n},
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": int(drafted),
        "num_spec_steps": rounds,
        "num_spec_tokens": longest if drafted == longest * rounds else None,
        "completion_tokens": int(emitted) + 1,
        "id": name,
    }


main = command(SpecBench, spec_bench, __doc__)

if __name__ == "__main__":
    sys.exit(main())
