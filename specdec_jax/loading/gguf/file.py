"""A llama GGUF file as a Hugging Face checkpoint: config, tensor names, row order, tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.loading.checkpoint import Checkpoint
from specdec_jax.loading.gguf.reader import GGUF, dequantise, read_gguf
from specdec_jax.loading.gguf.tokenizer import tokenizer_from_gguf
from specdec_jax.models.rope import inverse_frequencies

ARCHITECTURE = "llama"
READING = "llama_reading"  # ours: a llama that reads its target (models/llama_reading.py); llama.cpp refuses its files
OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQUENCIES = "rope_freqs.weight"
LLAMA3_SCALINGS = tuple(  # what Llama 3.1 and 3.2 were published with; the file keeps only the resulting divisors
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192}
    for factor in (8.0, 16.0, 32.0)
)  # fmt: skip


def open_gguf(path: str | Path) -> Checkpoint:
    """Reads config and tokenizer; tensors are dequantised one by one as they are asked for.

    Raises FileNotFoundError or ValueError naming the file: missing, truncated, another architecture, a mixture of
    experts, a rope scaling that cannot be told, a tokenizer that cannot be rebuilt.
    """
    file = read_gguf(path)
    return Checkpoint(str(path), config_from_gguf(file), tensors_from_gguf(file), tokenizer_from_gguf(file))


def config_from_gguf(file: GGUF) -> dict[str, Any]:
    """The file's hyper-parameters under the names of Hugging Face's config.json."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in (ARCHITECTURE, READING):
        raise ValueError(
            f"{file.path} has architecture {architecture!r}; GGUF files of {ARCHITECTURE!r} are served. Other families "
            "load from Hugging Face folders, and docs/extending.md shows how to add one"
        )
    if int(_number(file, "expert_count", 0)):
        raise ValueError(f"{file.path} is a mixture of {_number(file, 'expert_count')} experts, which is not served")
    heads, width = _number(file, "attention.head_count"), _number(file, "embedding_length")
    head_dim = int(_number(file, "attention.key_length", width // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := int(_number(file, name, head_dim))) != head_dim:
            raise ValueError(f"{file.path}: {architecture}.{name} is {other} but a head has {head_dim} dimensions")
    theta = _exact(_number(file, "rope.freq_base", 10000.0))
    special = file.metadata.get
    return _read_of_target(file) | {
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": _vocabulary(file),
        "hidden_size": int(width),
        "intermediate_size": int(_number(file, "feed_forward_length")),
        "num_hidden_layers": int(_number(file, "block_count")),
        "num_attention_heads": int(heads),
        "num_key_value_heads": int(_number(file, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": _exact(_number(file, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_theta": theta} | _scaling(file, head_dim, theta),
        "max_position_embeddings": int(_number(file, "context_length")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": special("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(file),
    }


def _read_of_target(file: GGUF) -> dict[str, Any]:
    """Whom a drafter that reads its target reads."""
    if file.metadata.get("general.architecture") != READING:
        return {}
    layers = np.atleast_1d(file.metadata.get(f"{READING}.target_layers", ()))
    return {"target_layers": [int(layer) for layer in layers], "target_width": int(_number(file, "target_width"))}


def eos_ids(file: GGUF) -> list[int]:
    """End of sequence, of turn and of message: each ends a generation, as in llama.cpp."""
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(int(i) for i in ids if i is not None))


def tensors_from_gguf(file: GGUF) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face's name, float32 array) of every tensor; a name without a counterpart is passed on as it is."""
    heads = int(_number(file, "attention.head_count"))
    rows = {"attn_q": heads, "attn_k": int(_number(file, "attention.head_count_kv", heads))}
    for stored in file.tensors:
        if stored == ROPE_FREQUENCIES:
            continue
        name, part = hugging_face_name(stored)
        array = dequantise(file, stored)
        yield name, unpermute(array, rows[part]) if part in rows else array


def hugging_face_name(stored: str) -> tuple[str, str]:
    """(`blk.3.attn_q.weight`) -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    pieces = stored.split(".")
    if len(pieces) == 2 and pieces[0] in OUTSIDE_LAYERS:
        return f"{OUTSIDE_LAYERS[pieces[0]]}.{pieces[1]}", pieces[0]
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in IN_A_LAYER:
        return f"model.layers.{pieces[1]}.{IN_A_LAYER[pieces[2]]}.{pieces[3]}", pieces[2]
    return stored, ""


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from GGUF's order (the two halves of a head interleaved) to Hugging Face's."""
    if array.shape[0] % (2 * heads):
        return array  # a wrong shape, which the weight table reports by name
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _number(file: GGUF, name: str, default: Any = None) -> Any:
    key = f"{file.metadata.get('general.architecture', ARCHITECTURE)}.{name}"
    value = file.metadata.get(key, default)
    if value is None:
        raise ValueError(f"{file.path} lacks the hyper-parameter {key}")
    if isinstance(value, np.ndarray):  # one number a layer
        if len(set(value.tolist())) != 1:
            raise ValueError(f"{file.path}: {key} differs between layers, which is not served")
        return value.tolist()[0]
    return value


def _vocabulary(file: GGUF) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _exact(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any]:
    """The rope scaling, in Hugging Face's terms; {"rope_type": "default"} when there is none."""
    if ROPE_FREQUENCIES in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    factor = file.metadata.get(f"{ARCHITECTURE}.rope.scale_linear")  # what files of 2023 call it
    architecture = file.metadata.get("general.architecture", ARCHITECTURE)
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none":
        return {"rope_type": "default"}
    if kind != "linear":
        raise ValueError(f"{file.path} has the rope scaling {kind!r}, which is not served in GGUF files")
    return {"rope_type": kind, "factor": _exact(_number(file, "rope.scaling.factor", factor))}


def _llama3_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any]:
    """Recognises the divisors of Llama 3.1's rope scaling; anything else is refused rather than guessed."""
    divisors = dequantise(file, ROPE_FREQUENCIES).reshape(-1)
    plain = inverse_frequencies(head_dim, theta, None)
    for scaling in LLAMA3_SCALINGS:
        expected = plain / inverse_frequencies(head_dim, theta, scaling)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
            return scaling
    raise ValueError(
        f"{file.path}: {ROPE_FREQUENCIES} is none of Llama 3's published rope scalings; "
        "load the Hugging Face folder, whose config.json states the scaling"
    )
