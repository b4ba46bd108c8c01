"""Hugging Face's model_type `mistral` (arXiv 2310.06825): Llama's block, every layer of which may see a window only."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only
from specdec_jax.models.rotary_decoder import FAMILY, WindowedConfig, parameter_table

__all__ = ["MistralConfig", "init_params", "language_model", "named_from_params", "parameter_table"]

WINDOW = 4096  # of a config.json that names none; null is no window


@dataclass(frozen=True)
class MistralConfig(WindowedConfig):
    """Fields named as in Hugging Face's config.json, with its defaults. Numbers that do not fit raise ValueError."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    max_position_embeddings: int = 131072

    @classmethod
    def own_fields(cls, config: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """The fields as the family means them."""
        return given | {"sliding_window": config.get("sliding_window", WINDOW), "layer_types": None}


language_model = functools.partial(decoder_only.language_model, FAMILY)
init_params = functools.partial(decoder_only.init_params, FAMILY)
params_from_named = functools.partial(decoder_only.params_from_named, FAMILY)
named_from_params = functools.partial(decoder_only.named_from_params, FAMILY)


def example_config() -> MistralConfig:
    """The smallest configuration that uses every part; tests ask every family for one."""
    return MistralConfig(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, sliding_window=5, eos_token_ids=(2,))
