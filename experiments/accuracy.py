"""Does lossy verification keep a task's accuracy? Exact match on GSM8K and pass@1 on HumanEval, by verifier.

Question:  How many answers are right with each verifier, and how many tokens does a verification give?
Command:   python -m experiments.accuracy hub:gsm8k@test.jsonl:40 hub:openai_humaneval@HumanEval.jsonl:4
           --target runs/coder-1.5b.gguf --drafter runs/coder-0.5b.gguf [--verifiers rejection typical] ...
Time:      half an hour a verifier on 2 busy cores, for 33 questions and 41 functions
Output:    runs/accuracy-<time>/, with table.md and results.jsonl: a line a verifier and question, with the text

The files are those of the sets' repositories (or `hub:gsm8k`, which needs the package `datasets`). The last number of
an answer is compared with the set's; a function is run against the set's tests in a process of its own, with limits on
time and memory but with your rights: it is a model's code. Verifiers share questions, seeds and drafts of a static
length, so their right answers are compared in pairs, by McNemar's exact test against the first. A lossless verifier
gives every answer with the target's own probability; greedily, the target's own answer.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.console import Console
from scipy.stats import binomtest
from tyro.conf import Positional

from experiments.lib.commands import Output, Served, bar, command
from experiments.lib.prompts import entries, every_nth
from experiments.lib.run_folder import RunFolder
from experiments.lib.tables import at_temperature, interval, markdown, publish
from specdec_jax.metrics.judging import alike
from specdec_jax.ranges import Between
from specdec_jax.stopping import static
from specdec_jax.text.generation import build_pair, decode, encode, prepare
from specdec_jax.text.sampling_params import NewTokens, SamplingParams, Seed, Temperature
from specdec_jax.text.strategies import choose

KEY = "verifier", "task", "id"
ANSWERS = {"math_reasoning": ("answer",), "code": ("prompt", "test", "entry_point")}  # columns that say what is right
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
SECONDS = 10  # of a processor, for a function's tests
LIMITS = f"""import resource
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
"""


@dataclass(frozen=True)
class Accuracy(Output, Served):
    """Accuracy by verifier."""

    tasks: Positional[tuple[str, ...]] = ()  # hub:gsm8k and hub:openai_humaneval, with @FILE a copy, and :n every n-th.
    verifiers: tuple[str, ...] = ("rejection", "typical", "lenience(lenience=0.5)", "lenience(lenience=0.1)")
    """As `--verifier` elsewhere; the first is what the others are compared with."""
    draft_length: Annotated[int, Between(1)] = 4  # Drafts of every round.
    temperature: Temperature = 0.7  # 0 is greedy.
    max_new_tokens: NewTokens = 384  # Most tokens of an answer.
    batch: Annotated[int, Between(1)] = 16  # Answers decoded at once.
    seed: Seed = 0  # Question i of a task is sampled with seed + i.


class Question(NamedTuple):
    """What is asked, and the row of the set that says what is right."""

    id: str
    text: str
    seed: int
    row: Mapping[str, Any]


def is_right(text: str, row: Mapping[str, Any]) -> bool:
    """Whether an answer is right: by the row's tests where it has some, else by its last number."""
    if "test" not in row:
        numbers = [NUMBER.findall(words) for words in (text, row["answer"].rpartition("####")[2])]
        last, right = (float(each[-1].replace(",", "")) if each else None for each in numbers)
        return last is not None and last == right
    code = max(CODE.findall(text), key=len, default=text)
    program = f"{LIMITS}{row['prompt']}\n\n{code}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"
    options: Any = {"input": program.encode(), "capture_output": True, "timeout": 2 * SECONDS}
    with tempfile.TemporaryDirectory() as folder:
        try:
            return subprocess.run([sys.executable, "-I", "-"], cwd=folder, **options).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def accuracy(config: Accuracy, console: Console) -> None:
    """Answers what is missing and writes the table. Raises ValueError, FileNotFoundError for invalid input."""
    if not config.tasks:
        raise ValueError("name a task: hub:gsm8k or hub:openai_humaneval")
    verifiers = {words: choose("verifier", words) for words in config.verifiers}
    tasks: dict[str, list[Question]] = {}
    for source in config.tasks:
        name, every = every_nth(source)
        lines = entries(name)[::every]
        task = lines[0][0]["category"]
        if task in tasks:
            raise ValueError(f"{source} is a second set of {task}")
        if task not in ANSWERS:
            raise ValueError(f"{source} has no answers to compare with")
        for line, row in lines:
            if lacking := [column for column in ANSWERS[task] if not isinstance(row.get(column), str)]:
                raise ValueError(f"{source}: row {line['id']} has no text {lacking[0]!r}")
        tasks[task] = [
            Question(line["id"], line["turns"][0], (config.seed + number) % 2**32, row)
            for number, (line, row) in enumerate(lines)
        ]
    folder = RunFolder.create("accuracy", config, config.out)
    target, drafter = config.load(console)
    pair = build_pair(target, drafter, policy=static(draft_length=config.draft_length))
    for words, verifier in verifiers.items():
        using = pair.using(verifier=verifier)
        for task, questions in tasks.items():
            wanted = {(words, task, question.id): question for question in questions}
            missing = [wanted[key] for key in folder.missing(KEY, wanted)]
            done = len(questions) - len(missing)
            with bar(console, f"{words}, {task}", len(questions), done, "answers") as update:
                for members in alike([len(encode(target, question.text)) for question in missing], config.batch):
                    some = [missing[member] for member in members]
                    sampling = SamplingParams(config.max_new_tokens, config.temperature)
                    request = prepare(using, [each.text for each in some], sampling)
                    request.options["seed"] = [question.seed for question in some]
                    for question, answer in zip(some, decode(using, request).results, strict=True):
                        counts = {name: answer.statistics[name] for name in ("num_emitted_tokens", "num_rounds")}
                        right = {"right": is_right(answer.text, question.row), "ended": answer.finish_reason}
                        key = dict(zip(KEY, (words, task, question.id), strict=True))
                        folder.append(key | right | counts | {"text": answer.text})
                    done += len(some)
                    update(done)
    about = f"{target.name} with {drafter.name}, {at_temperature(config.temperature)}, drafts of {config.draft_length}"
    publish(folder, f"{about}.\n\n{table(folder.rows(), config.verifiers)}\n", console)


def table(results: list[dict[str, Any]], verifiers: tuple[str, ...]) -> str:
    """Right answers with Wilson's intervals, what changed against the first verifier, and tokens a verification."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in results):
        by = {
            words: {row["id"]: row for row in results if (row["task"], row["verifier"]) == (task, words)}
            for words in verifiers
        }
        first = by[verifiers[0]]
        for words, rows in by.items():
            right = [row["right"] for row in rows.values()]
            share = (np.mean(right), *binomtest(sum(right), len(right)).proportion_ci(method="wilson"))
            changed = [row["right"] for name, row in rows.items() if row["right"] is not first[name]["right"]]
            won, against = sum(changed), "–" if rows is first else "the same"
            if changed:
                p_value = binomtest(won, len(changed)).pvalue
                against = f"+{won} -{len(changed) - won}, p = {p_value:.2f}"
            cut = sum(row["ended"] == "length" for row in rows.values())
            tokens, rounds = (sum(row[name] for row in rows.values()) for name in ("num_emitted_tokens", "num_rounds"))
            lines.append([task, words, interval(share), against, str(cut), f"{tokens / rounds:.2f}"])
    heads = ("task", "verifier", "right", f"against {verifiers[0]}", "cut off", "tokens a round")
    return markdown(heads, lines)


main = command(Accuracy, accuracy, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
