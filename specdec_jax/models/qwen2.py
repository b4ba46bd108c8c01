"""Hugging Face's model_type `qwen2` (arXiv 2407.10671): Llama's block with biases for queries, keys and values."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only
from specdec_jax.models.config import FULL, SLIDING
from specdec_jax.models.rotary_decoder import FAMILY, RotaryWindowedConfig

WINDOW, FULL_LAYERS = 4096, 28  # defaults if config.json has no entries


@dataclass(frozen=True)
class Qwen2Config(RotaryWindowedConfig):
    """Windows are used only with `use_sliding_window`, by default in layers from `max_window_layers`."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    qkv_bias: ClassVar[Any] = True

    _: KW_ONLY
    max_position_embeddings: int = 32768

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        values = super().read_fields(config, values)
        if not config.get("use_sliding_window"):
            return values | {"sliding_window": None, "layer_types": None}
        first, count = config.get("max_window_layers", FULL_LAYERS), config["num_hidden_layers"]
        kinds = values.get("layer_types") or [SLIDING if i >= first else FULL for i in range(count)]
        return {"sliding_window": WINDOW, **values, "layer_types": tuple(kinds)}

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"use_sliding_window": self.sliding_window is not None}


parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> Qwen2Config:
    windows = {"sliding_window": 5, "layer_types": (FULL, SLIDING)}
    return Qwen2Config(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, eos_token_ids=(2,), **windows)
