"""Hugging Face's model_type `bloom` (arXiv 2211.05100): linear biases by distance (ALiBi) instead of positions."""

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only, layer_norm_decoder
from specdec_jax.models.attention import Scoring, alibi, alibi_slopes
from specdec_jax.models.config import HFConfig
from specdec_jax.models.layer_norm_decoder import LayerNorms, Names

NAMES = Names(
    prefix="transformer.",
    layers="h",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    head="lm_head",
    norms=("input_layernorm", "post_attention_layernorm", "ln_f"),
    attention=("self_attention.query_key_value", "self_attention.dense"),
    mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)


@dataclass(frozen=True)
class BloomConfig(LayerNorms, HFConfig):
    """Biases extend to any distance; the context is `seq_length`, the length of the training texts."""

    model_type: ClassVar[str] = "bloom"
    architecture: ClassVar[str] = "BloomForCausalLM"
    norm_of_embeddings: ClassVar[bool] = True
    renamed: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "layer_norm_eps": "layer_norm_epsilon",
    }

    _: KW_ONLY
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    apply_residual_connection_post_layernorm: bool = False
    tie_word_embeddings: bool = True

    order = property(lambda self: "normed" if self.apply_residual_connection_post_layernorm else "pre")
    scoring = property(lambda self: Scoring(bias=functools.partial(alibi, alibi_slopes(self.num_attention_heads))))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The width inside the MLP, which config.json does not have, and the old name of `hidden_size`."""
        width = values.get("hidden_size") or config.get("n_embed") or 0
        return {**values, "hidden_size": width, "intermediate_size": 4 * width, "hidden_act": cls.hidden_act}


FAMILY = layer_norm_decoder.family(NAMES)
parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> BloomConfig:
    fields = {"tie_word_embeddings": False, "max_position_embeddings": 64}
    return BloomConfig(61, 24, 96, 2, 3, eos_token_ids=(2,), **fields)
