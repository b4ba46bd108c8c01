"""A reading drafter's passes over whole texts, unrolled over its own states as drafting unrolls them.

In drafting only the first position of a round reads the target; later ones use the drafter's own states. Training
covers both: step 1 reads the target at every position, and step j uses the states of step j - 1 at the previous
position. In step j position t corresponds to the j-th draft of a round: it attends to the keys of step 1 up to
t - j + 1, and to those of steps 2 to j at the last j - 1 positions including itself, as in the cache. Source:
EAGLE-3 (arXiv 2503.01840, section 3.1, training-time test). The drafter's family gives the input of later steps
(`later_input`): drafters of blocks (contrib/block) have masks there instead of tokens and states.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.drafters.draft_models.llama_reading import LlamaReadingConfig
from specdec_jax.loading.families import family_of
from specdec_jax.models import attention, layers
from specdec_jax.models.rope import rope, rotate
from specdec_jax.ranges import Between, check_fields
from specdec_jax.types import Array, Params


@dataclass(frozen=True)
class Unroll:
    """`steps` in total; those after the first are computed for `share` of a batch's rows. Raises ValueError."""

    steps: Annotated[int, Between(1)] = 3
    share: Annotated[float, Between(0, 1, open="low")] = 0.5

    def __post_init__(self):
        check_fields(self)

    def rows(self, rows: int) -> int:
        """Number of `rows` rows for which later steps are computed."""
        return max(1, round(rows * self.share))


class Texts(NamedTuple):
    """R rows of packed conversations, which do not attend to one another."""

    tokens: Any  # [R, T] int32
    positions: Any  # [R, T] int32, within the conversation
    segments: Any  # [R, T] int32
    hidden: Any  # [R, T, N, D], the target's at the previous position; meaningless at first positions


class _Keys(NamedTuple):
    keys: Array  # [R, T, Hkv, head_dim], rotated
    values: Array  # [R, T, Hkv, head_dim]


def unrolled(config: LlamaReadingConfig, params: Params, texts: Texts, unroll: Unroll, dtype: Any) -> list[Array]:
    """What the head multiplies in each step, float32: [R, T, D] for the first, for later ones only the first rows.

    A position belongs to step j only if at least j - 1 positions of its conversation precede it.
    """
    family: Any = family_of(config)
    cos_sin = rope(config, texts.positions)
    behind = (texts.positions > 0)[..., None]
    embedded = params["embedding"].astype(dtype)[texts.tokens].astype(jnp.float32)
    added = llama_reading.read(params, texts.hidden, config.rms_norm_eps, dtype)
    added = jnp.where(behind, added, 0.0)
    first = hidden = embedded, added
    seen: list[list[_Keys]] = [[] for _ in range(config.num_hidden_layers)]
    inputs = []
    few = unroll.rows(texts.tokens.shape[0])
    for step in range(unroll.steps):
        if step == 1:
            texts, first, hidden, behind, cos_sin, seen = jax.tree.map(
                lambda leaf: leaf[:few], (texts, first, hidden, behind, cos_sin, seen)
            )
        if step:
            embedded, added = family.later_input(config, params, first, hidden, step, dtype)
        early, late = jnp.split(jnp.where(behind, added, 0.0), 2, axis=-1)
        x = embedded + early
        for index, earlier in enumerate(seen):
            x, now = _layer(config, dtype, params[f"layer_{index}"], x, earlier, texts, cos_sin)
            earlier.append(now)
        last = layers.RMSNorm(config.rms_norm_eps, dtype).apply({"params": params["norm"]}, x)
        hidden = llama_reading.merged(params, jnp.asarray(last), late, dtype)
        inputs.append(family.head_input(params, hidden, texts.tokens, step))
    return inputs


def _layer(
    config: LlamaReadingConfig,
    dtype: Any,
    params: Params,
    x: Array,
    earlier: Sequence[_Keys],
    texts: Texts,
    cos_sin: Any,
) -> tuple[Array, _Keys]:
    """A block in the step after the `earlier` ones, and its keys and values."""
    c = config

    def norm(name: str, x: Array) -> Array:
        return jnp.asarray(layers.RMSNorm(c.rms_norm_eps, dtype).apply({"params": params[name]}, x))

    def linear(module: str, name: str, features: int, bias: bool, x: Array) -> Array:
        return jnp.asarray(layers.Projection(features, bias, dtype).apply({"params": params[module][name]}, x))

    heads = attention.fused_heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    qkv = linear("attention", "qkv", math.prod(heads), c.attention_bias, norm("attention_norm", x))
    query, key, value = attention.split_heads(qkv, heads)
    now = _Keys(rotate(key, cos_sin), value)
    out = attend(rotate(query, cos_sin), [*earlier, now], texts.segments, texts.positions)
    x = x + linear("attention", "output", c.hidden_size, c.attention_bias, out)
    mlp = layers.GatedMLP(c.intermediate_size, c.mlp_bias, dtype)
    return x + jnp.asarray(mlp.apply({"params": params["mlp"]}, norm("mlp_norm", x))), now


ROWS = 16  # rows that attend at once on an accelerator: 1 GB of attention weights for 2,048 tokens and 4 heads


def attend(query: Array, steps: Sequence[_Keys], segments: Array, positions: Array) -> Array:
    """Attention of query [R, T, H, head_dim] of step j = len(steps), [R, T, H head_dim] float32.

    One row at a time on CPUs and ROWS elsewhere, with the weights recomputed for the gradient, as in
    `attention.attend_whole`.
    """
    group, back = query.shape[2] // steps[0].keys.shape[2], len(steps) - 1
    scale, least = query.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min

    def moved(leaf: Array, by: int) -> Array:
        """Entry t is that of position t - by."""
        return jnp.pad(leaf, ((by, 0), (0, 0), (0, 0)))[: leaf.shape[0]]

    @jax.checkpoint
    def row(query: Array, steps: Sequence[_Keys], segment: Array, position: Array) -> Array:
        steps = [jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=1), each) for each in steps]
        first, later = (
            steps[0],
            [
                jax.tree.map(lambda leaf, by=back - i: moved(leaf, by), each)
                for i, each in enumerate(steps[1:], start=1)
            ],
        )
        query = query * scale
        at = jnp.arange(query.shape[0])
        visible = (segment[:, None] == segment[None, :]) & (at[None, :] <= at[:, None] - back)
        score = jnp.where(visible[None], jnp.einsum("thd,shd->hts", query, first.keys), least)
        scores = [jnp.einsum("thd,thd->ht", query, each.keys)[..., None] for each in later]
        scores = [
            jnp.where((position >= back - i)[None, :, None], each, least) for i, each in enumerate(scores, start=1)
        ]
        weight = jax.nn.softmax(jnp.concatenate([score, *scores], axis=-1), axis=-1)
        out = jnp.einsum("hts,shd->thd", weight[..., : at.shape[0]], first.values)
        for i, each in enumerate(later):
            out += weight[..., at.shape[0] + i].T[..., None] * each.values
        return out

    rows = None if jax.default_backend() == "cpu" else ROWS
    out = jax.lax.map(lambda each: row(*each), (query, list(steps), segments, positions), batch_size=rows)
    return out.reshape(*query.shape[:2], -1)
