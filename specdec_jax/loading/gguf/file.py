"""A GGUF file as a Hugging Face checkpoint: config, tensors under its names, tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.loading.checkpoint import Checkpoint
from specdec_jax.loading.families import config_class, family
from specdec_jax.loading.gguf.architectures import architecture_of
from specdec_jax.loading.gguf.metadata import number
from specdec_jax.loading.gguf.reader import GGUF, dequantise, read_gguf
from specdec_jax.loading.gguf.rope_scaling import ROPE_FREQUENCIES
from specdec_jax.loading.gguf.tokenizer import tokenizer_from_gguf


def open_gguf(path: str | Path) -> Checkpoint:
    """Reads config and tokenizer; tensors are dequantised one by one as they are asked for.

    Raises FileNotFoundError or ValueError naming the file: missing, truncated, an architecture that is not served, a
    rope scaling that cannot be told, a tokenizer that cannot be rebuilt.
    """
    file = read_gguf(path)
    return Checkpoint(str(path), config_from_gguf(file), tensors_from_gguf(file), tokenizer_from_gguf(file))


def config_from_gguf(file: GGUF) -> dict[str, Any]:
    """The file's hyper-parameters under the names of Hugging Face's config.json."""
    architecture = architecture_of(file)
    fields = {
        "vocab_size": _vocabulary(file),
        "hidden_size": int(number(file, "embedding_length")),
        "intermediate_size": int(number(file, "feed_forward_length")),
        "num_hidden_layers": int(number(file, "block_count")),
        "num_attention_heads": int(number(file, "attention.head_count")),
        "max_position_embeddings": int(number(file, "context_length")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(file),
    }
    key = config_class(family(architecture.model_type)).key
    own = fields | architecture.settings(file)
    return {"model_type": architecture.model_type} | {key(name): value for name, value in own.items()}


def eos_ids(file: GGUF) -> list[int]:
    """End of sequence, of turn and of message: each ends a generation, as in llama.cpp."""
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(int(i) for i in ids if i is not None))


def tensors_from_gguf(file: GGUF) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face's name, float32 array) of every tensor; a name without a counterpart is passed on as it is."""
    architecture, heads = architecture_of(file), int(number(file, "attention.head_count"))
    rows = {"attn_q": heads, "attn_k": int(number(file, "attention.head_count_kv", heads))}
    for stored in file.tensors:
        if stored == ROPE_FREQUENCIES:
            continue
        name, part = architecture.hugging_face_name(stored)
        array = architecture.from_file(dequantise(file, stored), part, rows)
        if "{}" in name:  # a stack of experts
            yield from ((name.format(i), expert) for i, expert in enumerate(array))
        else:
            yield name, array


def _vocabulary(file: GGUF) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]
