"""Hyper-parameters of each architecture: what its files say as fields of a family's config, and the inverse.

What llama.cpp derives or takes for granted is no entry of a file. A config that has it otherwise is not written.
"""

from typing import Any

import numpy as np

from specdec_jax.loading.gguf.metadata import architecture_name, exact, number
from specdec_jax.loading.gguf.reader import GGUF
from specdec_jax.loading.gguf.rope_scaling import scaling_numbers, scaling_of
from specdec_jax.models.config import FULL, SLIDING

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # Gemma 2's, where a file has none
LARGE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, whose queries are scaled by another width than a head's
EVERY = {"gemma2": 2, "gemma3": 6}  # of so many layers the last one is global


def rotary(file: GGUF) -> dict[str, Any]:
    """Of every architecture of rotary attention. Raises ValueError for heads of several widths."""
    heads, width = number(file, "attention.head_count"), number(file, "embedding_length")
    head_dim = int(number(file, "attention.key_length", width // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := int(number(file, name, head_dim))) != head_dim:
            full = f"{architecture_name(file)}.{name}"
            raise ValueError(f"{file.path}: {full} is {other} but a head has {head_dim} dimensions")
    theta = exact(number(file, "rope.freq_base", 10000.0))
    return {
        "num_key_value_heads": int(number(file, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": exact(number(file, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_theta": theta} | scaling_of(file, head_dim, theta),
    }


def llama(file: GGUF) -> dict[str, Any]:
    """Llama's, whose biases are there or not."""
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return rotary(file) | {name: tensor in file.tensors for name, tensor in biases.items()}


def reading(file: GGUF) -> dict[str, Any]:
    """Of a drafter that reads its target: whom."""
    layers = np.atleast_1d(file.metadata.get(f"{architecture_name(file)}.target_layers", ()))
    target = {"target_layers": [int(layer) for layer in layers], "target_width": int(number(file, "target_width"))}
    return llama(file) | target


def mixtral(file: GGUF) -> dict[str, Any]:
    """Llama's with experts; the probabilities of those chosen sum to one, as in Mixtral."""
    experts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    return rotary(file) | {name: int(number(file, stored)) for name, stored in experts.items()}


def qwen3(file: GGUF) -> dict[str, Any]:
    """Qwen 3's."""
    return rotary(file) | {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def qwen3_moe(file: GGUF) -> dict[str, Any]:
    """Qwen 3's with experts in every layer; the probabilities of those chosen sum to one, as in llama.cpp."""
    experts = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    return (
        qwen3(file) | {name: int(number(file, stored)) for name, stored in experts.items()} | {"norm_topk_prob": True}
    )


def gemma2(file: GGUF) -> dict[str, Any]:
    """Gemma 2's."""
    caps = {name: exact(number(file, name, default)) for name, default in CAPS.items()}
    return _gemma(file) | caps | {"sliding_window": int(number(file, WINDOW, 4096))}


def gemma3(file: GGUF) -> dict[str, Any]:
    """Gemma 3's: without a window every layer is global."""
    window = int(number(file, WINDOW, 0))
    windows = {"sliding_window": window} if window else {"layer_types": [FULL] * int(number(file, "block_count"))}
    own = {
        "rope_local_base_freq": exact(number(file, "rope.freq_base_swa", 10000.0)),
        "final_logit_softcapping": exact(number(file, "final_logit_softcapping", 0.0)) or None,
    }
    return _gemma(file) | windows | own


def gpt2(file: GGUF) -> dict[str, Any]:
    """GPT-2's."""
    return {"layer_norm_eps": exact(number(file, "attention.layer_norm_epsilon"))}


def llama_numbers(c: Any) -> dict[str, Any]:
    """Of a config as metadata; so are the others."""
    _check_implied(c, hidden_act="silu")
    stated = c.head_dim * c.num_attention_heads == c.hidden_size  # as readers take for granted
    return _rotary_numbers(c, () if stated else ("attention.key_length", "attention.value_length"))


def reading_numbers(c: Any) -> dict[str, Any]:
    """Of a drafter that reads its target."""
    return llama_numbers(c) | {"target_layers": list(c.target_layers), "target_width": c.target_width}


def qwen2_numbers(c: Any) -> dict[str, Any]:
    """Of Qwen 2's config, whose heads share the width in llama.cpp."""
    _check_implied(c, hidden_act="silu", layer_kinds=(FULL,) * c.num_hidden_layers)
    _check_implied(c, head_dim=c.hidden_size // c.num_attention_heads)
    return _rotary_numbers(c)


def qwen3_numbers(c: Any) -> dict[str, Any]:
    """Of Qwen 3's config, of whose biases llama.cpp does not read the output's."""
    _check_implied(c, hidden_act="silu", attention_bias=False, layer_kinds=(FULL,) * c.num_hidden_layers)
    return _rotary_numbers(c)


def gemma2_numbers(c: Any) -> dict[str, Any]:
    """Of Gemma 2's config, of which llama.cpp wants a layer with a window."""
    _check_implied(c, tie_word_embeddings=True)
    if SLIDING not in c.layer_kinds:
        raise ValueError("a GGUF file of architecture gemma2 cannot state that no layer has a window")
    for name in CAPS:
        if getattr(c, name) is None:
            raise ValueError(f"a GGUF file of architecture gemma2 cannot state that {name} is none")
    caps = {name: float(getattr(c, name)) for name in CAPS}
    return _gemma_numbers(c, "gemma2") | caps


def gemma3_numbers(c: Any) -> dict[str, Any]:
    """Of Gemma 3's config."""
    cap = c.final_logit_softcapping
    return (
        _gemma_numbers(c, "gemma3")
        | {"rope.freq_base_swa": float(c.rope_local_base_freq)}
        | ({} if cap is None else {"final_logit_softcapping": float(cap)})
    )


def gpt2_numbers(c: Any) -> dict[str, Any]:
    """Of GPT-2's config."""
    _check_implied(c, hidden_act="gelu_new", scale_attn_weights=True)
    return {"attention.layer_norm_epsilon": float(c.layer_norm_eps)}


def _rotary_numbers(
    c: Any, lengths: tuple[str, ...] = ("attention.key_length", "attention.value_length")
) -> dict[str, Any]:
    numbers = {
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": float(c.rope_theta),
    }
    return numbers | dict.fromkeys(lengths, c.head_dim) | scaling_numbers(c)


def _gemma(file: GGUF) -> dict[str, Any]:
    """What Gemma 2 and 3 share. The scale of queries is not stored: llama.cpp tells it by the number of layers."""
    own, name, layers = rotary(file), architecture_name(file), int(number(file, "block_count"))
    heads, width = int(number(file, "attention.head_count")), int(number(file, "embedding_length"))
    pattern = file.metadata.get(f"{name}.{PATTERN}", EVERY[name])
    local = pattern.astype(bool).tolist() if isinstance(pattern, np.ndarray) else _local(layers, int(pattern))
    if len(local) != layers:
        raise ValueError(f"{file.path}: {name}.{PATTERN} has {len(local)} entries for {layers} layers")
    return own | {
        "query_pre_attn_scalar": _query_scale(name, layers, width, heads, own["head_dim"]),
        "layer_types": [SLIDING if one else FULL for one in local],
    }


def _gemma_numbers(c: Any, name: str) -> dict[str, Any]:
    scale = _query_scale(name, c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.head_dim)
    _check_implied(c, hidden_act="gelu_pytorch_tanh", attention_bias=False, query_pre_attn_scalar=scale)
    local = [kind == SLIDING for kind in c.layer_kinds]
    window = {WINDOW: c.sliding_window} if any(local) else {}
    usual = not window or local == _local(len(local), EVERY[name])
    return _rotary_numbers(c) | window | ({} if usual else {PATTERN: local})


def _local(layers: int, every: int) -> list[bool]:
    """Which layers have windows, when of `every` the last has none; 0: all of them have."""
    return [every == 0 or (i + 1) % every > 0 for i in range(layers)]


def _query_scale(name: str, layers: int, width: int, heads: int, head_dim: int) -> int:
    """What queries are divided by the root of."""
    return width // heads if layers == LARGE[name] else head_dim


def _check_implied(config: Any, **implied: Any) -> None:
    """Raises ValueError for a config that has something otherwise than a file of its architecture means."""
    for name, value in implied.items():
        if (own := getattr(config, name)) != value:
            raise ValueError(f"a GGUF file cannot state {config.key(name)} {own!r}: it means {value!r}")
