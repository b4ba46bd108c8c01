"""model_type `llama_reading`, of this project: a llama for drafting that reads its target's hidden states.

The input at position t is the embedding of its token plus a projection of the hidden states of some of the target's
layers at position t - 1. A second projection enters a gated block after the last layer: this direct path is learnt from
far less text than the path through all layers. For positions of the current draft, which the target has not processed,
a third projection, of the drafter's last hidden state, replaces the first one, and the block adds nothing. Sources:
EAGLE (arXiv 2401.15077, section 4.1), and EAGLE-3 (2503.01840, section 3.1) for several layers; the block is an
addition here.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.models import decoder_only, layers, llama, rotary_decoder
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.weights import Parameter
from specdec_jax.types import Array, DraftModel, Params, Reading

READ, MERGE, OWN = "read", "merge", "own"
"""Names of the additional parameters: projection added to embeddings, gated block after the last layer, and projection
of the drafter's own states."""


@dataclass(frozen=True)
class LlamaReadingConfig(LlamaConfig):
    """A drafter's llama, and the target's layers that it reads. Raises ValueError for invalid values.

    `target_layers`: i is the residual stream after the target's i-th layer, 0 its embedding; `target_width`: D of it.
    """

    target_layers: tuple[int, ...] = ()
    target_width: int = 0

    def __post_init__(self):
        super().__post_init__()
        layers = self.target_layers
        if not layers or any(type(layer) is not int or layer < 0 for layer in layers) or len(set(layers)) < len(layers):
            raise ValueError(f"target_layers must be layers of the target, 0 or more, each once, got {layers!r}")
        if type(self.target_width) is not int or self.target_width < 1:
            raise ValueError(f"target_width must be a positive integer, got {self.target_width!r}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaReadingConfig":
        """Reads config.json: llama's, with `target_layers` and `target_width`. Raises ValueError for invalid values."""
        base, layers = LlamaConfig.from_hf({**config, "model_type": "llama"}), config.get("target_layers")
        if not isinstance(layers, (list, tuple)):
            raise ValueError(f"target_layers must be a list of layers of the target, got {layers!r}")
        return reading_config(base, tuple(layers), config.get("target_width", 0))

    def to_hf(self) -> dict[str, Any]:
        """A config.json that `from_hf` reads back."""
        names = {"architectures": ["LlamaReadingDrafter"], "model_type": "llama_reading"}
        return super().to_hf() | names | {"target_layers": list(self.target_layers)}


def reading_config(base: LlamaConfig, target_layers: tuple[int, ...], target_width: int) -> LlamaReadingConfig:
    """The configuration of a drafter that is this llama and reads those layers."""
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(LlamaConfig)}
    return LlamaReadingConfig(**fields, target_layers=target_layers, target_width=target_width)


def read(params: Params, hidden: Array, eps: float, dtype: Any) -> Array:
    """Projects hidden states [B, T, N, D] of the target: those for the embeddings and for the block, [B, T, P] float32.

    Each layer is normalised separately, because their scales differ by orders of magnitude.
    """
    hidden = hidden.astype(jnp.float32)
    normed = hidden * lax.rsqrt(jnp.mean(jnp.square(hidden), axis=-1, keepdims=True) + eps)

    def projected(name: str) -> Array:
        scaled = normed * params[name]["scale"].astype(jnp.float32)[None, None]
        return layers.project(scaled.reshape(*hidden.shape[:2], -1), params[name]["kernel"], dtype)

    return jnp.concatenate([projected(READ), projected(MERGE)], axis=-1)


def merged(params: Params, hidden: Array, reads: Array, dtype: Any) -> Array:
    """The gated block: last hidden states [B, T, D] merged with features [B, T, D], float32; zero features add zero."""
    both = jnp.concatenate([hidden, reads.astype(hidden.dtype)], axis=-1)
    gate = jax.nn.silu(layers.project(both, params[MERGE]["gate"], dtype))
    return hidden + layers.project(
        gate * layers.project(reads, params[MERGE]["up"], dtype), params[MERGE]["down"], dtype
    )


def stand_in(params: Params, hidden: Array, dtype: Any) -> Array:
    """The drafter's last hidden states [B, T, D] as features that replace the target's, [B, T, P] float32."""
    added = layers.project(hidden, params[OWN]["kernel"], dtype)
    return jnp.concatenate([added, jnp.zeros_like(added)], axis=-1)


def later_input(
    config: LlamaReadingConfig, params: Params, first: tuple[Array, Array], hidden: Array, step: int, dtype: Any
) -> tuple[Array, Array]:
    """What training feeds for later drafts of a round (distillation/unrolled.py).

    Args:
        first: the embeddings [R, T, D] and features [R, T, P] of first drafts, which read the target.
        hidden: last hidden states [R, T, D] of the drafts before.
        step: number of drafts before, 1 or more.

    Returns:
        Embeddings and features of the positions at which the tokens are known up to the draft before.
    """
    return first[0], jnp.pad(stand_in(params, hidden, dtype), ((0, 0), (1, 0), (0, 0)))[:, :-1]


def head_rows(params: Params, rows: Array, tokens: Array) -> Array:
    """The matrix by which training multiplies `head_input`, from the head's rows [C, D] of tokens [C]."""
    return rows


def head_input(params: Params, hidden: Array, tokens: Array, step: int) -> Array:
    """What training multiplies with `head_rows`: last hidden states [R, T, D] after tokens [R, T], in step `step`."""
    return hidden


@functools.lru_cache(maxsize=16)
def language_model(config: LlamaReadingConfig, dtype: Any = jnp.bfloat16) -> DraftModel:
    """The model. It drafts for its target by `reading`; `apply` raises ValueError."""
    base = llama.language_model(config, dtype)
    module, head = llama.module(config, dtype), base.hidden
    kernel = head.kernel
    assert kernel is not None

    def refuse_pass(params, tokens, cache, positions=None, mask=None):
        raise ValueError("this model reads its target's hidden states: it drafts for it, and decodes nothing alone")

    def reading_pass(params, tokens, reads, cache, positions=None, mask=None):
        added, late = jnp.split(reads, 2, axis=-1)
        hidden, cache = module.apply({"params": params}, tokens, cache, positions, mask, head=False, added=added)
        hidden = merged(params, hidden, late, dtype)
        return layers.project(hidden, kernel(params), dtype), hidden, cache

    reading = Reading(
        layers=config.target_layers,
        target_width=config.target_width,
        width=2 * config.hidden_size,
        dtype=dtype,
        read=lambda params, hidden: read(params, hidden, config.rms_norm_eps, dtype),
        stand_in=lambda params, hidden: stand_in(params, hidden, dtype),
        apply=reading_pass,
    )
    hidden = head._replace(last=refuse_pass, streams=None)
    return DraftModel(base.init_cache, refuse_pass, base.with_length, base.spec, hidden, reading=reading)


def init_params(config: LlamaReadingConfig, key: Array, dtype: Any = jnp.bfloat16):
    """Random parameters of the llama, and those of reading, which have no effect yet. The key is consumed."""
    return with_reading(config, llama.init_params(config, key, dtype), dtype)


def with_reading(config: LlamaReadingConfig, params: Params, dtype: Any, seed: int = 0) -> Params:
    """A llama's parameters with those of reading, which have no effect yet."""
    rng, own_width = np.random.default_rng(seed), config.hidden_size
    count, width = len(config.target_layers), config.target_width

    def random(rows: int, columns: int) -> Array:
        return jnp.asarray(rng.normal(0.0, columns**-0.5, (rows, columns)), dtype)

    scale = jnp.full((count, width), (count * width) ** -0.5, dtype)  # else a step of Adam exceeds an embedding
    merge = {"scale": jnp.ones((count, width), dtype), "kernel": random(own_width, count * width)}
    merge |= {"gate": random(own_width, 2 * own_width), "up": random(own_width, own_width)}
    merge |= {"down": jnp.zeros((own_width, own_width), dtype)}
    return {
        **params,
        READ: {"scale": scale, "kernel": jnp.zeros((own_width, count * width), dtype)},
        MERGE: merge,
        OWN: {"kernel": jnp.zeros((own_width, own_width), dtype)},
    }


def example_config() -> LlamaReadingConfig:
    target = llama.example_config()
    return reading_config(target, (0, 1, 2), target.hidden_size)


def parameter_table(config: LlamaReadingConfig) -> dict[str, Parameter]:
    """Maps the checkpoint's name of every weight to its place in the parameters."""
    count, width, own_width = len(config.target_layers), config.target_width, config.hidden_size
    return dict(llama.parameter_table(config)) | {
        "model.read.norm.weight": Parameter((READ, "scale"), (count, width), precise=True),
        "model.read.weight": Parameter((READ, "kernel"), (own_width, count * width)),
        "model.merge.norm.weight": Parameter((MERGE, "scale"), (count, width), precise=True),
        "model.merge.read.weight": Parameter((MERGE, "kernel"), (own_width, count * width)),
        "model.merge.gate.weight": Parameter((MERGE, "gate"), (own_width, 2 * own_width)),
        "model.merge.up.weight": Parameter((MERGE, "up"), (own_width, own_width)),
        "model.merge.down.weight": Parameter((MERGE, "down"), (own_width, own_width)),
        "model.own.weight": Parameter((OWN, "kernel"), (own_width, own_width)),
    }


TENSORS = rotary_decoder.FAMILY._replace(table=parameter_table)  # no FAMILY: training does not support this model
*_, params_from_named, named_from_params = decoder_only.functions(TENSORS)
