"""Hugging Face's model_type `qwen3` (arXiv 2505.09388): Llama's block with norms of queries and keys per head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only
from specdec_jax.models.config import FULL, SLIDING
from specdec_jax.models.qwen2 import Qwen2Config
from specdec_jax.models.rotary_decoder import FAMILY, AttentionBias

HEAD_DIM = 128  # default if config.json has no entry, for any width


@dataclass(frozen=True)
class Qwen3Config(AttentionBias, Qwen2Config):
    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    qk_norm: ClassVar[bool] = True

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        return super().read_fields(config, values) | {"head_dim": config.get("head_dim") or HEAD_DIM}


parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> Qwen3Config:
    more = {"sliding_window": 5, "layer_types": (SLIDING, FULL), "attention_bias": True}
    return Qwen3Config(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, eos_token_ids=(2,), **more)
