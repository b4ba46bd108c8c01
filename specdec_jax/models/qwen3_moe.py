"""Hugging Face's model_type `qwen3_moe` (arXiv 2505.09388): Qwen3's block, with a mixture of experts for its MLP."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only
from specdec_jax.models.config import SLIDING
from specdec_jax.models.mixture import DENSE, FAMILY, Experts, check_experts
from specdec_jax.models.qwen3 import Qwen3Config


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Layers in `mlp_only_layers`, and all but every `decoder_sparse_step`-th, have one MLP of `intermediate_size`."""

    model_type: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    router: ClassVar[str] = "mlp.gate"
    expert: ClassVar[str] = "mlp.experts.{}"
    projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

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
        check_experts(self)

    @property
    def experts(self) -> Experts:
        return Experts(self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size, self.norm_topk_prob)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        every, dense = self.decoder_sparse_step, self.mlp_only_layers
        kinds = enumerate(super().layer_kinds)
        return tuple(kind + DENSE * (i in dense or (i + 1) % every > 0) for i, kind in kinds)

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The fields of this family: windows in all layers or none, and by default heads that divide the width."""
        heads = values.get("num_attention_heads")
        width = config.get("head_dim") or (values.get("hidden_size", 0) // heads if heads else 0)
        values = super().read_fields(
            {**config, "max_window_layers": 0, "head_dim": width}, values | {"layer_types": None}
        )
        experts = config.get("num_experts") or config.get("num_local_experts") or cls.num_experts  # transformers 4, 5
        return values | {"num_experts": experts, "mlp_only_layers": tuple(values.get("mlp_only_layers") or ())}


parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> Qwen3MoeConfig:
    more = {"sliding_window": 5, "layer_types": (SLIDING, SLIDING), "mlp_only_layers": (1,), "attention_bias": True}
    more |= {"moe_intermediate_size": 12, "num_experts": 16, "num_experts_per_tok": 2}
    return Qwen3MoeConfig(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, eos_token_ids=(2,), **more)
