"""Hugging Face's model_type `gpt_neox` (arXiv 2204.06745, and Pythia, 2304.01373): parallel attention and MLP."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only, layer_norm_decoder
from specdec_jax.models.config import RopeConfig
from specdec_jax.models.layer_norm_decoder import LayerNorms, Names
from specdec_jax.models.rope import rope

NAMES = Names(
    prefix="gpt_neox.",
    layers="layers",
    embedding="embed_in",
    head="embed_out",
    norms=("input_layernorm", "post_attention_layernorm", "final_layer_norm"),
    attention=("attention.query_key_value", "attention.dense"),
    mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
)


@dataclass(frozen=True)
class GPTNeoXConfig(LayerNorms, RopeConfig):
    model_type: ClassVar[str] = "gpt_neox"
    architecture: ClassVar[str] = "GPTNeoXForCausalLM"
    rotates_parts: ClassVar[bool] = True

    _: KW_ONLY
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.25  # fraction of a head's width; `rotary_pct` in transformers 4
    use_parallel_residual: bool = True
    attention_bias: bool = True

    order = property(lambda self: "parallel" if self.use_parallel_residual else "pre")

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Reads both formats: `rotary_pct` and `rotary_emb_base` (transformers 4), `rope_parameters` (5)."""
        old = {"partial_rotary_factor": config.get("rotary_pct"), "rope_theta": config.get("rotary_emb_base")}
        return super().read_fields({**old, **config}, values)

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"rotary_pct": self.partial_rotary_factor, "rotary_emb_base": self.rope_theta}


FAMILY = layer_norm_decoder.family(NAMES, places=lambda config, kind, positions: rope(config, positions))
parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> GPTNeoXConfig:
    return GPTNeoXConfig(61, 24, 40, 2, 3, partial_rotary_factor=0.5, max_position_embeddings=64, eos_token_ids=(2,))
