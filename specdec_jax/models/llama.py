"""Hugging Face's model_type `llama`: Llama 2 and 3, TinyLlama, SmolLM2 and others of their architecture."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from specdec_jax.models import decoder_only
from specdec_jax.models.decoder_only import Decoder
from specdec_jax.models.rotary_decoder import FAMILY, AttentionBias, RotaryConfig


@dataclass(frozen=True)
class LlamaConfig(AttentionBias, RotaryConfig):
    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    _: KW_ONLY
    mlp_bias: bool = False


def module(config: LlamaConfig, dtype: Any = jnp.bfloat16) -> Decoder:
    """The flax module behind `language_model`, as training takes it."""
    return Decoder(FAMILY, config, dtype)


parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> LlamaConfig:
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,  # not hidden_size / heads
        rope_theta=100.0,
        rope_scaling=scaling | {"original_max_position_embeddings": 16},
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
