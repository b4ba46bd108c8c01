"""Hugging Face's model_type `mixtral` (arXiv 2401.04088): Mistral's block, with a mixture of experts for its MLP."""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import flax.linen as nn

from specdec_jax.models import decoder_only, rotary_decoder
from specdec_jax.models.mistral import MistralConfig
from specdec_jax.models.mixture import Mixture, mixture_table
from specdec_jax.models.rotary_decoder import RotaryBlock
from specdec_jax.models.weights import Parameter


@dataclass(frozen=True)
class MixtralConfig(MistralConfig):
    """Fields named as in Hugging Face's config.json, with its defaults. Numbers that do not fit raise ValueError."""

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    window: ClassVar[int | None] = None

    _: KW_ONLY
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("num_local_experts", "num_experts_per_tok")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} of {self.num_local_experts} experts")


class MixtralBlock(RotaryBlock):
    """With a mixture of experts."""

    def mlp(self) -> nn.Module:
        """What follows attention, named `mlp`."""
        c = self.config
        sizes = c.num_local_experts, c.num_experts_per_tok, c.intermediate_size
        return Mixture(*sizes, True, self.dtype, c.hidden_act, name="mlp")


def _mlp_table(c: Any, layer: int, prefix: str, path: tuple[str, ...]) -> dict[str, Parameter]:
    del layer
    expert, sizes = prefix + "block_sparse_moe.experts.{}.", (c.num_local_experts, c.intermediate_size, c.hidden_size)
    return mixture_table(f"{prefix}block_sparse_moe.gate", expert, ("w1", "w3", "w2"), path, sizes)


parameter_table = functools.partial(rotary_decoder.parameter_table, mlp=_mlp_table)
FAMILY = rotary_decoder.FAMILY._replace(block=MixtralBlock, table=parameter_table)
language_model, init_params, params_from_named, named_from_params = decoder_only.functions(FAMILY)


def example_config() -> MixtralConfig:
    """The smallest configuration that uses every part; tests ask every family for one."""
    windows: dict[str, Any] = {"sliding_window": 5, "max_position_embeddings": 64}
    return MixtralConfig(61, 24, 40, 2, 4, 2, 8, num_local_experts=16, eos_token_ids=(2,), **windows)
