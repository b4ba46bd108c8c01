"""Hugging Face's model_type `mixtral` (arXiv 2401.04088): Mistral's block, with a mixture of experts for its MLP."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from specdec_jax.models import decoder_only
from specdec_jax.models.mistral import MistralConfig
from specdec_jax.models.mixture import FAMILY, Experts, check_experts


@dataclass(frozen=True)
class MixtralConfig(MistralConfig):
    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    window: ClassVar[int | None] = None
    router: ClassVar[str] = "block_sparse_moe.gate"
    expert: ClassVar[str] = "block_sparse_moe.experts.{}"
    projections: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")  # gate, up, down

    _: KW_ONLY
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("num_local_experts", "num_experts_per_tok")
        check_experts(self)

    @property
    def experts(self) -> Experts:
        return Experts(self.num_local_experts, self.num_experts_per_tok, self.intermediate_size, True)


parameter_table, language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> MixtralConfig:
    windows: dict[str, Any] = {"sliding_window": 5, "max_position_embeddings": 64}
    return MixtralConfig(61, 24, 40, 2, 4, 2, 8, num_local_experts=16, eos_token_ids=(2,), **windows)
