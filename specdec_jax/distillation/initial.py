"""What a drafter is before it is trained: random, with the target's embedding projected, or the target's own layers."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.distillation import induction
from specdec_jax.models import llama
from specdec_jax.models.int8 import as_float32, is_matrix
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.rope import rope_type
from specdec_jax.types import Params

KINDS = ("random", "projection", "induction", "first_layers")
# Standard deviation of what is projected, and the final norm that makes up for it. Adam moves every weight by about its
# rate a step, so at the usual 0.02 a warm-up erases what the embedding was given (measured: docs/distillation.md).
SPREAD, FINAL_NORM = 0.1, 0.2


@dataclass(frozen=True)
class Shape:
    """A drafter's size. `first_layers` takes width, heads and feed-forward from the target. Raises ValueError."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 768
    init: str = "projection"
    rope_theta: float | None = None  # None: the target's
    reads: tuple[int, ...] = ()  # layers of the target whose hidden states the drafter reads

    def __post_init__(self):
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a drafter must be positive, got {getattr(self, name)!r}")
        if self.init not in KINDS:
            raise ValueError(f"unknown initialisation {self.init!r}; there are {', '.join(KINDS)}")
        if self.init == "induction":
            induction.check(self.layers, self.width, self.head_dim)


def drafter_config(shape: Shape, target: Any) -> LlamaConfig:
    """The drafter's configuration, a llama whatever the target is: its vocabulary, end ids and positions, a tied head.

    Raises ValueError: `first_layers` of a target that is no llama, or has fewer.
    """
    if shape.init == "first_layers":
        if type(target) is not LlamaConfig:
            raise ValueError(f"init 'first_layers' takes layers of a llama, the target has {type(target).__name__}")
        if shape.layers > target.num_hidden_layers:
            raise ValueError(f"the target has {target.num_hidden_layers} layers, {shape.layers} were asked for")
        return dataclasses.replace(target, num_hidden_layers=shape.layers)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=getattr(target, "rms_norm_eps", LlamaConfig.rms_norm_eps),  # families with layer norms have none
        rope_theta=shape.rope_theta or getattr(target, "rope_theta", LlamaConfig.rope_theta),  # nor all positions
        rope_scaling=_scaling(target),
        max_position_embeddings=target.context,
        tie_word_embeddings=True,
        eos_token_ids=target.eos_token_ids,
        bos_token_id=target.bos_token_id,
    )


def _scaling(target: Any) -> dict[str, Any] | None:
    """The target's, but for LongRoPE's, which is of its heads' width and begins beyond its context."""
    scaling = getattr(target, "rope_scaling", None)
    return None if rope_type(scaling) == "longrope" else scaling


def initial_params(shape: Shape, target: Any, target_params: Params, counts: Any, seed: int) -> Params:
    """Float32 parameters. `counts` [V]: how often each token occurs; the projection serves frequent ones."""
    config = drafter_config(shape, target)
    if shape.init == "first_layers":
        kept = {name: leaf for name, leaf in target_params.items() if not name.startswith("layer_")}
        kept |= {f"layer_{i}": target_params[f"layer_{i}"] for i in range(shape.layers)}
        return jax.tree.map(lambda leaf: jnp.array(as_float32(leaf)), kept, is_leaf=is_matrix)
    params = llama.init_params(config, jax.random.key(seed), jnp.float32)
    for i in range(shape.layers):  # what is added to the residual stream starts small, or depth drowns the embedding
        for part in (params[f"layer_{i}"]["attention"]["output"], params[f"layer_{i}"]["mlp"]["down"]):
            part["kernel"] = part["kernel"] / np.sqrt(2 * shape.layers)
    if shape.init == "random":
        return params
    params["norm"]["scale"] = params["norm"]["scale"] * FINAL_NORM
    if shape.init == "projection":
        params["embedding"] = jnp.asarray(projected(target_params["embedding"], shape.width, counts))
        return params
    content = projected(target_params["embedding"], shape.width - induction.reserved(shape.width), counts)
    return induction.built_in(params, content, config, counts, seed)


def projected(embedding: Any, width: int, counts: Any) -> np.ndarray:
    """[V, width] float32: the target's embedding [V, D] in its `width` directions of most variance, weighted by the
    square root of how often tokens occur, scaled to a spread of SPREAD. Raises ValueError if D < width."""
    table = np.asarray(as_float32(embedding))
    if table.shape[1] < width:
        raise ValueError(f"the target's embedding is {table.shape[1]} wide and cannot be projected to {width}")
    weight = np.sqrt(np.asarray(counts, np.float64) + 1.0)
    moments = (table * weight[:, None]).T.astype(np.float64) @ table
    directions = np.linalg.eigh(moments)[1][:, ::-1][:, :width]
    out = table @ directions.astype(np.float32)
    return out * (SPREAD / out.std())
