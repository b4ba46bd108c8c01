"""Hugging Face's model_type `gemma3_text` (arXiv 2503.19786): five local layers per global one."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only, gemma2
from specdec_jax.models.attention import Scoring
from specdec_jax.models.config import FULL, SLIDING
from specdec_jax.models.gemma2 import Gemma2Config
from specdec_jax.models.rope import rope, rope_to_hf


@dataclass(frozen=True)
class Gemma3TextConfig(Gemma2Config):
    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    qk_norm: ClassVar[bool] = True
    full_every: ClassVar[int] = 6

    _: KW_ONLY
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0  # for global layers
    rope_local_base_freq: float = 10_000.0  # for local layers
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.rope_local_base_freq < math.inf:
            raise ValueError(f"rope_local_base_freq must be a number above 0, got {self.rope_local_base_freq!r}")

    # without a cap regardless of config.json, as in transformers
    scoring = property(lambda self: Scoring(self.query_pre_attn_scalar**-0.5))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Reads both formats: separate fields (transformers 4) and `rope_parameters` per kind of layer (5)."""
        nested = config.get("rope_parameters") or {}
        if FULL not in nested:
            return super().read_fields(config, values)
        local = nested.get(SLIDING) or {}
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"local layers have plain rotary positions, got rope_parameters {local!r}")
        values = super().read_fields({**config, "rope_parameters": nested[FULL]}, values)
        return values | {"rope_local_base_freq": float(local.get("rope_theta", cls.rope_local_base_freq))}

    def to_hf(self) -> dict[str, Any]:
        rotary = {
            FULL: rope_to_hf(self.rope_theta, self.rope_scaling),
            SLIDING: rope_to_hf(self.rope_local_base_freq, None),
        }
        return super().to_hf() | {"rope_parameters": rotary}


FAMILY = gemma2.FAMILY._replace(
    places=lambda config, kind, positions: rope(
        config, positions, config.rope_local_base_freq if kind == SLIDING else None
    )
)
parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> Gemma3TextConfig:
    more = {"sliding_window": 5, "layer_types": (SLIDING, FULL), "query_pre_attn_scalar": 6, "rope_theta": 300.0}
    return Gemma3TextConfig(61, 24, 40, 2, 4, 2, 8, max_position_embeddings=64, eos_token_ids=(2,), **more)
