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
from specdec_jax.loading.gguf.file import (
    ARCHITECTURE,
    IN_A_LAYER,
    LLAMA3_SCALINGS,
    OUTSIDE_LAYERS,
    READING,
    ROPE_FREQUENCIES,
)
from specdec_jax.loading.gguf.tokenizer_writer import tokenizer_metadata
from specdec_jax.loading.suggest import nearest
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.llama_reading import LlamaReadingConfig
from specdec_jax.models.reduced_head import check_whole
from specdec_jax.models.rope import inverse_frequencies, rope_type

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
STORED_NAMES = {theirs: ours for ours, theirs in (OUTSIDE_LAYERS | IN_A_LAYER).items()}


def save_gguf(
    path: str | Path,
    config: LlamaConfig,
    params: Any,
    tokenizer: Tokenizer,
    *,
    kind: str = "Q8_0",
    overwrite: bool = False,
) -> None:
    """Writes a llama GGUF that `load_model`, transformers and llama.cpp read, complete or not at all.

    Matrices are stored as `kind` (a name of `FILE_TYPES`), vectors as float32. A matrix whose rows do not divide into
    the kind's blocks (of 32) is stored as F16. Tokens are written with the file: see `tokenizer_metadata`.
    transformers ignores the biases and the rope scaling of such a file; llama.cpp and `load_model` obey both.

    Raises FileExistsError unless `overwrite` (and always for a folder), ValueError for an unknown kind, a config of
    another family, parameters that do not fit it, and a rope scaling or tokenizer that GGUF cannot state.
    """
    check_whole(params)
    if kind not in FILE_TYPES:
        raise ValueError(
            f"unknown GGUF kind {kind!r}{nearest(str(kind), FILE_TYPES)}; there are {', '.join(FILE_TYPES)}"
        )
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"only models of family {ARCHITECTURE} are written as GGUF, got a {type(config).__name__}")
    kept = _architecture(config)
    with _new_file(Path(path), overwrite) as temporary, closing(gguf.GGUFWriter(temporary, kept)) as writer:
        tensors = _tensors(config, params)
        metadata = _hyperparameters(config, kind)
        metadata |= tokenizer_metadata(tokenizer, config.vocab_size, config.eos_token_ids, config.bos_token_id)
        for name, value in metadata.items():
            _add(writer, name, value)
        for name, (array, _) in tensors.items():
            stored = _stored_kind(array, kind)
            shape = gguf.quants.quant_shape_to_byte_shape(array.shape, stored)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array, heads in tensors.values():  # one at a time: `add_tensor` would keep the whole file in memory
            values = permute(array, heads) if heads else array
            writer.write_tensor_data(gguf.quants.quantize(values.astype(np.float32), _stored_kind(array, kind)))


def _architecture(config: LlamaConfig) -> str:
    return READING if isinstance(config, LlamaReadingConfig) else ARCHITECTURE


def stored_name(name: str) -> str:
    """(`model.layers.3.self_attn.q_proj.weight`) -> `blk.3.attn_q.weight`; a name of ours stays."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{STORED_NAMES[part]}.{kind}"
    return f"{STORED_NAMES[stem]}.{kind}" if stem in STORED_NAMES else name


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from Hugging Face's order to GGUF's: the halves of a head interleaved."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _tensors(config: LlamaConfig, params: Any) -> dict[str, tuple[np.ndarray, int]]:
    """GGUF's name -> (the tensor in Hugging Face's row order, heads to permute its rows by or 0)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    named = family_of(config).named_from_params(config, params)
    tensors = {stored_name(name): (array, heads.get(name.split(".")[-2], 0)) for name, array in named.items()}
    if rope_type(config.rope_scaling) == "llama3":
        plain = inverse_frequencies(config.head_dim, config.rope_theta, None)
        divisors = plain / inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        tensors[ROPE_FREQUENCIES] = (divisors, 0)
    return tensors


def _stored_kind(array: np.ndarray, kind: str) -> Kind:
    if array.ndim == 1:
        return Kind.F32
    return Kind.F16 if array.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[kind]][0] else Kind[kind]


def _hyperparameters(config: LlamaConfig, kind: str) -> dict[str, Any]:
    c = config
    numbers = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": float(c.rope_theta),
    }
    if c.head_dim * c.num_attention_heads != c.hidden_size:  # what readers take for granted
        numbers |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    numbers |= _scaling(c)
    quantised = {"general.quantization_version": gguf.GGML_QUANT_VERSION} if kind.startswith("Q") else {}
    general = {"general.type": "model", "general.file_type": int(FILE_TYPES[kind]), **quantised}
    if isinstance(c, LlamaReadingConfig):
        numbers |= {"target_layers": list(c.target_layers), "target_width": c.target_width}
    return general | {f"{_architecture(c)}.{name}": value for name, value in numbers.items()}


def _scaling(config: LlamaConfig) -> dict[str, Any]:
    """The rope scaling where metadata say it. Llama 3's is a tensor of divisors, from which only those of the
    published models can be told again, so that another one would be lost to every reader but llama.cpp."""
    scaling = config.rope_scaling or {}
    rope = rope_type(config.rope_scaling)
    if rope == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    published = any(all(scaling.get(name) == value for name, value in known.items()) for known in LLAMA3_SCALINGS)
    if rope == "default" or (rope == "llama3" and published):
        return {}
    raise ValueError(f"a GGUF file cannot state the rope scaling {config.rope_scaling}")


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
