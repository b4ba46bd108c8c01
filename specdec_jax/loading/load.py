"""`load_model`: loading of models by name or path."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specdec_jax.loading.builtin import BUILTIN
from specdec_jax.loading.draft_vocabulary import WAYS, read_tokens, split_source, with_draft_vocabulary
from specdec_jax.loading.families import config_of, family_of
from specdec_jax.loading.gguf.file import config_from_gguf, open_gguf
from specdec_jax.loading.gguf.reader import read_gguf
from specdec_jax.loading.hf_folder import CONFIG, Checkpoint, open_hf_folder, read_config
from specdec_jax.loading.hub import WEIGHT_FILES, hub_folder, hub_id
from specdec_jax.loading.orbax_checkpoint import MARKER, marked_config, open_orbax, restore_orbax
from specdec_jax.loading.precision import INT8, Precision, precision
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.meshes import placement
from specdec_jax.models.weights import Place, Table, num_bytes
from specdec_jax.sharding import mesh_here
from specdec_jax.strategy import nearest
from specdec_jax.types import LanguageModel, Params

SHARE_DRAFTER = 1e9
"""Minimum bytes of weights for sharding a drafter. An estimate: smaller ones may be read faster than two all-reduces
per layer take, a few microseconds each."""


class LoadedModel(NamedTuple):
    """A model with its weights and its tokenizer."""

    model: LanguageModel  # a `DraftModel` if it drafts by other means than `apply`
    params: Params
    tokenizer: Tokenizer
    name: str  # the requested source
    config: Any  # the family's config, e.g. models.llama.LlamaConfig

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as an argument of `load_model`."""
        dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(self.params)]
        return INT8 if INT8 in dtypes else dtypes[0]


def load_model(
    source: str | Path, *, dtype: Any = "bfloat16", revision: str | None = None, share_from: float = 0
) -> LoadedModel:
    """Loads a model by its source, the first match of the following.

    A built-in name (`smollm2`, `smollm2-drafter`, the latter also with suffix `-reading` or `-nano`), a .gguf file, a
    folder (Hugging Face's with config.json, or one written by `save_orbax`), a hub id (`org/name`, or
    `org/name@revision` with a branch, tag or commit, also as `revision`). A drafter with suffix `@8192` proposes only
    the 8,192 most frequent tokens and the text's own rare ones, with `@FILE.npy` those of the file
    (`loading/draft_vocabulary.py`).

    `dtype` is that of the weights, the cache and the inputs of matrix products: 'bfloat16', 'float16' or 'float32'; or
    'int8': as 'bfloat16', with matrices in eight bits with a scale for every row (`models/int8.py`), rounded while they
    are read; not for Orbax checkpoints.
    On a mesh (`meshes.make_mesh`) the weights are sharded, and each device reads its part of safetensors; models with
    fewer bytes than `share_from` are replicated, which suits small drafters.
    Raises FileNotFoundError or ValueError with a message that names the file, tensor or value.
    """
    name, stored = str(source), precision(dtype)
    mesh_here()  # refuses a mesh with other axes, for any model
    whole, vocabulary = split_source(name)
    if vocabulary:
        tokens = None if vocabulary in WAYS else read_tokens(vocabulary, _locate(whole, revision))
        loaded = load_model(whole, dtype=dtype, revision=revision, share_from=share_from)._replace(name=name)
        return loaded if tokens is None else with_draft_vocabulary(loaded, tokens)
    path, layout = _locate(name, revision), functools.partial(_place, stored, share_from)
    where, config, named, tokenizer = _opened(path)
    if named is None and stored.int8:
        raise ValueError(f"{path} is an Orbax checkpoint, read in its own shapes: int8 is made of safetensors and GGUF")
    if named is None:
        return _loaded(config, restore_orbax(path, config, stored.dtype, layout), tokenizer, stored, name)
    module, more = family_of(config), {"int8": True} if stored.int8 else {}
    try:
        params = module.params_from_named(config, named, stored.dtype, layout(module.parameter_table(config)), **more)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from None
    return _loaded(config, params, tokenizer, stored, name)


def outline(source: str | Path) -> LoadedModel:
    """As `load_model` without reading the weights: `params` is None, and a draft vocabulary is ignored.

    Raises as `load_model`, as far as determined by config and tokenizer.
    """
    opened = _opened(_locate(split_source(str(source))[0]))
    return _loaded(opened.config, None, opened.tokenizer, precision("bfloat16"), str(source))


def refuse_encoders(caller: str, *sources: str | Path) -> None:
    """Refuses models with an encoder, which `caller` does not support, by their configs, before weights are downloaded.

    A config that cannot be read is ignored; loading will report it. Raises ValueError naming the model, or
    FileNotFoundError: there is no such model.
    """
    for source in sources:
        path = _locate(split_source(str(source))[0], weights=False)
        try:  # the config alone, without a tokenizer
            if path.is_file():
                fields = config_from_gguf(read_gguf(path))
                config = config_of(path, fields["model_type"], fields)
            else:
                config = marked_config(path) if (path / MARKER).is_file() else read_config(path)
        except (ValueError, OSError):
            continue
        if family_of(config).language_model(config, precision("float32").dtype).spec.source is not None:
            raise ValueError(f"{caller} does not serve models with an encoder, such as T5, and {str(source)!r} has one")


def weight_bytes(config: Any, dtype: Any, share_from: float = 0) -> int:
    """Number of bytes per device of the weights of a family's config in a dtype, as sharded by `load_model`."""
    table, stored = family_of(config).parameter_table(config), precision(dtype)
    return num_bytes(table, stored.dtype, _place(stored, share_from, table), stored.int8)


def load_drafter(source: str | Path, *, dtype: Any = "bfloat16") -> LoadedModel:
    """As `load_model`; on a mesh a small drafter is replicated."""
    return load_model(source, dtype=dtype, share_from=SHARE_DRAFTER)


def download(*sources: str | Path) -> None:
    """Downloads the models of hub ids among the sources, with progress bars on a terminal. Raises as `load_model`."""
    for source in sources:
        whole, _ = split_source(str(source))
        if hub_id(whole):
            _locate(whole)


def _locate(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """The existing file or folder of a source; for a hub id the snapshot, with weights only if `weights`."""
    hub = hub_id(name)
    if revision is not None:
        if hub is None:
            raise ValueError(f"revision {revision!r} is for hub ids, and {name!r} is none")
        if hub[1] is not None:
            raise ValueError(f"{name!r} names a revision, and revision={revision!r} does too: give one of them")
        hub = hub[0], revision
    if name in BUILTIN:
        return BUILTIN[name]()
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if hub is not None:
        return hub_folder(hub[0], revision=hub[1], weights=weights)
    if name.lower().endswith(WEIGHT_FILES):
        raise FileNotFoundError(f"no such weight file: {name}")
    raise FileNotFoundError(
        f"no model {name!r}: it is no built-in name{nearest(name, BUILTIN)}, no file, no folder "
        "and no hub id (org/name or org/name@revision)"
    )


def _place(stored: Precision, share_from: float, table: Table) -> Place | None:
    """The sharding of a model's weights: replicated below `share_from` bytes."""
    return placement(replicate=num_bytes(table, stored.dtype, int8=stored.int8) < share_from)


def _opened(path: Path) -> Checkpoint:
    """Opens the file or folder without reading weights. Raises FileNotFoundError for no model."""
    if path.is_file():
        return open_gguf(path)
    if (path / CONFIG).is_file():
        return open_hf_folder(path)
    if (path / MARKER).is_file():
        return open_orbax(path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; give the file itself: {path / files[0]}" if files else ""
    raise FileNotFoundError(f"{path} is no model folder: it has neither {CONFIG} nor {MARKER}{hint}")


def _loaded(config: Any, params: Params, tokenizer: Tokenizer, stored: Precision, name: str) -> LoadedModel:
    model = family_of(config).language_model(config, stored.dtype)
    spec = model.spec
    return LoadedModel(model, params, tokenizer.for_model(spec.eos_ids, spec.vocab_size), name, config)
