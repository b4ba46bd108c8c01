"""Reading and writing of Hugging Face folders: config.json, .safetensors files, tokenizer.json."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec_jax.drafters.draft_models.reduced_head import check_whole
from specdec_jax.loading.families import config_of, family_of
from specdec_jax.loading.new_folder import new_folder
from specdec_jax.loading.tokenizer import Tokenizer, read_json, tokenizer_from_folder

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"BF16": "bfloat16", "F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool"} | {
    f"{short}{bits}": f"{name}{bits}" for short, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
"""Safetensors' names of types, except floating types of eight bits or less, whose scales are not supported."""


class Checkpoint(NamedTuple):
    """The result of every loader, before conversion by a model family: weights with Hugging Face's names."""

    where: str  # the file or folder, for messages
    config: Any  # the family's
    named: Any  # an iterable of (name, array), each read on access; None: parameters in Orbax's format
    tokenizer: Tokenizer


def open_hf_folder(folder: str | Path) -> Checkpoint:
    """Reads config and tokenizer and the headers of all weight files; tensors are read one by one on access.

    Raises FileNotFoundError for a missing file and ValueError for a damaged one or an unsupported family, naming it,
    before any tensor is read. Weights are checked before the tokenizer.
    """
    folder = Path(folder)
    config = read_config(folder)
    files = [folder / name for name in weight_names(folder)]
    for path in files:
        if not path.is_file():
            bins = sorted(path.name for path in folder.glob("*.bin"))
            hint = f" ({bins[0]} is not read: save it with safe_serialization)" if bins else ""
            raise FileNotFoundError(f"no such weight file: {path}{hint}")
        with _open(path) as file:
            if not file.keys():
                raise ValueError(f"{path} holds no tensors")
    return Checkpoint(str(folder), config, _tensors(files), tokenizer_from_folder(folder))


def read_config(folder: Path) -> Any:
    """The family's config, with the end ids of generation_config.json, if it has any, as used by `generate`.

    Raises FileNotFoundError, or ValueError for a damaged config.json, quantised weights or an unsupported family.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}")
    config = read_json(folder / CONFIG)
    if not config.get("model_type"):
        raise ValueError(f"{folder / CONFIG} has no model_type")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ValueError(f"{folder / CONFIG} says its weights are quantised ({method!r}); load an unquantised one")
    eos = read_json(folder / GENERATION).get("eos_token_id")
    return config_of(folder / CONFIG, config["model_type"], config | ({} if eos is None else {"eos_token_id": eos}))


def weight_names(folder: Path) -> list[str]:
    """The .safetensors files with the weights: those of the index, or the single one.

    Raises ValueError for an index with names that are not files in the folder.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} is damaged: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or ".." in Path(file).parts or Path(file).is_absolute():
            raise ValueError(f"{folder / INDEX} is damaged: weight_map has no file of the folder for {name}: {file!r}")
    return sorted(set(weight_map.values()))


def save_hf_folder(
    path: str | Path, config: Any, params: Any, tokenizer: Tokenizer, *, overwrite: bool = False
) -> None:
    """Writes a folder for transformers and `load_model` atomically, in the parameters' dtype.

    `config` is a family's config, `params` its parameter tree. Raises FileExistsError unless `overwrite`, ValueError
    if the parameters do not match the config.
    """
    check_whole(params)
    named = family_of(config).named_from_params(config, params)
    written = config.to_hf() | {"dtype": str(next(iter(named.values())).dtype)}
    with new_folder(path, overwrite=overwrite) as folder:
        whole = {name: np.ascontiguousarray(array) for name, array in named.items()}
        save_file(whole, folder / SINGLE, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(folder)


class _Stored:
    """A tensor of a .safetensors file, whose parts are read on access: memory-mapped parts would count as memory."""

    def __init__(self, path: Path, name: str, shape: Sequence[int], dtype: np.dtype):
        self.path, self.name, self.shape, self.dtype = path, name, tuple(shape), dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        with _open(self.path) as file, _named_in_errors(self.path, self.name):
            return file.get_slice(self.name)[index]


def _tensors(files: list[Path]) -> Iterator[tuple[str, _Stored]]:
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open has no iterator
                with _named_in_errors(path, name):
                    stored = file.get_slice(name)
                    if (kind := stored.get_dtype()) not in DTYPES:
                        raise ValueError(f"its type {kind} is not served")
                    tensor = _Stored(path, name, stored.get_shape(), jnp.dtype(DTYPES[kind]))
                yield name, tensor


@contextmanager
def _named_in_errors(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: tensor {name} cannot be read: {error}") from None


def _open(path: Path) -> Any:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    try:
        return safe_open(path, "numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or damaged: {error}") from None
