"""Hugging Face's model_type `mt5`: mT5 (arXiv 2010.11934), the multilingual T5 1.1."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.contrib.encoder import encoder_decoder
from specdec_jax.contrib.encoder.t5 import FAMILY, T5Config


@dataclass(frozen=True)
class MT5Config(T5Config):
    model_type: ClassVar[str] = "mt5"
    architecture: ClassVar[str] = "MT5ForConditionalGeneration"

    _: KW_ONLY
    hidden_act: str = "gelu_new"
    is_gated_act: bool = True
    tie_word_embeddings: bool = False

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The fields with an untied head: transformers ties mT5's head without scaling."""
        return super().read_fields(config, values) | {"tie_word_embeddings": False}


parameter_table, language_model, init_params, params_from_named, named_from_params = encoder_decoder.functions(FAMILY)


def example_config() -> MT5Config:
    fields = {"eos_token_ids": (2,), "relative_attention_num_buckets": 12, "relative_attention_max_distance": 30}
    return MT5Config(61, 24, 40, 3, 3, num_encoder_layers=2, head_dim=6, max_position_embeddings=64, **fields)
