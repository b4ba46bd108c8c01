"""Mixture of experts (arXiv 1701.06538; Mixtral, 2401.04088): a few of many gated MLPs for every token.

A pass reads the experts that any of its tokens chose: few in plain decoding, nearly all in the verification of many
tokens in many rows. The cost of a verification pass is therefore measured (`costs`) and not assumed.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.models import rotary_decoder
from specdec_jax.models.int8 import Matrix, product
from specdec_jax.models.layers import WEIGHT_INIT, Projection, fused_gates, gated, is_lone, project
from specdec_jax.models.weights import Fused, Parameter
from specdec_jax.types import Array

CHOICES = 2  # average choices per expert from which a pass computes all experts at once (prompts)
DENSE = " with one MLP"  # suffix of the kind of layers without a mixture


class Experts(NamedTuple):
    """The mixture of each layer of a config."""

    number: int
    chosen: int  # number of experts per token
    hidden: int  # width inside each expert
    normalised: bool  # whether the probabilities of the chosen experts are normalised


class Mixture(nn.Module):
    """For every token, the sum of its `chosen` most probable experts, weighted by a router's probabilities."""

    experts: int
    chosen: int
    hidden: int
    normalised: bool
    dtype: Any
    activation: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width, count = x.shape[-1], self.experts
        probs = jax.nn.softmax(Projection(count, False, self.dtype, name="router")(x).reshape(-1, count), axis=-1)
        share, which = lax.top_k(probs, self.chosen)
        share = share / jnp.sum(share, axis=-1, keepdims=True) if self.normalised else share
        rows = jnp.arange(share.shape[0])[:, None]
        share = jnp.zeros_like(probs).at[rows, which].set(share)
        gate_up = self.param("gate_up", WEIGHT_INIT, (count, 2 * self.hidden, width), self.dtype)
        down = self.param("down", WEIGHT_INIT, (count, width, self.hidden), self.dtype)
        through = self._all if self.chosen * share.shape[0] > CHOICES * count else self._those_chosen
        return through(x.reshape(-1, width), share, gate_up, down).reshape(x.shape)

    def _all(self, x: Array, share: Array, gate_up: Matrix, down: Matrix) -> Array:
        """Tokens [N, D] through all experts, weighted by `share` [N, E]."""
        fused = self._by_each("nd,efd->enf", x, gate_up)
        out = self._by_each("enf,edf->end", gated(fused, self.activation), down)
        return jnp.einsum("end,ne->nd", out, share)

    def _by_each(self, axes: str, x: Array, kernels: Matrix) -> Array:
        """As `layers.project`, with the kernels [E, F, D] of all experts at once: [E, N, F]."""
        contract = functools.partial(jnp.einsum, axes, preferred_element_type=jnp.float32)
        return product(x, kernels, self.dtype, contract)

    def _those_chosen(self, x: Array, share: Array, gate_up: Matrix, down: Matrix) -> Array:
        """Tokens [N, D] through the experts that any of them chose, one by one; other experts are not read.

        On a CPU a gather of every token's experts would copy them first, which is slower, and `lax.ragged_dot` would
        read all experts.
        """
        tokens = x.shape[0]
        hit = jnp.any(share > 0, axis=0)
        order, count = jnp.argsort(~hit), jnp.sum(hit)
        x = (jnp.concatenate([x, x]) if is_lone(tokens, self.dtype) else x).astype(self.dtype)

        def one_expert(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            index, total = carry
            pick = lambda leaf: lax.dynamic_index_in_dim(leaf, order[index], 0, False)  # noqa: E731
            into, back = jax.tree.map(pick, (gate_up, down))
            out = project(gated(project(x, into, self.dtype), self.activation), back, self.dtype)[:tokens]
            return index + 1, total + out * lax.dynamic_slice_in_dim(share, order[index], 1, axis=1)

        begin = jnp.zeros((), jnp.int32), jnp.zeros((tokens, down.shape[1]), jnp.float32)
        return lax.while_loop(lambda carry: carry[0] < count, one_expert, begin)[1]


class MixtureBlock(rotary_decoder.RotaryBlock):
    """A block with a mixture of experts, or with a single MLP in layers whose kind ends with `DENSE`."""

    def mlp(self) -> nn.Module:
        if self.kind.endswith(DENSE):
            return super().mlp()
        experts: Experts = self.config.experts
        return Mixture(*experts, self.dtype, self.config.hidden_act, name="mlp")


def check_experts(config: Any) -> None:
    """Raises ValueError unless each token has at least one expert and at most all of them."""
    if config.experts.chosen > config.experts.number:
        raise ValueError(f"num_experts_per_tok {config.experts.chosen} of {config.experts.number} experts")


def _mlp_table(c: Any, layer: int, prefix: str, path: tuple[str, ...]) -> dict[str, Parameter]:
    """A layer's MLP, as `rotary_decoder.mlp_table`; the names of router, experts and projections are the config's."""
    if c.layer_kinds[layer].endswith(DENSE):
        return rotary_decoder.mlp_table(c, layer, prefix, path)
    (count, _, hidden, _), width, gates = c.experts, c.hidden_size, fused_gates(c.experts.hidden)
    table = {f"{prefix}{c.router}.weight": Parameter((*path, "router", "kernel"), (count, width), precise=True)}
    for i in range(count):
        gate, up, down = (f"{prefix}{c.expert.format(i)}.{name}.weight" for name in c.projections)
        for part, name in enumerate((gate, up)):
            fused = Fused(gates, (part,))
            table[name] = Parameter((*path, "gate_up"), (hidden, width), fused, 1, gates[0], stacked=(i, count))
        table[down] = Parameter((*path, "down"), (width, hidden), None, 2, gates[0], stacked=(i, count))
    return table


parameter_table = functools.partial(rotary_decoder.parameter_table, mlp=_mlp_table)
FAMILY = rotary_decoder.FAMILY._replace(block=MixtureBlock, table=parameter_table)
