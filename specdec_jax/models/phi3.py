"""Hugging Face's model_type `phi3` (arXiv 2404.14219): Llama's block, stored with fused projections."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only
from specdec_jax.models.rope import rope_type
from specdec_jax.models.rotary_decoder import FAMILY, RotaryWindowedConfig

OLD_NAMES = ("su", "yarn")  # older names of the rope type `longrope`


@dataclass(frozen=True)
class Phi3Config(RotaryWindowedConfig):
    """With `longrope` the context is that before the scaling (`rope.inverse_frequencies`)."""

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    fused_weights: ClassVar[bool] = True
    rotates_parts: ClassVar[bool] = True

    _: KW_ONLY
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0

    @property
    def context(self) -> int:
        """Maximum number of tokens of a text."""
        slots = self.max_position_embeddings
        return (
            min(slots, self.original_max_position_embeddings) if rope_type(self.rope_scaling) == "longrope" else slots
        )

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The window applies to all layers; older names of `longrope` are accepted."""
        config = {"original_max_position_embeddings": cls.original_max_position_embeddings, **config}
        for name in ("rope_scaling", "rope_parameters"):
            if config.get(name) and rope_type(config[name]) in OLD_NAMES:
                config[name] = {**config[name], "rope_type": "longrope"}
        return super().read_fields(config, values) | {"layer_types": None}


parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> Phi3Config:
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0], "factor": 2.0}
    more = {"rope_scaling": scaling | {"original_max_position_embeddings": 64}, "partial_rotary_factor": 0.75}
    more |= {"max_position_embeddings": 128, "original_max_position_embeddings": 64, "sliding_window": 5}
    return Phi3Config(61, 24, 40, 2, 4, 2, 8, eos_token_ids=(2,), **more)
