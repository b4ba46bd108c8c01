"""Prompts: from files, Spec-Bench's among them, every n-th of them, or sets of the hub by name.

`hub:NAME` loads the set with the package `datasets`, which is optional (pip install datasets). `hub:NAME@FILE` reads a
copy of its split instead, .jsonl, or .parquet with `pyarrow`. NAME is the short name or the hub's id.

The first three of DATASETS are the sets of AdaEDL (arXiv 2410.18351), which leaves its instructions open: these are
ours. It takes the creative writing of Dolly, whose rows of other categories are left out here too; WMT19 has no public
test split. Rows with nothing to ask about are skipped.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specdec_jax.strategy import nearest
from specdec_jax.text.json_lines import json_lines
from specdec_jax.text.prompt_file import Prompt, check_limit, of_split, prompt_of, read_prompts

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")  # categories
HALVES = ("calibrate", "judge")


def load_prompts(source: str | Path, limit: int | None = None, split: str | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, of `hub:NAME`, or of `hub:NAME@FILE`, a local copy; of `SOURCE:n` every n-th.
    `split` comes first, then every n-th, then `limit`, so no limit moves a prompt from one half to the other. A source
    without splits is halved for "calibrate" and "judge". Raises FileNotFoundError for no such file, and ValueError for
    what `read_prompts` and `entries` refuse, an n below 1, or a split that is not there."""
    check_limit(limit)
    name, every = every_nth(str(source))
    if name.startswith(PREFIX):
        lines = enumerate(line for line, _ in entries(name))
        prompts = [prompt_of(entry, f"{name}, row {row}: ", default_id=str(row)) for row, entry in lines]
    else:
        prompts = read_prompts(name)
    if split in HALVES and all(prompt.split is None for prompt in prompts):
        seen: Counter[str] = Counter()  # those of each category by turns, in the given order
        for at, prompt in enumerate(prompts):
            prompts[at] = prompt._replace(split=HALVES[seen[prompt.category] % 2])
            seen[prompt.category] += 1
    return of_split(prompts, split, name)[::every][:limit]


def every_nth(path: str) -> tuple[str, int]:
    """FILE:n as (FILE, n); a FILE alone means all of it. Raises ValueError for an n below 1."""
    name, colon, number = path.rpartition(":")
    if not colon or not number.isdigit():
        return path, 1
    if int(number) < 1:
        raise ValueError(f"every n-th prompt needs an n of 1 or more, got {path!r}")
    return name, int(number)


def task_of(prompt: Prompt) -> str:
    """Its category; those of MT-bench are one task, as in Spec-Bench (arXiv 2401.07851)."""
    return "chat" if prompt.category in MT_BENCH else prompt.category


PREFIX = "hub:"
SUMMARISE = "Summarise the following text in two or three sentences.\n\n"
TRANSLATE = "Translate the following German text to English.\n\n"
STEP_BY_STEP = "\nWork it out step by step."
COMPLETE = "Complete the following Python function.\n\n"

Row = Mapping[str, Any]


class HubDataset(NamedTuple):
    """Where a set is, and what its rows are about."""

    hub_id: str
    config: str | None
    split: str
    category: str  # task of its prompts, by Spec-Bench's name if it has one
    id_key: str | None = None  # the column that names a row; None: its number in the split


def _question(before: str, text: str, after: str = "") -> str:
    return f"{before}{text.strip()}{after}" if text.strip() else ""


CREATIVE = "creative_writing"  # of Dolly's categories the one whose answers are free
DATASETS = {
    "cnn_dailymail": HubDataset("abisee/cnn_dailymail", "3.0.0", "test", "summarization", "id"),
    "databricks-dolly-15k": HubDataset("databricks/databricks-dolly-15k", None, "train", "instructions"),
    "wmt19/de-en": HubDataset("wmt/wmt19", "de-en", "validation", "translation"),
    "gsm8k": HubDataset("openai/gsm8k", "main", "test", "math_reasoning"),
    "openai_humaneval": HubDataset("openai/openai_humaneval", None, "test", "code", "task_id"),
}
ASK: dict[str, Callable[[Row], str]] = {  # the user's turn by category, "" for nothing; KeyError for a missing column
    "summarization": lambda row: _question(SUMMARISE, row["article"]),
    "instructions": lambda row: (
        _question("", row["instruction"]) + _question("\n\n", row["context"]) if row["category"] == CREATIVE else ""
    ),
    "translation": lambda row: _question(TRANSLATE, row["translation"]["de"]),
    "math_reasoning": lambda row: _question("", row["question"], STEP_BY_STEP),
    "code": lambda row: _question(COMPLETE + "```python\n", row["prompt"], "\n```"),
}


def entries(source: str) -> list[tuple[dict[str, Any], Row]]:
    """The lines that `hub:NAME` or `hub:NAME@FILE` would have as a prompt file: id, category and turns; each with the
    row it is of. Raises FileNotFoundError for no such file, and ValueError for an unknown name, a package that is
    missing, a set that cannot be loaded, or a row of another shape."""
    name, _, file = source.removeprefix(PREFIX).partition("@")
    names = {alias: entry for short, entry in DATASETS.items() for alias in (short, entry.hub_id)}
    names |= {f"{entry.hub_id}/{entry.config}": entry for entry in DATASETS.values()}
    if name not in names:
        raise ValueError(f"no data set {name!r} is known by name{nearest(name, DATASETS)}")
    dataset, path = names[name], Path(file)
    if not file:
        datasets = _optional("datasets", f"{source} (or a local copy: {source}@FILE)")
        try:
            rows = datasets.load_dataset(dataset.hub_id, dataset.config, split=dataset.split)
        except Exception as error:  # the package raises dozens of types, from requests' to its own
            raise ValueError(f"cannot load {dataset.hub_id} from the hub: {error}") from error
    elif not path.is_file():
        raise FileNotFoundError(f"no file {file!r} of the split {dataset.split!r} of {dataset.hub_id}")
    elif path.suffix == ".parquet":
        rows = _optional("pyarrow.parquet", file).read_table(path).to_pylist()
    else:
        rows = [row for _, row in json_lines(path)]
    lines = []
    for number, row in enumerate(rows):
        try:
            text = ASK[dataset.category](row)
            prompt_id = str(number) if dataset.id_key is None else row[dataset.id_key]
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"has no column {error}" if isinstance(error, KeyError) else "has another shape"
            there = ", ".join(row) if isinstance(row, Mapping) else repr(row)
            raise ValueError(f"{dataset.hub_id}: row {number} {problem} (it has: {there})") from None
        if text:
            lines.append(({"id": str(prompt_id), "category": dataset.category, "turns": [text]}, row))
    if not lines:
        raise ValueError(f"{dataset.hub_id}: no row to make a prompt of")
    return lines


def _optional(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"{purpose} needs the package {package!r}, which is optional: pip install {package}") from None
