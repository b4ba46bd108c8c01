"""Hugging Face's model_type `t5`: T5 (arXiv 1910.10683), T5 1.1 and Flan-T5, whose MLP is gated and whose head is not
tied, and ByT5 (arXiv 2105.13626), which reads bytes."""

from dataclasses import dataclass
from typing import ClassVar

from specdec_jax.models import encoder_decoder
from specdec_jax.models.relative_attention import FAMILY, RelativeConfig

__all__ = ["T5Config", "init_params", "language_model", "named_from_params", "parameter_table", "params_from_named"]


@dataclass(frozen=True)
class T5Config(RelativeConfig):
    """Fields of Hugging Face's config.json, with its defaults. Numbers that do not fit raise ValueError."""

    model_type: ClassVar[str] = "t5"
    architecture: ClassVar[str] = "T5ForConditionalGeneration"


parameter_table = FAMILY.table
language_model, init_params, params_from_named, named_from_params = encoder_decoder.functions(FAMILY)


def example_config() -> T5Config:
    """The smallest configuration that uses every part; tests ask every family for one."""
    own = {"eos_token_ids": (2,), "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    gated = {"hidden_act": "gelu_new", "is_gated_act": True, "tie_word_embeddings": False}
    return T5Config(61, 24, 40, 2, 4, num_encoder_layers=3, head_dim=8, max_position_embeddings=64, **own, **gated)
