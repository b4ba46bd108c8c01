"""Hugging Face's model_type `smollm3`: Llama's block, without positions in every fourth layer (arXiv 2501.18795)."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only, rotary_decoder
from specdec_jax.models.config import FULL, SLIDING
from specdec_jax.models.rope import rope
from specdec_jax.models.rotary_decoder import AttentionBias, RotaryWindowedConfig

WITHOUT = " without positions"
INTERVAL = 4  # default interval of layers without positions


@dataclass(frozen=True)
class SmolLM3Config(AttentionBias, RotaryWindowedConfig):
    """`no_rope_layers` has 1 for every layer with rotary positions and 0 for those without, as in Hugging Face's."""

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"

    _: KW_ONLY
    max_position_embeddings: int = 32768
    rope_theta: float = 2_000_000.0
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if len(self.no_rope_layers) != self.num_hidden_layers or set(self.no_rope_layers) - {0, 1}:
            raise ValueError(f"no_rope_layers must be 0 or 1 of {self.num_hidden_layers} layers: {self.no_rope_layers}")

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        both = zip(super().layer_kinds, self.no_rope_layers, strict=True)
        return tuple(kind if rotary else kind + WITHOUT for kind, rotary in both)

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The fields of this family, with default layers for positions and windows."""
        values = super().read_fields(config, values)
        every, count = config.get("no_rope_layer_interval") or INTERVAL, values.get("num_hidden_layers") or 0
        rotary = tuple(values.get("no_rope_layers") or (int((i + 1) % every != 0) for i in range(count)))
        window = values.get("sliding_window") if config.get("use_sliding_window") else None
        kinds = tuple(SLIDING if window is not None and not has_rope else FULL for has_rope in rotary)
        return values | {
            "no_rope_layers": rotary,
            "sliding_window": window,
            "layer_types": values["layer_types"] or kinds,
        }

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"use_sliding_window": self.sliding_window is not None}


FAMILY = rotary_decoder.FAMILY._replace(
    places=lambda config, kind, positions: None if kind.endswith(WITHOUT) else rope(config, positions)
)
parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> SmolLM3Config:
    more = {"sliding_window": 5, "no_rope_layers": (1, 0), "layer_types": (FULL, SLIDING)}
    return SmolLM3Config(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, eos_token_ids=(2,), **more)
