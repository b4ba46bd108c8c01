"""Hugging Face's model_type `qwen3_moe` (arXiv 2505.09388): Qwen3's block, with a mixture of experts for its MLP."""

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import flax.linen as nn

from specdec_jax.models import decoder_only, rotary_decoder
from specdec_jax.models.config import SLIDING
from specdec_jax.models.mixture import Mixture, mixture_table
from specdec_jax.models.qwen3 import Qwen3Config
from specdec_jax.models.rotary_decoder import RotaryBlock
from specdec_jax.models.weights import Parameter

DENSE = " with one MLP"


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Fields named as in Hugging Face's config.json, with its defaults. Numbers that do not fit raise ValueError.

    Layers of `mlp_only_layers`, and those but every `decoder_sparse_step`-th, have one MLP of `intermediate_size`.
    """

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"

    _: KW_ONLY
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("moe_intermediate_size", "num_experts", "num_experts_per_tok", "decoder_sparse_step")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_experts} experts")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Of each layer."""
        return tuple(kind + DENSE * self.is_dense(i) for i, kind in enumerate(super().layer_kinds))

    def is_dense(self, layer: int) -> bool:
        """Whether this layer has one MLP."""
        return layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step > 0

    @classmethod
    def own_fields(cls, config: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """The fields as the family means them: all layers have the window, or none; heads share the width."""
        heads = given.get("num_attention_heads")
        width = config.get("head_dim") or (given.get("hidden_size", 0) // heads if heads else 0)
        given = super().own_fields({**config, "max_window_layers": 0, "head_dim": width}, given | {"layer_types": None})
        experts = config.get("num_experts") or config.get("num_local_experts") or cls.num_experts  # transformers 4, 5
        return given | {"num_experts": experts, "mlp_only_layers": tuple(given.get("mlp_only_layers") or ())}


class Qwen3MoeBlock(RotaryBlock):
    """With a mixture of experts, in most layers."""

    def mlp(self) -> nn.Module:
        """What follows attention, named `mlp`."""
        c = self.config
        if self.kind.endswith(DENSE):
            return super().mlp()
        sizes = c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size
        return Mixture(*sizes, c.norm_topk_prob, self.dtype, c.hidden_act, name="mlp")


def _mlp_table(c: Any, layer: int, prefix: str, path: tuple[str, ...]) -> dict[str, Parameter]:
    if c.is_dense(layer):
        return rotary_decoder.mlp_table(c, layer, prefix, path)
    names, sizes = ("gate_proj", "up_proj", "down_proj"), (c.num_experts, c.moe_intermediate_size, c.hidden_size)
    return mixture_table(f"{prefix}mlp.gate", prefix + "mlp.experts.{}.", names, path, sizes)


parameter_table = functools.partial(rotary_decoder.parameter_table, mlp=_mlp_table)
FAMILY = rotary_decoder.FAMILY._replace(block=Qwen3MoeBlock, table=parameter_table)
language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> Qwen3MoeConfig:
    """The smallest configuration that uses every part; tests ask every family for one."""
    more = {"sliding_window": 5, "layer_types": (SLIDING, SLIDING), "mlp_only_layers": (1,), "attention_bias": True}
    more |= {"moe_intermediate_size": 12, "num_experts": 16, "num_experts_per_tok": 2}
    return Qwen3MoeConfig(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, eos_token_ids=(2,), **more)
