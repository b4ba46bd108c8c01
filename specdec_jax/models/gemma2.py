"""Hugging Face's model_type `gemma2` (arXiv 2408.00118): soft caps, norms on both sides, windows in half the layers."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from specdec_jax.models import decoder_only, rotary_decoder
from specdec_jax.models.attention import Scoring
from specdec_jax.models.config import FULL, SLIDING
from specdec_jax.models.rotary_decoder import AttentionBias, RotaryWindowedConfig

CAPS = "attn_logit_softcapping", "final_logit_softcapping"


@dataclass(frozen=True)
class Gemma2Config(AttentionBias, RotaryWindowedConfig):
    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    renamed: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    post_norms: ClassVar[bool] = True
    norm_offset: ClassVar[float] = 1.0
    full_every: ClassVar[int] = 2  # every second layer is FULL if config.json has no kinds

    _: KW_ONLY
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("query_pre_attn_scalar", *CAPS):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")

    scoring = property(lambda self: Scoring(self.query_pre_attn_scalar**-0.5, self.attn_logit_softcapping))
    logit_cap = property(lambda self: self.final_logit_softcapping)

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Caps, which may be null, and default kinds of layers."""
        if config.get("use_bidirectional_attention"):
            raise ValueError(
                f"models/{cls.model_type}.py serves causal attention, and use_bidirectional_attention is true"
            )
        values = super().read_fields(config, values) | {name: config[name] for name in CAPS if name in config}
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or cls.full_every
        count = values.get("num_hidden_layers") or 0
        kinds = tuple(SLIDING if (i + 1) % every else FULL for i in range(count))
        return values | {"layer_types": values["layer_types"] or kinds}


class Scaled(nn.Module):
    """Embeddings times the square root of their width, in the precision of the stored embeddings."""

    config: Gemma2Config
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return x * jnp.asarray(self.config.hidden_size**0.5, self.dtype).astype(jnp.float32)


FAMILY = rotary_decoder.FAMILY._replace(embed=Scaled)
parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> Gemma2Config:
    more = {"sliding_window": 5, "layer_types": (SLIDING, FULL), "query_pre_attn_scalar": 6}
    return Gemma2Config(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, eos_token_ids=(2,), **more)
