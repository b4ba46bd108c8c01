"""The supported architectures of GGUF files: names of tensors, their order, and hyper-parameters.

Sources: llama.cpp's converters (`conversion/*.py`) for the contents of files, its `src/models/*.cpp` for values that
are derived and not stored.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.loading.gguf.reader import GGUF, architecture_name, number
from specdec_jax.strategy import nearest

READING = "llama_reading"  # a llama that reads its target (drafters/draft_models/); not supported by llama.cpp
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6}  # the last of this many layers is global, the others have windows
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, whose query scale is not that of the head's width


class Number(NamedTuple):
    """A hyper-parameter of a file (without the architecture prefix) and the config's field for its value."""

    stored: str
    field: str
    kind: type = int
    default: Any = None  # if missing: a value, or the name of another hyper-parameter; 0 becomes None in a config


class Architecture(NamedTuple):
    """The contents of files with one `general.architecture`, and their conversion to Hugging Face's names.

    Names are without `.weight` and `.bias`. A name with `{}`, the number of an expert, is a stack of experts.
    """

    model_type: str
    numbers: tuple[Number, ...]
    outside: dict[str, str]
    in_a_layer: dict[str, str]
    layers: str = "model.layers"
    biases: Mapping[str, str] = {}  # flag of the config -> the tensor whose presence sets it
    constants: Mapping[str, Any] = {}  # fields that are constant in llama.cpp
    interleaved: bool = False  # whether the halves of a head are interleaved in the rows of q and k
    norm_offset: float = 0.0  # difference of norms between file and checkpoint
    turned: tuple[str, ...] = ()  # matrices of a layer that are [in, out] in the checkpoint

    def hugging_face_name(self, stored: str) -> tuple[str, str]:
        """(`blk.3.attn_q.weight`) -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`); unknown: (itself, "")."""
        pieces = stored.split(".")
        if len(pieces) == 2 and pieces[0] in self.outside:
            return f"{self.outside[pieces[0]]}.{pieces[1]}", pieces[0]
        if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in self.in_a_layer:
            return f"{self.layers}.{pieces[1]}.{self.in_a_layer[pieces[2]]}.{pieces[3]}", pieces[2]
        return stored, ""

    def from_file(self, array: np.ndarray, part: str, heads: Mapping[str, int]) -> np.ndarray:
        """A tensor converted to the checkpoint's layout. `heads` are the numbers of heads of `attn_q` and `attn_k`."""
        if self.interleaved and part in heads:
            rows, count = array.shape[0], heads[part]
            if rows % (2 * count):
                return array  # a wrong shape, which the weight table reports by name
            return array.reshape(count, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if part.endswith("norm"):
            return array - np.float32(self.norm_offset) if self.norm_offset else array
        return self.turn(array, part)

    def turn(self, array: np.ndarray, part: str) -> np.ndarray:
        """Transposes a matrix (as a view) whose layouts in checkpoint and file differ."""
        return array.T if part in self.turned and array.ndim == 2 else array


EVERY = (  # hyper-parameters of all architectures
    Number("embedding_length", "hidden_size"),
    Number("feed_forward_length", "intermediate_size"),
    Number("block_count", "num_hidden_layers"),
    Number("attention.head_count", "num_attention_heads"),
    Number("context_length", "max_position_embeddings"),
)
ROTARY = (
    Number("attention.head_count_kv", "num_key_value_heads", default="attention.head_count"),
    Number("attention.layer_norm_rms_epsilon", "rms_norm_eps", float),
    Number("rope.freq_base", "rope_theta", float, 10000.0),
)
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
BOTH_SIDES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ATTENTION_BIAS, MLP_BIAS = {"attention_bias": "blk.0.attn_q.bias"}, {"mlp_bias": "blk.0.ffn_gate.bias"}
LLAMA = Architecture("llama", ROTARY, OUTSIDE, ATTENTION | DENSE, biases=ATTENTION_BIAS | MLP_BIAS, interleaved=True)
QWEN3 = Architecture("qwen3", ROTARY, OUTSIDE, ATTENTION | HEAD_NORMS | DENSE, biases=ATTENTION_BIAS)
GEMMA2 = Architecture(
    "gemma2",
    (
        *ROTARY,
        Number("attn_logit_softcapping", "attn_logit_softcapping", float, 50.0),
        Number("final_logit_softcapping", "final_logit_softcapping", float, 30.0),
        Number(WINDOW, "sliding_window", default=4096),
    ),
    OUTSIDE,
    ATTENTION | BOTH_SIDES | DENSE,
    norm_offset=1.0,
)
GPT2 = Architecture(
    "gpt2",
    (Number("attention.layer_norm_epsilon", "layer_norm_eps", float),),
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "transformer.h",
    turned=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)


def _experts(router: str, experts: str, names: tuple[str, str, str]) -> dict[str, str]:
    stacks = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    return {"ffn_gate_inp": router} | {ours: experts + theirs for ours, theirs in zip(stacks, names, strict=True)}


ARCHITECTURES = {
    "llama": LLAMA,
    READING: LLAMA._replace(
        model_type=READING,
        numbers=(*ROTARY, Number("target_layers", "target_layers", list, ()), Number("target_width", "target_width")),
    ),
    "qwen2": Architecture("qwen2", ROTARY, OUTSIDE, ATTENTION | DENSE),
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA2._replace(
        model_type="gemma3_text",
        numbers=(
            *ROTARY,
            Number("rope.freq_base_swa", "rope_local_base_freq", float, 10000.0),
            Number("final_logit_softcapping", "final_logit_softcapping", float, 0.0),
            Number(WINDOW, "sliding_window", default=0),
        ),
        in_a_layer=GEMMA2.in_a_layer | HEAD_NORMS,
    ),
    "gpt2": GPT2,
}
CHOSEN = Number("expert_used_count", "num_experts_per_tok")
MIXTURES = {  # the chosen experts' probabilities are normalised, as in llama.cpp
    "llama": LLAMA._replace(
        model_type="mixtral",
        numbers=(*ROTARY, Number("expert_count", "num_local_experts"), CHOSEN),
        in_a_layer=ATTENTION | _experts("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
        biases={},
    ),
    "qwen3moe": QWEN3._replace(
        model_type="qwen3_moe",
        numbers=(
            *ROTARY,
            Number("expert_count", "num_experts"),
            CHOSEN,
            Number("expert_feed_forward_length", "moe_intermediate_size"),
        ),
        in_a_layer=ATTENTION
        | HEAD_NORMS
        | _experts("mlp.gate", "mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
        constants={"norm_topk_prob": True},
    ),
}
SERVED = {*ARCHITECTURES, *MIXTURES}


def architecture_of(file: GGUF) -> Architecture:
    """The file's architecture. Raises ValueError naming the file and an unsupported architecture."""
    name = architecture_name(file)
    experts = int(number(file, "expert_count", 0))
    served = MIXTURES if experts else ARCHITECTURES
    if name in served:
        return served[name]
    if name in SERVED:
        raise ValueError(f"{file.path} is a mixture of {experts} experts, which is not served for {name!r}")
    raise ValueError(
        f"{file.path} has architecture {name!r}{nearest(name, SERVED)}, which is not read from "
        "GGUF files. Other families load from Hugging Face folders, and docs/extending.md shows how to add one"
    )


def has_window(layers: int, global_every: int) -> list[bool]:
    """Whether each layer has a window, if the last of every `global_every` has none; 0: all have one."""
    return [global_every == 0 or (i + 1) % global_every > 0 for i in range(layers)]


def query_scale(name: str, fields: Mapping[str, Any]) -> int:
    """Gemma's queries are divided by the square root of this, derived from the number of layers as in llama.cpp."""
    if fields["num_hidden_layers"] == LARGEST[name]:
        return fields["hidden_size"] // fields["num_attention_heads"]
    return fields["head_dim"]
