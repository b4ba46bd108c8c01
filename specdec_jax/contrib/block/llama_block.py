"""model_type `llama_block`, of this project: a `llama_reading` that drafts a block of tokens in one pass (drafter.py).

Additional parameters: for every position of a block after the first a vector that is added to the target's features,
and the two matrices of the low-rank term. It has no projection of its own states, because its later drafts read none.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.contrib.block.drafter import MARKOV, MASK, block
from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.drafters.draft_models.llama_reading import OWN, LlamaReadingConfig
from specdec_jax.models import decoder_only
from specdec_jax.models.weights import Parameter
from specdec_jax.types import DraftModel, Params

Array = jax.Array


@dataclass(frozen=True)
class LlamaBlockConfig(LlamaReadingConfig):
    """A reading drafter's configuration. Raises ValueError for invalid values.

    `block_size`: tokens of a block (K); `rank`: that of the low-rank term (R).
    """

    block_size: int = 8
    rank: int = 64

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("block_size", 2), ("rank", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of {least} or more, got {value!r}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaBlockConfig":
        """Reads config.json: llama_reading's with `block_size` and `rank`. Raises ValueError for invalid values."""
        return block_config(LlamaReadingConfig.from_hf(config), config.get("block_size", 0), config.get("rank", 0))

    def to_hf(self) -> dict[str, Any]:
        """A config.json that `from_hf` reads back."""
        names = {"architectures": ["LlamaBlockDrafter"], "model_type": "llama_block"}
        return super().to_hf() | names


def block_config(base: LlamaReadingConfig, block_size: int, rank: int = 64) -> LlamaBlockConfig:
    """The configuration of a block drafter with the layers of a reading one."""
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(LlamaReadingConfig)}
    return LlamaBlockConfig(**fields, block_size=block_size, rank=rank)


def language_model(config: LlamaBlockConfig, dtype: Any = jnp.bfloat16) -> DraftModel:
    """The model. It drafts for its target by `block`, at most a block; `apply` raises ValueError."""
    base = llama_reading.language_model(config, dtype)
    assert base.reading is not None

    def stand_in(params: Params, hidden: Array) -> Array:
        raise ValueError("a block drafter's later drafts read none of its states: chains of it cannot be traced")

    def draft_with(model: DraftModel, max_draft_length: int):
        return block(model, min(max_draft_length, config.block_size))

    return base.replace(reading=base.reading._replace(stand_in=stand_in), draft_with=draft_with)


def init_params(config: LlamaBlockConfig, key: Array, dtype: Any = jnp.bfloat16):
    """Random parameters of the llama; those of reading and of blocks have no effect yet. The key is consumed."""
    return with_block(config, llama_reading.init_params(config, key, dtype), dtype)


def with_block(config: LlamaBlockConfig, params: Params, dtype: Any) -> Params:
    """A reading drafter's parameters with those of blocks, which have no effect yet.

    U begins as the directions of largest variance of the embedding, so that similar tokens have similar effects.
    """
    table = jnp.asarray(params["embedding"], jnp.float32)
    rank, width = config.rank, config.hidden_size
    token = table @ jnp.linalg.eigh(table.T @ table)[1][:, ::-1][:, :rank]
    token = jnp.pad(token, ((0, 0), (0, rank - token.shape[1])))  # a rank above the width
    token *= rank**-0.5 / jnp.maximum(jnp.std(token), 1e-6)
    return {
        **{name: leaf for name, leaf in params.items() if name != OWN},
        MASK: jnp.zeros((config.block_size - 1, 2 * width), dtype),
        MARKOV: {"token": token.astype(dtype), "next": jnp.zeros((config.vocab_size, rank), dtype)},
    }


def later_input(
    config: LlamaBlockConfig, params: Params, first: tuple[Array, Array], hidden: Array, step: int, dtype: Any
) -> tuple[Array, Array]:
    """As `llama_reading.later_input`: masks, which repeat the last token of the text and the features read with it."""
    embedded, added = (jnp.pad(leaf, ((0, 0), (step, 0), (0, 0)))[:, : leaf.shape[1]] for leaf in first)
    return embedded, added + params[MASK][step - 1][None, None].astype(jnp.float32)


def head_rows(params: Params, rows: Array, tokens: Array) -> Array:
    """As `llama_reading.head_rows`: the head's rows next to those of V, [C, D + R]."""
    return jnp.concatenate([rows, params[MARKOV]["next"][tokens]], axis=1)


def head_input(params: Params, hidden: Array, tokens: Array, step: int) -> Array:
    """As `llama_reading.head_input`: hidden states next to U of the last draft, [R, T, D + R]; zeros for the first."""
    before = params[MARKOV]["token"][tokens].astype(jnp.float32) * float(step > 0)
    return jnp.concatenate([hidden, before], axis=-1)


def example_config() -> LlamaBlockConfig:
    """The smallest configuration that uses every part; its target is llama's example."""
    return block_config(llama_reading.example_config(), 4, 5)


def parameter_table(config: LlamaBlockConfig) -> dict[str, Parameter]:
    """Maps the checkpoint's name of every weight to its place in the parameters."""
    table = {name: place for name, place in llama_reading.parameter_table(config).items() if place.path[0] != OWN}
    ranks = (config.vocab_size, config.rank)
    return table | {
        "model.mask.weight": Parameter((MASK,), (config.block_size - 1, 2 * config.hidden_size), precise=True),
        "model.markov.token.weight": Parameter((MARKOV, "token"), ranks),
        "model.markov.next.weight": Parameter((MARKOV, "next"), ranks),
    }


TENSORS = llama_reading.TENSORS._replace(table=parameter_table)  # no FAMILY: as `llama_reading`
*_, params_from_named, named_from_params = decoder_only.functions(TENSORS)
