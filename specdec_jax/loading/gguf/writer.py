"""A model as one GGUF file, as llama.cpp's `convert_hf_to_gguf.py` writes it: the inverse of `gguf_file`.

Quantisation is the `gguf` package's, which has the simple types and none of the K-quants.
"""

import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from specdec_jax.loading.families import family_of
from specdec_jax.loading.gguf.architectures import NUMBERS, Architecture, architecture_for
from specdec_jax.loading.gguf.rope_scaling import ROPE_FREQUENCIES, divisors
from specdec_jax.loading.gguf.tokenizer_writer import tokenizer_metadata
from specdec_jax.loading.suggest import nearest
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.models.reduced_head import check_whole

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
POSITIONS = "position_embd.weight"


def save_gguf(
    path: str | Path,
    config: Any,
    params: Any,
    tokenizer: Tokenizer,
    *,
    kind: str = "Q8_0",
    overwrite: bool = False,
) -> None:
    """Writes a GGUF that `load_model`, transformers and llama.cpp read, complete or not at all.

    The families are those of `architectures.NUMBERS`. Matrices are stored as `kind` (a name of `FILE_TYPES`), vectors
    and learned positions as float32. A matrix whose rows do not divide into the kind's blocks (of 32) is stored as F16.
    Gemma's norms are stored with one added, so that what is below that sum's precision in float32 is lost. Tokens are
    written with the file: see `tokenizer_metadata`. transformers ignores the biases and the rope scaling of a llama
    file; llama.cpp and `load_model` obey both.

    Raises FileExistsError unless `overwrite` (and always for a folder), ValueError for an unknown kind, a config of
    another family, parameters that do not fit it, and settings or a tokenizer that GGUF cannot state.
    """
    check_whole(params)
    if kind not in FILE_TYPES:
        raise ValueError(
            f"unknown GGUF kind {kind!r}{nearest(str(kind), FILE_TYPES)}; there are {', '.join(FILE_TYPES)}"
        )
    name, architecture = architecture_for(config)
    with _new_file(Path(path), overwrite) as temporary, closing(gguf.GGUFWriter(temporary, name)) as writer:
        metadata = _hyperparameters(name, config, kind)
        metadata |= tokenizer_metadata(tokenizer, config.vocab_size, config.eos_token_ids, config.bos_token_id)
        tensors = _tensors(architecture, config, params)
        for entry, value in metadata.items():
            _add(writer, entry, value)
        for stored, (array, _) in tensors.items():
            as_kind = _stored_kind(stored, array, kind)
            shape = gguf.quants.quant_shape_to_byte_shape(array.shape, as_kind)
            writer.add_tensor_info(stored, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=as_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for stored, (array, part) in tensors.items():  # one at a time: `add_tensor` would keep the whole file in memory
            values = architecture.to_file(array, part, heads_of(config))
            writer.write_tensor_data(gguf.quants.quantize(values, _stored_kind(stored, array, kind)))


def heads_of(config: Any) -> dict[str, int]:
    """Heads of the matrices that have rows of heads."""
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}


def _tensors(architecture: Architecture, config: Any, params: Any) -> dict[str, tuple[np.ndarray, str]]:
    """GGUF's name -> (the tensor in Hugging Face's order of rows, what it is called in every layer)."""
    tensors = {}
    for name, array in family_of(config).named_from_params(config, params).items():
        stored, part = architecture.stored_name(name)
        tensors[stored] = architecture.turn(array, part), part
    if (extra := divisors(config)) is not None:
        tensors[ROPE_FREQUENCIES] = extra, ""
    return tensors


def _stored_kind(stored: str, array: np.ndarray, kind: str) -> Kind:
    if array.ndim == 1 or stored == POSITIONS:
        return Kind.F32
    return Kind.F16 if array.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[kind]][0] else Kind[kind]


def _hyperparameters(name: str, config: Any, kind: str) -> dict[str, Any]:
    c = config
    numbers = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads,
    } | NUMBERS[name](c)
    quantised = {"general.quantization_version": gguf.GGML_QUANT_VERSION} if kind.startswith("Q") else {}
    general = {"general.type": "model", "general.file_type": int(FILE_TYPES[kind]), **quantised}
    return general | {f"{name}.{entry}": value for entry, value in numbers.items()}


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[type(value)](name, value)


@contextmanager
def _new_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it when the block ends well and removed when it does not."""
    if path.is_dir() or (path.exists() and not overwrite):
        raise FileExistsError(f"{path} exists already{' and is a folder' if path.is_dir() else ''}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.new"
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
