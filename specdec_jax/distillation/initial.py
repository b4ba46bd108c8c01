"""Initialisation of drafters: random, with a projection of the target's embedding, or with the target's layers."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.distillation import induction
from specdec_jax.loading.families import config_class, family, family_of
from specdec_jax.models.int8 import as_float32, is_matrix
from specdec_jax.models.rope import rope_type
from specdec_jax.ranges import Between, check_fields
from specdec_jax.types import Params

KINDS = ("random", "projection", "induction", "first_layers")
LLAMA = "llama"
FIELDS = {"hidden": "intermediate_size", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
"""Sizes of a shape that families may fix, and their names in configs."""
ADDED = ("attention", "output"), ("mlp", "down")  # layers whose outputs are added to the residual stream
# Standard deviation of what is projected, and the final norm that makes up for it. Adam moves every weight by about its
# rate a step, so at the usual 0.02 a warm-up erases what the embedding was given (measured: docs/distillation.md).
SPREAD, FINAL_NORM = 0.1, 0.2


@dataclass(frozen=True)
class Shape:
    """A drafter's size and family. `first_layers` takes width, heads and feed-forward from the target.

    `family`: a model_type of `models/` (llama, gpt2, gpt_neox, ...) whose layers have one MLP. Raises ValueError.
    """

    layers: Annotated[int, Between(1)] = 4
    width: Annotated[int, Between(1)] = 256
    heads: Annotated[int, Between(1)] = 4
    kv_heads: Annotated[int, Between(1)] = 2
    head_dim: Annotated[int, Between(1)] = 64
    hidden: Annotated[int, Between(1)] = 768
    init: str = "projection"
    rope_theta: float | None = None  # for families with rotary positions; None: the target's
    reads: tuple[int, ...] = ()  # layers of the target whose hidden states the drafter reads
    block: int = 0  # tokens that a drafter that reads drafts in one pass (contrib/block); 0: one
    family: str = LLAMA

    def __post_init__(self):
        check_fields(self)
        if self.block and (self.block < 2 or not self.reads):
            raise ValueError(f"a block has two tokens or more, of a drafter that reads (reads), got {self.block!r}")
        if self.init not in KINDS:
            raise ValueError(f"unknown initialisation {self.init!r}; there are {', '.join(KINDS)}")
        family(self.family)
        if self.family != LLAMA and (self.reads or self.init == "induction"):
            choice = f"reads {self.reads}" if self.reads else f"init {self.init!r}"
            raise ValueError(f"{choice} is for drafters of family {LLAMA!r}, got shape.family {self.family!r}")
        if self.init == "induction":
            induction.check(self.layers, self.width, self.head_dim)


def drafter_config(shape: Shape, target: Any) -> Any:
    """The configuration of a drafter of the shape's family: the target's vocabulary, end ids and context, a tied head.

    Raises ValueError for `first_layers` of a target of another family or with fewer layers, and for unsupported sizes.
    """
    kind = config_class(family(shape.family))
    if "num_encoder_layers" in {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"a drafter of shape.family {shape.family!r} has an encoder, and only decoders are trained")
    if shape.init == "first_layers":
        if type(target) is not kind:
            raise ValueError(
                f"init 'first_layers' takes layers of a {shape.family}, the target has {type(target).__name__}"
            )
        if shape.layers > target.num_hidden_layers:
            raise ValueError(f"the target has {target.num_hidden_layers} layers, {shape.layers} were asked for")
        return dataclasses.replace(target, num_hidden_layers=shape.layers)
    scaling = getattr(target, "rope_scaling", None)
    if rope_type(scaling) == "longrope":  # it depends on the heads' width, and has no effect within the context
        scaling = None
    inherited = {
        "vocab_size": target.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        **{field: getattr(shape, name) for name, field in FIELDS.items()},
        "rms_norm_eps": getattr(target, "rms_norm_eps", None),  # families with layer norms have none
        "rope_theta": shape.rope_theta or getattr(target, "rope_theta", None),  # nor all positions
        "rope_scaling": scaling,
        "max_position_embeddings": target.context,
        "tie_word_embeddings": True,
        "bos_token_id": target.bos_token_id,
    }
    ends = {"eos_token_id": list(target.eos_token_ids)}
    config = kind.from_hf({kind.key(name): value for name, value in inherited.items()} | ends)
    _check_fits(shape, config)
    return config


def _check_fits(shape: Shape, config: Any) -> None:
    """Raises ValueError if the family has fixed sizes, or layers that `initial_params` does not support."""
    for name, field in FIELDS.items():
        value = getattr(config, field)
        if value != getattr(shape, name):
            option = name.replace("_", "-")
            raise ValueError(
                f"{option} of a {shape.family} of width {shape.width} with {shape.heads} heads is {value}, "
                f"got {getattr(shape, name)}: set shape.{option} to {value}"
            )
    paths = {entry.path for entry in family(shape.family).parameter_table(config).values()}
    if any(("layer_0", *part, "kernel") not in paths for part in ADDED):
        raise ValueError(f"a drafter's layers have one MLP each, those of shape.family {shape.family!r} do not")


def initial_params(shape: Shape, target: Any, target_params: Params, counts: Any, seed: int) -> Params:
    """Float32 parameters. `counts` [V]: occurrences of each token, by which the projection is weighted."""
    config = drafter_config(shape, target)
    if shape.init == "first_layers":
        copied = {name: leaf for name, leaf in target_params.items() if not name.startswith("layer_")}
        copied |= {f"layer_{i}": target_params[f"layer_{i}"] for i in range(shape.layers)}
        return jax.tree.map(lambda leaf: jnp.array(as_float32(leaf)), copied, is_leaf=is_matrix)
    params = family_of(config).init_params(config, jax.random.key(seed), jnp.float32)
    for i in range(shape.layers):  # small outputs to the residual stream, so that they do not dominate the embedding
        for part, name in ADDED:
            added = params[f"layer_{i}"][part][name]
            added["kernel"] = added["kernel"] / np.sqrt(2 * shape.layers)
    if shape.init == "random":
        return params
    params["norm"] = jax.tree.map(lambda leaf: leaf * FINAL_NORM, params["norm"])
    if shape.init == "projection":
        params["embedding"] = jnp.asarray(projected(target_params["embedding"], shape.width, counts))
        return params
    content = projected(target_params["embedding"], shape.width - induction.reserved(shape.width), counts)
    return induction.built_in(params, content, config, counts, seed)


def projected(embedding: Any, width: int, counts: Any) -> np.ndarray:
    """[V, width] float32: the target's embedding [V, D] projected to its `width` directions of largest variance,
    weighted by the square root of token counts, scaled to standard deviation SPREAD. Raises ValueError if D < width."""
    table = np.asarray(as_float32(embedding))
    if table.shape[1] < width:
        raise ValueError(f"the target's embedding is {table.shape[1]} wide and cannot be projected to {width}")
    weight = np.sqrt(np.asarray(counts, np.float64) + 1.0)
    moments = (table * weight[:, None]).T.astype(np.float64) @ table
    directions = np.linalg.eigh(moments)[1][:, ::-1][:, :width]
    out = table @ directions.astype(np.float32)
    return out * (SPREAD / out.std())
