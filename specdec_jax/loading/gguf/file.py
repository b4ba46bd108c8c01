"""A GGUF file as a Hugging Face checkpoint: config, tensors under its names, tokenizer."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.loading.families import config_class, config_of, family
from specdec_jax.loading.gguf.architectures import (
    EVERY,
    GLOBAL_EVERY,
    PATTERN,
    architecture_of,
    has_window,
    query_scale,
)
from specdec_jax.loading.gguf.reader import GGUF, architecture_name, dequantise, number, read_gguf
from specdec_jax.loading.gguf.tokenizer import tokenizer_from_gguf
from specdec_jax.loading.hf_folder import Checkpoint
from specdec_jax.models.config import FULL, SLIDING
from specdec_jax.models.rope import inverse_frequencies

ROPE_FREQUENCIES = "rope_freqs.weight"
LLAMA3_SCALINGS = tuple(  # scalings of Llama 3.1 and 3.2; files store only the resulting divisors
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192}
    for factor in (8.0, 16.0, 32.0)
)  # fmt: skip


def open_gguf(path: str | Path) -> Checkpoint:
    """Reads config and tokenizer; tensors are dequantised one by one on access.

    Raises FileNotFoundError or ValueError naming the file: missing, truncated, an unsupported architecture, an
    unrecognised rope scaling, a tokenizer that cannot be rebuilt.
    """
    file = read_gguf(path)
    fields, tokenizer = config_from_gguf(file), _naming(tokenizer_from_gguf)(file)
    return Checkpoint(str(path), config_of(path, fields["model_type"], fields), tensors_from_gguf(file), tokenizer)


def _naming(read: Callable[[GGUF], Any]) -> Callable[[GGUF], Any]:
    """The function, with any error due to metadata of another type or range as a ValueError that names the file."""

    @functools.wraps(read)
    def named(file: GGUF) -> Any:
        try:
            return read(file)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            message = " ".join(str(error).split())
            raise ValueError(message if str(file.path) in message else f"{file.path} is damaged: {message}") from error

    return named


@_naming
def config_from_gguf(file: GGUF) -> dict[str, Any]:
    """The file's hyper-parameters with the names of Hugging Face's config.json."""
    name, architecture = architecture_name(file), architecture_of(file)
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight")
    # ends of sequence, of turn and of message: each ends a generation, as in llama.cpp
    ends = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    fields: dict[str, Any] = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(int(i) for i in ends if i is not None)),
        **{flag: tensor in file.tensors for flag, tensor in architecture.biases.items()},
        **architecture.constants,
    }
    for stored, field, kind, default in (*EVERY, *architecture.numbers):
        if kind is list:
            fields[field] = np.atleast_1d(file.metadata.get(f"{name}.{stored}", default)).astype(int).tolist()
        else:
            value = number(file, stored, number(file, default) if isinstance(default, str) else default)
            value = _shortest(value) if kind is float else kind(value)
            fields[field] = value or None if default == 0 else value
    if "rope_theta" in fields:
        width = fields["hidden_size"] // fields["num_attention_heads"]
        fields["head_dim"] = head_dim = int(number(file, "attention.key_length", width))
        for entry in ("attention.value_length", "rope.dimension_count"):
            if (other := int(number(file, entry, head_dim))) != head_dim:
                raise ValueError(f"{file.path}: {name}.{entry} is {other} but a head has {head_dim} dimensions")
        fields["rope_scaling"] = _rope_scaling(file, fields["head_dim"], fields["rope_theta"])
    if name in GLOBAL_EVERY:
        layers, pattern = fields["num_hidden_layers"], file.metadata.get(f"{name}.{PATTERN}", GLOBAL_EVERY[name])
        local = pattern.astype(bool).tolist() if isinstance(pattern, np.ndarray) else has_window(layers, int(pattern))
        if len(local) != layers:
            raise ValueError(f"{file.path}: {name}.{PATTERN} has {len(local)} entries for {layers} layers")
        windows = fields["sliding_window"] is not None  # without a window every layer is global
        fields["layer_types"] = [SLIDING if window and windows else FULL for window in local]
        fields["query_pre_attn_scalar"] = query_scale(name, fields)
    key = config_class(family(architecture.model_type)).key
    return {"model_type": architecture.model_type} | {key(name): value for name, value in fields.items()}


def tensors_from_gguf(file: GGUF) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face's name, float32 array) of every tensor; a name without a counterpart is not changed."""
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


def _shortest(value: float) -> float:
    """The shortest decimal for a float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any] | None:
    """The rope scaling in Hugging Face's format. Linear scaling is in the metadata. Llama 3's is a tensor of divisors,
    from which only those of the published models are recognised.

    Raises ValueError naming the file for any other.
    """
    if ROPE_FREQUENCIES in file.tensors:
        stored = dequantise(file, ROPE_FREQUENCIES).reshape(-1)
        plain = inverse_frequencies(head_dim, theta, None)
        for scaling in LLAMA3_SCALINGS:
            expected = plain / inverse_frequencies(head_dim, theta, scaling)
            if stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-3):
                return scaling
        raise ValueError(
            f"{file.path}: {ROPE_FREQUENCIES} is none of Llama 3's published rope scalings; "
            "load the Hugging Face folder, whose config.json states the scaling"
        )
    architecture = architecture_name(file)
    factor = file.metadata.get(f"{architecture}.rope.scale_linear")  # its name in files of 2023
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none" if factor is None else "linear")
    if kind not in ("none", "linear"):
        raise ValueError(f"{file.path} has the rope scaling {kind!r}, which is not served in GGUF files")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": _shortest(number(file, "rope.scaling.factor", factor))}
