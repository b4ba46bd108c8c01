"""A drafter as others load it, a card that says what it is, and large files in parts that travel.

Weights are rounded once, from the float32 they were trained in. Parts are plain pieces of a file, so they serve any
file, a target's GGUF too; a safetensors index could not cut the one tensor (the embedding) that is most of a drafter.
"""

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.loading import Tokenizer, save_hf_folder, save_orbax
from specdec_jax.loading.load import check_dtype
from specdec_jax.loading.new_folder import new_folder, replacing
from specdec_jax.loading.suggest import listed, nearest

WRITERS = {"hf": save_hf_folder, "orbax": save_orbax}
PARTS = ".parts.json"  # after the file's name
FORMAT = 1
BLOCK = 2**20
FACTS = ("target", "parameters")
SECTIONS = ("data", "recipe", "cost", "figures", "notes")


class Piece(NamedTuple):
    """A part, or the whole file, as the list of parts has it."""

    file: str
    size: int  # bytes
    sha256: str


def export(
    path: str | Path,
    config: Any,
    params: Any,
    tokenizer: Tokenizer,
    *,
    dtype: Any = "bfloat16",
    card: str,
    formats: Sequence[str] = ("hf", "orbax"),
    split_mib: float | None = None,
    overwrite: bool = False,
) -> None:
    """Writes what `load_model` reads: of one format in `path` itself, of several in path/hf and path/orbax.

    The card is README.md in each. The parameters' own dtype does not matter, but float32 ones are rounded only once.
    `split_mib`: files larger than so many MiB are left as parts, to be put together by `join_folder`. The folder
    appears complete or not at all. Raises FileExistsError unless `overwrite`; ValueError: an unknown format or dtype,
    parameters that do not fit the config or are not finite in that dtype.
    """
    kept = check_dtype(dtype)
    for name in formats:
        if name not in WRITERS:
            raise ValueError(f"unknown export format {name!r}{nearest(name, WRITERS)}; there are {listed(WRITERS)}")
    if not formats:
        raise ValueError(f"export needs a format; there are {listed(WRITERS)}")
    if split_mib is not None:
        _bytes(split_mib)
    rounded = jax.tree_util.tree_map_with_path(lambda where, leaf: _rounded(where, leaf, kept), params)
    with new_folder(path, overwrite=overwrite) as folder:
        for name in formats:
            inside = folder if len(formats) == 1 else folder / name
            WRITERS[name](inside, config, rounded, tokenizer, overwrite=inside == folder)
            (inside / "README.md").write_text(card, encoding="utf-8")
        if split_mib is not None:
            for file in [file for file in folder.rglob("*") if file.is_file()]:
                if file.stat().st_size > _bytes(split_mib):
                    split_file(file, split_mib)
                    file.unlink()


def split_file(path: str | Path, mib: float, *, folder: str | Path | None = None) -> list[Path]:
    """Cuts a file into parts of at most `mib` MiB, NAME.part000 ... and NAME.parts.json, in its own folder or another.

    The file itself stays. The list comes last, so without it there is nothing to join. Returns the parts. Raises
    FileNotFoundError, or ValueError for a size that is not positive.
    """
    path, limit = Path(path), _bytes(mib)
    if not path.is_file():
        raise FileNotFoundError(f"no such file to cut into parts: {path}")
    folder = path.parent if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / f"{path.name}{PARTS}"
    _forget(index)
    whole, pieces = hashlib.sha256(), []
    try:
        with open(path, "rb") as source:
            for number in range(max(1, -(-path.stat().st_size // limit))):
                part = folder / f"{path.name}.part{number:03}"
                with _new_file(part) as file:
                    size, digest = _copy(source, file, limit, whole)
                pieces.append(Piece(part.name, size, digest))
        total = Piece(path.name, sum(piece.size for piece in pieces), whole.hexdigest())
        content = {"format": FORMAT, **total._asdict(), "parts": [piece._asdict() for piece in pieces]}
        with _new_file(index) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())
    except BaseException:
        _forget(index)
        raise
    return [folder / piece.file for piece in pieces]


def join_parts(index: str | Path) -> Path:
    """Puts a file together from the list of its parts (NAME.parts.json), beside it; the parts stay.

    The file appears complete and verified or not at all; one that is there already and right is left. Raises
    FileNotFoundError without the list, ValueError naming the part that is missing or damaged, FileExistsError where
    another file has the name.
    """
    index = Path(index)
    total, pieces = _read(index)
    path = index.parent / total.file
    if path.exists():
        if path.is_file() and path.stat().st_size == total.size and _sha256(path) == total.sha256:
            return path
        raise FileExistsError(f"{path} exists and is not what {index.name} lists: delete one of them")
    whole = hashlib.sha256()
    with _new_file(path) as file:
        for piece in pieces:
            part = index.parent / piece.file
            if not part.is_file():
                raise ValueError(f"{part} is missing: {index.name} lists it")
            with open(part, "rb") as source:
                size, digest = _copy(source, file, part.stat().st_size, whole)
            if (size, digest) != (piece.size, piece.sha256):
                raise ValueError(
                    f"{part} is damaged: its {size} bytes are not the {piece.size} that {index.name} lists"
                )
        if whole.hexdigest() != total.sha256:
            raise ValueError(f"{index} is damaged: its parts are right and the file they make is not")
    return path


def join_folder(folder: str | Path) -> list[Path]:
    """`join_parts` for every list of parts in a folder and below it; the files. Raises as it does."""
    return [join_parts(index) for index in sorted(Path(folder).rglob(f"*{PARTS}"))]


def model_card(fields: Mapping[str, Any]) -> str:
    """A model card in Markdown.

    `name` is needed. `license` (apache-2.0), `base_model` (HuggingFaceTB/SmolLM2-135M-Instruct), `language`, `tags` and
    `library_name` go to the header; `summary` (text), `target` and `parameters` (their number) stand below the name;
    `data`, `recipe`, `cost` and `notes` are text or a mapping of facts; `figures` is text, or maps a task to {column:
    number, text or (estimate, low, high)}. What is not given is left out. Raises ValueError for another field.
    """
    header: dict[str, Any] = {
        "license": "apache-2.0",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "language": "en",
        "library_name": "transformers",
        "tags": ["speculative-decoding", "drafter"],
    }
    known = {"name", "summary", *FACTS, *header, *SECTIONS}
    for name in fields:
        if name not in known:
            raise ValueError(f"a model card has no field {name!r}{nearest(name, known)}; there are {listed(known)}")
    if not fields.get("name"):
        raise ValueError("a model card needs a name")
    header |= {name: fields[name] for name in header if name in fields}
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
    """A row a task; columns in the order they first appear, with a dash where a task lacks one."""
    if not isinstance(figures, Mapping) or not all(isinstance(row, Mapping) for row in figures.values()):
        raise ValueError(f"figures of a model card map a task to a mapping of columns, got {figures!r}")
    columns = list(dict.fromkeys(column for row in figures.values() for column in row))
    rows = [["task", *columns], ["---"] * (len(columns) + 1)]
    rows += [[task, *(_cell(row[name]) if name in row else "–" for name in columns)] for task, row in figures.items()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _cell(value: Any) -> str:
    """0.412 for a number, 0.41 [0.38, 0.44] for one with its interval, 0.41 alone where that is unknown."""
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


def _bytes(mib: float) -> int:
    size = int(mib * 2**20)
    if size < 1:
        raise ValueError(f"the size of a part must be positive, got {mib!r} MiB")
    return size


def _copy(source: BinaryIO, target: BinaryIO, most: int, whole: Any) -> tuple[int, str]:
    """Up to `most` bytes, block by block; (bytes, their sha256), and `whole` has seen them too."""
    digest, size = hashlib.sha256(), 0
    while block := source.read(min(BLOCK, most - size)):
        target.write(block)
        digest.update(block)
        whole.update(block)
        size += len(block)
    return size, digest.hexdigest()


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path`, renamed to it when the block ends well and removed when it does not."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        yield file


def _forget(index: Path) -> None:
    """Removes a list of parts and then the parts, so that no list ever names parts of another file."""
    index.unlink(missing_ok=True)
    for part in index.parent.glob(f"{glob.escape(index.name.removesuffix(PARTS))}.part[0-9]*"):
        part.unlink()


def _read(index: Path) -> tuple[Piece, list[Piece]]:
    """The file and its parts. Raises FileNotFoundError, or ValueError naming a list that is damaged."""
    if not index.is_file():
        raise FileNotFoundError(f"no such list of parts: {index}")
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']!r}; format {FORMAT} is served")
        total, *pieces = [
            Piece(str(entry["file"]), int(entry["size"]), str(entry["sha256"]))
            for entry in (content, *content["parts"])
        ]
        for name in (total.file, *(piece.file for piece in pieces)):
            if not name or name in (".", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} is no file's name")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged: {type(error).__name__}: {error}") from None
    return total, pieces


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
