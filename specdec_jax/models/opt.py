"""Hugging Face's model_type `opt` (arXiv 2205.01068): learned positions; OPT-350M has post-norms."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only, layer_norm_decoder
from specdec_jax.models.config import HFConfig
from specdec_jax.models.layer_norm_decoder import LayerNorms, Names

NAMES = Names(
    prefix="model.",
    layers="decoder.layers",
    embedding="decoder.embed_tokens",
    positions="decoder.embed_positions",
    head="lm_head",
    norms=("self_attn_layer_norm", "final_layer_norm", "decoder.final_layer_norm"),
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    mlp=("fc1", "fc2"),
    projections=("decoder.project_in", "decoder.project_out"),
)


@dataclass(frozen=True)
class OPTConfig(LayerNorms, HFConfig):
    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    position_offset: ClassVar[int] = 2
    renamed: ClassVar[Mapping[str, str]] = {
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
        "remove_final_layer_norm": "_remove_final_layer_norm",
    }

    _: KW_ONLY
    word_embed_proj_dim: int
    hidden_act: str = "relu"
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = False
    enable_bias: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("word_embed_proj_dim")

    embedding_width = property(lambda self: self.word_embed_proj_dim)
    num_positions = property(lambda self: self.max_position_embeddings + self.position_offset)
    order = property(lambda self: "pre" if self.do_layer_norm_before else "post")
    last_norm = property(lambda self: self.do_layer_norm_before and not self.remove_final_layer_norm)
    attention_bias = property(lambda self: self.enable_bias)
    mlp_bias = property(lambda self: self.enable_bias)

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The width of embeddings, by default `hidden_size`."""
        if not config.get("layer_norm_elementwise_affine", True):
            raise ValueError(
                "models/opt.py serves layer norms with weights, and layer_norm_elementwise_affine is false"
            )
        return {"word_embed_proj_dim": values.get("hidden_size"), **values}


FAMILY = layer_norm_decoder.family(NAMES)
parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> OPTConfig:
    return OPTConfig(61, 24, 40, 2, 3, word_embed_proj_dim=16, max_position_embeddings=64, eos_token_ids=(2,))
