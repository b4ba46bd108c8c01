"""Hugging Face's model_type `gpt2`: learned positions, and projections stored as [in, out]."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only, layer_norm_decoder
from specdec_jax.models.attention import Scoring
from specdec_jax.models.config import HFConfig
from specdec_jax.models.layer_norm_decoder import LayerNorms, Names

NAMES = Names(
    prefix="transformer.",
    layers="h",
    embedding="wte",
    positions="wpe",
    head="lm_head",
    norms=("ln_1", "ln_2", "ln_f"),
    attention=("attn.c_attn", "attn.c_proj"),
    mlp=("mlp.c_fc", "mlp.c_proj"),
    ignored=("attn.bias", "attn.masked_bias"),
    by_kind=True,
    turned=True,
)
UNSERVED = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")


@dataclass(frozen=True)
class GPT2Config(LayerNorms, HFConfig):
    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    renamed: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "layer_norm_eps": "layer_norm_epsilon",
    }

    _: KW_ONLY
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 1024
    layer_norm_eps: float = 1e-5
    scale_attn_weights: bool = True
    tie_word_embeddings: bool = True

    num_positions = property(lambda self: self.max_position_embeddings)
    scoring = property(lambda self: Scoring(None if self.scale_attn_weights else 1.0))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The width inside the MLP, by default four times `hidden_size`."""
        for name in UNSERVED:
            if config.get(name):
                raise ValueError(f"models/gpt2.py does not serve {name}")
        return {"intermediate_size": 4 * values.get("hidden_size", 0), **values}


FAMILY = layer_norm_decoder.family(NAMES)
parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> GPT2Config:
    return GPT2Config(61, 24, 40, 2, 3, max_position_embeddings=64, eos_token_ids=(2,))
