"""Export of drafters in loadable formats, with a model card.

Weights are rounded once, from the float32 weights of training.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.loading import Tokenizer, save_hf_folder, save_orbax
from specdec_jax.loading.new_folder import new_folder
from specdec_jax.loading.precision import check_dtype
from specdec_jax.strategy import nearest

WRITERS = {"hf": save_hf_folder, "orbax": save_orbax}
FACTS = ("target", "parameters")
SECTIONS = ("data", "recipe", "cost", "figures", "notes")


def export(
    path: str | Path,
    config: Any,
    params: Any,
    tokenizer: Tokenizer,
    *,
    dtype: Any = "bfloat16",
    card: str,
    formats: Sequence[str] = ("hf", "orbax"),
    overwrite: bool = False,
) -> None:
    """Writes a model for `load_model`: a single format to `path` itself, several to path/hf and path/orbax.

    The card is README.md in each. The parameters may have any dtype, but only float32 ones are rounded once.
    The folder is written atomically. Raises FileExistsError unless `overwrite`; ValueError: an unknown format
    or dtype, parameters that do not fit the config or are not finite in that dtype.
    """
    stored = check_dtype(dtype)
    for name in formats:
        if name not in WRITERS:
            raise ValueError(f"unknown export format {name!r}{nearest(name, WRITERS)}")
    if not formats:
        raise ValueError(f"export needs a format (there are: {', '.join(sorted(WRITERS))})")
    rounded = jax.tree_util.tree_map_with_path(lambda where, leaf: _rounded(where, leaf, stored), params)
    with new_folder(path, overwrite=overwrite) as folder:
        for name in formats:
            inside = folder if len(formats) == 1 else folder / name
            WRITERS[name](inside, config, rounded, tokenizer, overwrite=inside == folder)
            (inside / "README.md").write_text(card, encoding="utf-8")


def model_card(fields: Mapping[str, Any]) -> str:
    """A model card in Markdown.

    `name` is required. `license`, `base_model` (a hub id) and `language` go to the header, with `tags` and
    `library_name`; `summary` (text), `target` and `parameters` (their number) follow the name;
    `data`, `recipe`, `cost` and `notes` are text or a mapping; `figures` is text, or maps a task to {column: number,
    text or (estimate, low, high)}. Missing fields are omitted. Raises ValueError for another field.
    """
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["speculative-decoding", "drafter"]}
    in_header = ("license", "base_model", "language", *header)
    expected = {"name", "summary", *FACTS, *in_header, *SECTIONS}
    for name in fields:
        if name not in expected:
            raise ValueError(f"a model card has no field {name!r}{nearest(name, expected)}")
    if not fields.get("name"):
        raise ValueError("a model card needs a name")
    header |= {name: fields[name] for name in in_header if name in fields}
    lines = ["---", *(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in header.items()), "---"]
    facts = _facts({name: fields[name] for name in FACTS if name in fields})
    blocks = ["\n".join(lines), f"# {fields['name']}", str(fields.get("summary", "")), facts]
    for name in SECTIONS:
        if fields.get(name):
            body = (
                _table(fields[name])
                if name == "figures" and not isinstance(fields[name], str)
                else _facts(fields[name])
            )
            blocks += [f"## {name.capitalize()}", body]
    return "\n\n".join(block.strip() for block in blocks if block.strip()) + "\n"


def _facts(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"- {name}: {_cell(fact)}" for name, fact in value.items())
    return str(value)


def _table(figures: Any) -> str:
    """A table with a row per task; columns in order of first appearance, with a dash for missing values."""
    if not isinstance(figures, Mapping) or not all(isinstance(row, Mapping) for row in figures.values()):
        raise ValueError(f"figures of a model card map a task to a mapping of columns, got {figures!r}")
    columns = list(dict.fromkeys(column for row in figures.values() for column in row))
    rows = [["task", *columns], ["---"] * (len(columns) + 1)]
    rows += [[task, *(_cell(row[name]) if name in row else "–" for name in columns)] for task, row in figures.items()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _cell(value: Any) -> str:
    """0.412 for a number, 0.41 [0.38, 0.44] for one with an interval, 0.41 if the interval is unknown."""
    if isinstance(value, (list, tuple)) and len(value) == 3 and all(isinstance(x, (float, np.floating)) for x in value):
        estimate, low, high = value
        return f"{estimate:.2f}" if np.isnan(low) else f"{estimate:.2f} [{low:.2f}, {high:.2f}]"
    if isinstance(value, (list, tuple)):
        return ", ".join(_cell(entry) for entry in value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, (float, np.floating)) else str(value)


def _rounded(where: Any, leaf: Any, dtype: Any) -> jax.Array:
    rounded = jnp.asarray(leaf).astype(dtype)
    if not bool(jnp.all(jnp.isfinite(rounded))):
        name = jax.tree_util.keystr(where, simple=True, separator="/")
        raise ValueError(f"parameter {name} is not finite in {dtype}: it is not worth exporting")
    return rounded
