"""Prompts from data sets of the Hugging Face hub, by name: which rows are taken and what the model is asked about them.

`hub:NAME` loads the set with the package `datasets`, which is optional (pip install datasets). `hub:NAME@FOLDER` reads
a local copy instead: .jsonl files as they are, .parquet files with `pyarrow`. NAME is the short name or the hub's id.

| name | hub id | config, split | the prompt |
| --- | --- | --- | --- |
| cnn_dailymail | abisee/cnn_dailymail | 3.0.0, test | Summarise the following text in ... sentences. + article |
| databricks-dolly-15k | databricks/databricks-dolly-15k | train | instruction, and context if there is one |
| wmt19/de-en | wmt/wmt19 | de-en, validation | Translate the following German text to English. + translation.de |
| gsm8k | openai/gsm8k | main, test | question + Work it out step by step. |
| openai_humaneval | openai/openai_humaneval | test | Complete the following Python function. + prompt as a code block |

The first three are the sets of AdaEDL (arXiv 2410.18351), which leaves its instructions open: these are ours. It takes
the creative writing of Dolly, whose rows of other categories are left out here too; WMT19 has no public test split.
Rows with nothing to ask about are skipped.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec_jax.strategy import nearest
from specdec_jax.text.json_lines import json_lines

PREFIX = "hub:"
SUMMARISE = "Summarise the following text in two or three sentences.\n\n"
TRANSLATE = "Translate the following German text to English.\n\n"
STEP_BY_STEP = "\nWork it out step by step."
COMPLETE = "Complete the following Python function.\n\n"

Row = Mapping[str, Any]


class HubDataset(NamedTuple):
    """How a set's rows become prompts."""

    hub_id: str
    config: str | None
    split: str
    category: str  # of its prompts: the task, as Spec-Bench names it where it has one
    ask: Callable[[Row], str]  # the text of the user's turn, "" for nothing; KeyError for a missing column
    id_key: str | None = None  # the column that names a row; None: its number in the split
    keep: Callable[[Row], bool] = lambda row: True


def _dolly(row: Row) -> str:
    context = row["context"].strip()
    return row["instruction"].strip() + (f"\n\n{context}" if context else "")


def _asked(before: str, text: str, after: str = "") -> str:
    return f"{before}{text.strip()}{after}" if text.strip() else ""


DATASETS = {
    "cnn_dailymail": HubDataset(
        "abisee/cnn_dailymail", "3.0.0", "test", "summarization", lambda row: _asked(SUMMARISE, row["article"]), "id"
    ),
    "databricks-dolly-15k": HubDataset(
        "databricks/databricks-dolly-15k",
        None,
        "train",
        "instructions",
        _dolly,
        keep=lambda row: row["category"] == "creative_writing",
    ),
    "wmt19/de-en": HubDataset(
        "wmt/wmt19", "de-en", "validation", "translation", lambda row: _asked(TRANSLATE, row["translation"]["de"])
    ),
    "gsm8k": HubDataset(
        "openai/gsm8k", "main", "test", "math_reasoning", lambda row: _asked("", row["question"], STEP_BY_STEP)
    ),
    "openai_humaneval": HubDataset(
        "openai/openai_humaneval",
        None,
        "test",
        "code",
        lambda row: _asked(COMPLETE + "```python\n", row["prompt"], "\n```"),
        "task_id",
    ),
}


def entries(source: str) -> list[dict[str, Any]]:
    """The lines that `hub:NAME` or `hub:NAME@FOLDER` would have as a prompt file: id, category and turns.

    Raises:
        FileNotFoundError: no such folder, or no file of the set in it.
        ValueError: an unknown name, a package that is missing, a set that cannot be loaded, or a row of another shape.
    """
    name, _, folder = source.removeprefix(PREFIX).partition("@")
    dataset = find_dataset(name)
    rows = _from_hub(source, dataset) if not folder else _from_copy(Path(folder), dataset)
    return as_entries(dataset, rows)


def find_dataset(name: str) -> HubDataset:
    """A set by its short name or the hub's id. Raises ValueError with the nearest name."""
    for short, dataset in DATASETS.items():
        ids = (dataset.hub_id, f"{dataset.hub_id}/{dataset.config}")
        if name == short or name in ids:
            return dataset
    raise ValueError(f"no data set {name!r} is known by name{nearest(name, DATASETS)}")


def as_entries(dataset: HubDataset, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows of a set's split as lines of a prompt file.

    Raises:
        ValueError: a row lacks a column or has something else than text in it; the message says which row.
    """
    found = []
    for number, row in enumerate(rows):
        try:
            text = dataset.ask(row) if dataset.keep(row) else ""
            name = str(number) if dataset.id_key is None else row[dataset.id_key]
        except (KeyError, TypeError, AttributeError) as error:
            what = f"has no column {error}" if isinstance(error, KeyError) else "has another shape"
            there = ", ".join(row) if isinstance(row, Mapping) else repr(row)
            raise ValueError(f"{dataset.hub_id}: row {number} {what} (it has: {there})") from None
        if text:
            found.append({"id": str(name), "category": dataset.category, "turns": [text]})
    if not found:
        raise ValueError(f"{dataset.hub_id}: no row to make a prompt of")
    return found


def _from_hub(source: str, dataset: HubDataset) -> Iterable[Row]:
    datasets = _optional("datasets", f"{source} (or a local copy: {source}@FOLDER)")
    try:
        return datasets.load_dataset(dataset.hub_id, dataset.config, split=dataset.split)
    except Exception as error:  # the package raises dozens of types, from requests' to its own
        raise ValueError(f"cannot load {dataset.hub_id} from the hub: {error}") from error


def _from_copy(folder: Path, dataset: HubDataset) -> Iterator[Row]:
    for path in _files(folder, dataset):
        if path.suffix == ".jsonl":
            yield from (row for _, row in json_lines(path))
        else:
            yield from _optional("pyarrow.parquet", str(path)).read_table(path).to_pylist()


def _files(folder: Path, dataset: HubDataset) -> Sequence[Path]:
    """The shards of the set's split below a folder laid out as on the hub, or the only file there."""
    if folder.is_file():
        return [folder]
    there = sorted(path for path in folder.rglob("*") if path.suffix in (".jsonl", ".parquet"))
    if not there:
        raise FileNotFoundError(f"no .jsonl or .parquet file of {dataset.hub_id} in {str(folder)!r}")
    of_config = [path for path in there if dataset.config in path.relative_to(folder).parts[:-1]] or there
    of_split = [path for path in of_config if re.match(rf"{dataset.split}\b", path.name)] or of_config
    if len({re.sub(r"-\d+-of-\d+(?=\.\w+$)", "", str(path)) for path in of_split}) > 1:
        names = ", ".join(path.name for path in of_split)
        raise ValueError(f"{str(folder)!r}: which of {names} is the split {dataset.split!r} of {dataset.hub_id}?")
    return of_split


def _optional(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"{what} needs the package {package!r}, which is optional: pip install {package}") from None
