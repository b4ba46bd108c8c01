"""Hugging Face's model_type `mistral` (arXiv 2310.06825): Llama's block, with a window in all layers or none."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only
from specdec_jax.models.rotary_decoder import FAMILY, RotaryWindowedConfig


@dataclass(frozen=True)
class MistralConfig(RotaryWindowedConfig):
    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    window: ClassVar[int | None] = 4096  # default if config.json has no entry; null: no window

    _: KW_ONLY
    max_position_embeddings: int = 131072

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        values = super().read_fields(config, values)
        return values | {"sliding_window": config.get("sliding_window", cls.window), "layer_types": None}


parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> MistralConfig:
    return MistralConfig(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, sliding_window=5, eos_token_ids=(2,))
