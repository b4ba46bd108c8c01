"""The architectures of GGUF files that are served: names of tensors, their order, and hyper-parameters.

One entry each. Sources: llama.cpp's converters (`conversion/*.py`) for what files hold, its `src/models/*.cpp` for what
is derived and not stored.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.loading.gguf import settings
from specdec_jax.loading.gguf.metadata import architecture_name, number
from specdec_jax.loading.gguf.reader import GGUF
from specdec_jax.loading.suggest import listed, nearest

READING = "llama_reading"  # ours: a llama that reads its target (models/llama_reading.py); llama.cpp refuses its files


class Architecture(NamedTuple):
    """What files of one `general.architecture` hold, and how it becomes a checkpoint in Hugging Face's names.

    Names are without `.weight` and `.bias`. One with `{}` in it, the number of an expert, is a stack of experts.
    """

    model_type: str
    settings: Callable[[GGUF], dict[str, Any]]  # fields of the family's config, besides those of every family
    outside: dict[str, str]
    in_a_layer: dict[str, str]
    layers: str = "model.layers"
    interleaved: bool = False  # rows of q and k: the halves of a head
    norm_offset: float = 0.0  # norms are stored as what multiplies, the checkpoint adds this to its own
    turned: tuple[str, ...] = ()  # matrices of a layer that the checkpoint has as [in, out]

    def hugging_face_name(self, stored: str) -> tuple[str, str]:
        """(`blk.3.attn_q.weight`) -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`); unknown: (itself, "")."""
        pieces = stored.split(".")
        if len(pieces) == 2 and pieces[0] in self.outside:
            return f"{self.outside[pieces[0]]}.{pieces[1]}", pieces[0]
        if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in self.in_a_layer:
            return f"{self.layers}.{pieces[1]}.{self.in_a_layer[pieces[2]]}.{pieces[3]}", pieces[2]
        return stored, ""

    def stored_name(self, name: str) -> tuple[str, str]:
        """The inverse of `hugging_face_name`, of an architecture that is written; an unknown name stays."""
        outside = {theirs: ours for ours, theirs in self.outside.items()}
        in_a_layer = {theirs: ours for ours, theirs in self.in_a_layer.items()}
        stem, _, kind = name.rpartition(".")
        if stem.startswith(self.layers + "."):
            layer, _, part = stem.removeprefix(self.layers + ".").partition(".")
            return f"blk.{layer}.{in_a_layer[part]}.{kind}", in_a_layer[part]
        return (f"{outside[stem]}.{kind}", outside[stem]) if stem in outside else (name, "")

    def from_file(self, array: np.ndarray, part: str, heads: Mapping[str, int]) -> np.ndarray:
        """A tensor as the checkpoint has it. `heads` are those of `attn_q` and `attn_k`."""
        if self.interleaved and part in heads:
            return unpermute(array, heads[part])
        if part.endswith("norm"):
            return array - np.float32(self.norm_offset) if self.norm_offset else array
        return self.turn(array, part)

    def turn(self, array: np.ndarray, part: str) -> np.ndarray:
        """[in, out] as [out, in], or the other way round, where checkpoint and file have it differently: a view."""
        return array.T if part in self.turned and array.ndim == 2 else array

    def to_file(self, array: np.ndarray, part: str, heads: Mapping[str, int]) -> np.ndarray:
        """The inverse of `from_file`, of a tensor that is turned already, in float32."""
        array = array.astype(np.float32)
        if self.interleaved and part in heads:
            return permute(array, heads[part])
        if part.endswith("norm"):
            return array + np.float32(self.norm_offset) if self.norm_offset else array
        return np.ascontiguousarray(array)


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from GGUF's order (the two halves of a head interleaved) to Hugging Face's."""
    if array.shape[0] % (2 * heads):
        return array  # a wrong shape, which the weight table reports by name
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from Hugging Face's order to GGUF's: the halves of a head interleaved."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


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
LLAMA = Architecture("llama", settings.llama, OUTSIDE, ATTENTION | DENSE, interleaved=True)
QWEN3 = Architecture("qwen3", settings.qwen3, OUTSIDE, ATTENTION | HEAD_NORMS | DENSE)
GEMMA2 = Architecture("gemma2", settings.gemma2, OUTSIDE, ATTENTION | BOTH_SIDES | DENSE, norm_offset=1.0)
GPT2 = Architecture(
    "gpt2",
    settings.gpt2,
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
    READING: LLAMA._replace(model_type=READING, settings=settings.reading),
    "qwen2": Architecture("qwen2", settings.rotary, OUTSIDE, ATTENTION | DENSE),
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA2._replace(
        model_type="gemma3_text",
        settings=settings.gemma3,
        in_a_layer=GEMMA2.in_a_layer | HEAD_NORMS,
    ),
    "gpt2": GPT2,
}
MIXTURES = {
    "llama": LLAMA._replace(
        model_type="mixtral",
        settings=settings.mixtral,
        in_a_layer=ATTENTION | _experts("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    ),
    "qwen3moe": QWEN3._replace(
        model_type="qwen3_moe",
        settings=settings.qwen3_moe,
        in_a_layer=ATTENTION
        | HEAD_NORMS
        | _experts("mlp.gate", "mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
    ),
}
SERVED = {*ARCHITECTURES, *MIXTURES}
NUMBERS: Mapping[str, Callable[[Any], dict[str, Any]]] = {  # a config's as metadata, of those that are written
    "llama": settings.llama_numbers,
    READING: settings.reading_numbers,
    "qwen2": settings.qwen2_numbers,
    "qwen3": settings.qwen3_numbers,
    "gemma2": settings.gemma2_numbers,
    "gemma3": settings.gemma3_numbers,
    "gpt2": settings.gpt2_numbers,
}


def architecture_of(file: GGUF) -> Architecture:
    """The file's. Raises ValueError naming the file and its architecture, unless it is served."""
    name = architecture_name(file)
    experts = int(number(file, "expert_count", 0))
    served = MIXTURES if experts else ARCHITECTURES
    if name in served:
        return served[name]
    if name in SERVED:
        raise ValueError(f"{file.path} is a mixture of {experts} experts, which is not served for {name!r}")
    raise ValueError(
        f"{file.path} has architecture {name!r}{nearest(name, SERVED)}; GGUF files of {listed(map(repr, SERVED))} are "
        "served. Other families load from Hugging Face folders, and docs/extending.md shows how to add one"
    )


def architecture_for(config: Any) -> tuple[str, Architecture]:
    """Name and architecture that a config of a family is written as. Raises ValueError when it is not written."""
    written = {ARCHITECTURES[name].model_type: name for name in NUMBERS}
    name = written.get(type(config).__module__.rpartition(".")[2])
    if name is None:
        raise ValueError(f"only models of family {listed(written)} are written as GGUF, got a {type(config).__name__}")
    return name, ARCHITECTURES[name]
