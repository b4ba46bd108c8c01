"""Small random models of every family: their configs, and weights that need no file. numpy alone.

The numbers of a tensor follow from its name and its shape.
"""

import re
import zlib

import numpy as np

TOKENS = np.random.default_rng(3).integers(0, 61, (2, 20)).tolist()
SOURCES = [np.random.default_rng(4).integers(3, 61, size).tolist() for size in (23, 11)]  # for encoder models
POSITIONS = (0, 1, 6, 13, 19)
SMALL = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
SMALL |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.67}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [2.0, 3.0, 4.0]}
LONGROPE |= {"rope_theta": 100.0, "partial_rotary_factor": 0.75}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2, "rope_theta": 100.0}
MOE = {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2}
OWN_NAMES = ("gpt2", "opt", "bloom", "t5", "mt5")  # families whose configs name sizes otherwise
COMMON = {name: SMALL[name] for name in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")}
GPT2 = COMMON | {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
OPT = COMMON | {"hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 64}
BLOOM = COMMON | {"hidden_size": 24, "n_layer": 3, "n_head": 4, "seq_length": 64}
ENCODERS = ("t5", "mt5")
T5 = {"vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 3, "num_heads": 4, "eos_token_id": 1}
T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
T5 |= {"relative_attention_max_distance": 12}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WINDOW, BIASES = {"sliding_window": 5}, {"attention_bias": True}
IN_USE = {"use_sliding_window": True} | WINDOW
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
ROPES = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}}
ROPES |= {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
GEMMA3 = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": ROPES}
PLAIN_GPT2 = {"scale_attn_weights": False, "layer_norm_epsilon": 0.001}
FAR = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
CASES = {  # changes of the usual config, by the model type and what is special
    "llama": {},
    "llama, biases, scaled": BIASES
    | {"mlp_bias": True, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
    "llama, tied, no groups": TIED | {"num_key_value_heads": 4, "head_dim": 8},
    "mistral": {"sliding_window": None},
    "mistral, window": WINDOW | {"head_dim": 8},
    "qwen2": {},
    "qwen2, windows, tied": WINDOWS | TIED,
    "qwen3": {"head_dim": 8},
    "qwen3, windows, biases": WINDOWS | BIASES | {"head_dim": 6, "num_key_value_heads": 1},
    "gpt_neox": {"rope_parameters": PARTIAL},
    "gpt_neox, one after the other": TIED | {"rope_parameters": PARTIAL, "use_parallel_residual": False},
    "gpt2": GPT2 | TIED,
    "gpt2, separate head": GPT2 | PLAIN_GPT2 | {"n_inner": 40, "activation_function": "relu"},
    "opt": OPT | TIED,
    "opt, norms after": OPT | TIED | {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "opt, no biases": OPT | {"enable_bias": False, "activation_function": "gelu", "_remove_final_layer_norm": True},
    "bloom": BLOOM | TIED,
    "bloom, normed stream, 3 heads": BLOOM | UNTIED | {"n_head": 3, "apply_residual_connection_post_layernorm": True},
    "gemma2": WINDOW | TIED | {"head_dim": 8, "query_pre_attn_scalar": 6},
    "gemma2, other caps": CAPS | BIASES | {"head_dim": 6, "sliding_window": 64, "query_pre_attn_scalar": 3},
    "gemma3_text": GEMMA3 | WINDOW | TIED | {"head_dim": 8, "query_pre_attn_scalar": 6},
    "gemma3_text, caps": WINDOW | CAPS | UNTIED | {"head_dim": 8, "rope_parameters": None},
    "phi3": WINDOW | {"num_key_value_heads": 1},
    "phi3, longrope": {"hidden_size": 32, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
    "smollm3": TIED | {"no_rope_layers": [1, 1, 0]},
    "smollm3, windows, biases": IN_USE | BIASES | UNTIED | {"no_rope_layers": [1, 0, 1], "mlp_bias": True},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral, window": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen3_moe": MOE | {"head_dim": 8},
    "qwen3_moe, some layers": MOE | IN_USE | {"head_dim": 8, "mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen3, yarn": {"head_dim": 8, "rope_parameters": YARN},
    "gpt_neox, no biases": {"attention_bias": False, "hidden_act": "gelu_new", "num_attention_heads": 3},
    "t5": T5,
    "t5, gated, separate head": T5 | GATED | {"d_kv": 6, "num_heads": 3},
    "t5, shallow decoder, usual distances": T5 | GATED | FAR | {"num_decoder_layers": 1},
    "mt5": T5 | GATED | {"num_decoder_layers": 2},
}

SPREAD = 0.3


def slug(name):
    """A name as a folder's."""
    return re.sub(r"\W+", "-", name)


def random_tensors(shapes):
    """{name: [shape] float32}: normal, scales of norms around one."""
    tensors = {}
    for name, shape in shapes.items():
        tensor = np.random.default_rng(zlib.crc32(name.encode())).normal(0.0, SPREAD, tuple(shape))
        tensors[name] = (tensor + ("norm" in name and name.endswith("weight"))).astype(np.float32)
    return tensors


def padded_sources():
    """SOURCES as (tokens [B, E], mask [B, E])."""
    width = max(map(len, SOURCES))
    tokens = np.array([source + [0] * (width - len(source)) for source in SOURCES])
    return tokens, np.array([[slot < len(source) for slot in range(width)] for source in SOURCES], np.int64)
