"""`load_model`: one name, whatever it names."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax.loading.builtin import BUILTIN
from specdec_jax.loading.checkpoint import Checkpoint
from specdec_jax.loading.families import config_class, family
from specdec_jax.loading.gguf_file import open_gguf
from specdec_jax.loading.hf_folder import open_hf_folder
from specdec_jax.loading.suggest import listed, nearest
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.types import LanguageModel, Params

DTYPES = ("bfloat16", "float16", "float32")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class LoadedModel(NamedTuple):
    """A model with its weights and its tokenizer."""

    model: LanguageModel
    params: Params
    tokenizer: Tokenizer
    name: str  # what it was asked for by
    config: Any  # the family's, e.g. models.llama.LlamaConfig


def load_model(source: str | Path, *, dtype: Any = "bfloat16") -> LoadedModel:
    """Loads a model by a built-in name, a .gguf file, a folder (Hugging Face's or a checkpoint of ours), or a hub id.

    `dtype` is that of the weights, the cache and the inputs of matrix products: 'bfloat16', 'float16' or 'float32'.
    Raises FileNotFoundError or ValueError, one message that names the file, tensor or value at fault.
    """
    name = str(source)
    checked = check_dtype(dtype)
    return _assemble(_open(name), checked, name)


def check_dtype(dtype: Any) -> Any:
    """A name or a dtype as numpy's. Raises ValueError for what no weights are kept in."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}{nearest(name, DTYPES)}; there are {listed(DTYPES)}")
    return jnp.dtype(name)


def _open(name: str) -> Checkpoint:
    path = BUILTIN[name]() if name in BUILTIN else Path(name).expanduser()
    if path.is_dir():
        return open_hf_folder(path)
    return open_gguf(path)


def _assemble(checkpoint: Checkpoint, dtype: Any, name: str) -> LoadedModel:
    where, settings, named, tokenizer = checkpoint
    try:
        module = family(settings.get("model_type"))
        config = config_class(module).from_hf(settings)
        params = module.params_from_named(config, named, dtype)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    model = module.language_model(config, dtype)
    return LoadedModel(model, params, tokenizer.for_model(model.spec.eos_ids, model.spec.vocab_size), name, config)
