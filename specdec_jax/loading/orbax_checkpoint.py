"""Orbax checkpoints of a model: parameters in Orbax's own format, config and tokenizer beside them.

folder/specdec_jax.json   marker: format number and the config as Hugging Face writes it
folder/params/            Orbax
folder/tokenizer/         tokenizer.json, tokenizer_config.json, chat_template.jinja
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specdec_jax.loading.families import config_class, family, family_of
from specdec_jax.loading.new_folder import new_folder
from specdec_jax.loading.tokenizer import Tokenizer, read_json, tokenizer_from_folder

MARKER, PARAMS, TOKENIZER = "specdec_jax.json", "params", "tokenizer"
FORMAT = 1


class Restored(NamedTuple):
    """What `save_orbax` was given, the parameters in the dtype asked for."""

    config: Any
    params: Any
    tokenizer: Tokenizer


def save_orbax(path: str | Path, config: Any, params: Any, tokenizer: Tokenizer, *, overwrite: bool = False) -> None:
    """Writes a checkpoint, complete or not at all. Raises FileExistsError unless `overwrite`."""
    import orbax.checkpoint as ocp  # here, because it takes over a second that other formats need not wait for

    marker = {"format": FORMAT, "model_type": family_of(config).__name__.rpartition(".")[2], "config": config.to_hf()}
    with new_folder(path, overwrite=overwrite) as folder:
        with ocp.StandardCheckpointer() as checkpointer:  # leaving it waits for the last byte
            checkpointer.save((folder / PARAMS).absolute(), params)
        (folder / TOKENIZER).mkdir()
        tokenizer.save(folder / TOKENIZER)
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def restore_orbax(path: str | Path, dtype: Any) -> Restored:
    """Reads a checkpoint, every parameter in `dtype` on the default device.

    Raises FileNotFoundError or ValueError naming the folder: no marker, another format, parameters that are missing,
    damaged or of another shape than the config says.
    """
    import orbax.checkpoint as ocp

    folder = Path(path)
    if not (folder / MARKER).is_file():
        raise FileNotFoundError(f"{folder} has no {MARKER}: it is no checkpoint of specdec_jax")
    marker = read_json(folder / MARKER)
    if marker.get("format") != FORMAT:
        raise ValueError(f"{folder / MARKER} has format {marker.get('format')!r}; format {FORMAT} is served")
    try:
        module = family(marker.get("model_type"))
        config = config_class(module).from_hf(marker.get("config") or {})
    except ValueError as error:
        raise ValueError(f"{folder / MARKER}: {error}") from None
    tokenizer = tokenizer_from_folder(folder / TOKENIZER)
    shapes = jax.eval_shape(functools.partial(module.init_params, config, dtype=dtype), jax.random.key(0))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore((folder / PARAMS).absolute(), wanted)
    except Exception as error:  # tensorstore and orbax raise what they like for a damaged file
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder / PARAMS} is damaged or does not fit its config: {reason}") from None
    return Restored(config, params, tokenizer)
