"""Orbax checkpoints of a model: parameters in Orbax's format, with config and tokenizer.

folder/specdec_jax.json   marker: format number and the config in Hugging Face's format
folder/params/            Orbax
folder/tokenizer/         tokenizer.json, tokenizer_config.json, chat_template.jinja
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specdec_jax.drafters.draft_models.reduced_head import check_whole
from specdec_jax.loading.families import config_of, family_of
from specdec_jax.loading.hf_folder import Checkpoint
from specdec_jax.loading.new_folder import new_folder
from specdec_jax.loading.tokenizer import Tokenizer, read_json, tokenizer_from_folder
from specdec_jax.models.weights import Layout, check_finite, placed_shapes

MARKER, PARAMS, TOKENIZER = "specdec_jax.json", "params", "tokenizer"
FORMAT = 2  # in version 1 fused weights had another layout
SHOWN = 3  # maximum number of parameters in an error


def save_orbax(path: str | Path, config: Any, params: Any, tokenizer: Tokenizer, *, overwrite: bool = False) -> None:
    """Writes a checkpoint atomically.

    Raises FileExistsError unless `overwrite`, ValueError for a drafter with a draft vocabulary.
    """
    check_whole(params)
    import orbax.checkpoint as ocp  # imported here, because it takes over a second and other formats do not need it

    marker = {"format": FORMAT, "model_type": family_of(config).__name__.rpartition(".")[2], "config": config.to_hf()}
    with new_folder(path, overwrite=overwrite) as folder:
        if jax.process_count() > 1:  # Orbax accepts device arrays only from all processes
            params = jax.tree.map(np.asarray, params)
        with ocp.StandardCheckpointer(multiprocessing_options=independent()) as writer:  # leaving waits for completion
            writer.save((folder / PARAMS).absolute(), params)
        (folder / TOKENIZER).mkdir()
        tokenizer.save(folder / TOKENIZER)
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def independent() -> Any:
    """Orbax's options for a process that works independently of the others of its launch."""
    import orbax.checkpoint as ocp

    index, several = jax.process_index(), jax.process_count() > 1
    return ocp.options.MultiprocessingOptions(index, {index} if several else None, "alone" if several else None)


def restore_orbax(path: str | Path, config: Any, dtype: Any, layout: Layout | None = None) -> Any:
    """The parameters of a checkpoint with this config, in `dtype` on the default device, or sharded by `layout`.

    Raises ValueError naming the folder: parameters that are missing, damaged, not finite or do not fit the config.
    """
    import orbax.checkpoint as ocp

    module, device = family_of(config), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    initial = jax.eval_shape(functools.partial(module.init_params, config, dtype=dtype), jax.random.key(0))
    table = module.parameter_table(config)
    place = layout(table) if layout else None
    wanted = placed_shapes(table, initial, place or (lambda _: device))
    folder, shapes = Path(path) / PARAMS, _shapes(wanted)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = _shapes(checkpointer.metadata(folder.absolute()).item_metadata.tree)
            wrong = [name for name in sorted(stored | shapes) if stored.get(name) != shapes.get(name)]
            params = None if wrong else checkpointer.restore(folder.absolute(), wanted)
    except Exception as error:  # tensorstore and orbax raise various errors for a damaged file
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder} is damaged: {reason}") from None
    if wrong:  # nothing was read
        listed = ", ".join(f"{name} is {stored.get(name)} instead of {shapes.get(name)}" for name in wrong[:SHOWN])
        raise ValueError(f"{folder} does not fit its config: {listed}")
    check_finite(params, folder)
    return params


def open_orbax(path: str | Path) -> Checkpoint:
    """A checkpoint's config and tokenizer; its parameters are left to `restore_orbax`. Raises as `marked_config`."""
    return Checkpoint(str(path), marked_config(path), None, tokenizer_from_folder(Path(path) / TOKENIZER))


def marked_config(path: str | Path) -> Any:
    """A checkpoint's config. Raises FileNotFoundError, ValueError naming the folder: no marker, or another format."""
    folder = Path(path)
    if not (folder / MARKER).is_file():
        raise FileNotFoundError(f"{folder} has no {MARKER}: it is no checkpoint of specdec_jax")
    marker = read_json(folder / MARKER)
    if marker.get("format") != FORMAT:
        raise ValueError(f"{folder / MARKER} has format {marker.get('format')!r}; format {FORMAT} is served")
    return config_of(folder / MARKER, marker.get("model_type"), marker.get("config") or {})


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
