"""Mixture of experts (arXiv 1701.06538; Mixtral, 2401.04088): a few of many gated MLPs for every token.

A pass reads the experts that some token of it chose: few when it decodes, nearly all when it verifies many tokens of
many rows. That is what a verification costs, and why it is measured (`costs`) and never assumed.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax.models.int8 import Matrix, product
from specdec_jax.models.layers import ACTIVATIONS, WEIGHT_INIT, Projection, fused_gates, is_lone, project
from specdec_jax.models.weights import Fused, Parameter

Array = jax.Array

CHOICES = 2  # choices an expert from which on a pass goes through all of them at once: prompts


class Mixture(nn.Module):
    """Of every token, the sum of the `chosen` experts that a router likes best, by its probabilities.

    `normalised`: the probabilities of those chosen are made to sum to one.
    """

    experts: int
    chosen: int
    hidden: int  # of each expert
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

    def _gated(self, fused: Array) -> Array:
        blocks, *_ = fused_gates(self.hidden)
        gate, up = jnp.split(fused.reshape(*fused.shape[:-1], blocks, -1), 2, axis=-1)
        return (ACTIVATIONS[self.activation](gate) * up).reshape(*fused.shape[:-1], self.hidden)

    def _all(self, x: Array, share: Array, gate_up: Matrix, down: Matrix) -> Array:
        """Tokens [N, D] through every expert, of which their share [N, E] counts."""
        fused = self._by_each("nd,efd->enf", x, gate_up)
        out = self._by_each("enf,edf->end", self._gated(fused), down)
        return jnp.einsum("end,ne->nd", out, share)

    def _by_each(self, axes: str, x: Array, kernels: Matrix) -> Array:
        """As `layers.project`, the kernels [E, F, D] of all experts at once: [E, N, F]."""
        contract = functools.partial(jnp.einsum, axes, preferred_element_type=jnp.float32)
        return product(x, kernels, self.dtype, contract)

    def _those_chosen(self, x: Array, share: Array, gate_up: Matrix, down: Matrix) -> Array:
        """Tokens [N, D] through the experts that any of them chose, one after the other; no other is read.

        A gather of every token's experts copies them first, the slower way on a CPU; `lax.ragged_dot` reads
        them all there.
        """
        tokens = x.shape[0]
        hit = jnp.any(share > 0, axis=0)
        order, count = jnp.argsort(~hit), jnp.sum(hit)
        x = (jnp.concatenate([x, x]) if is_lone(tokens, self.dtype) else x).astype(self.dtype)

        def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            index, total = carry
            pick = lambda leaf: lax.dynamic_index_in_dim(leaf, order[index], 0, False)  # noqa: E731
            into, back = jax.tree.map(pick, (gate_up, down))
            out = project(self._gated(project(x, into, self.dtype)), back, self.dtype)[:tokens]
            return index + 1, total + out * lax.dynamic_slice_in_dim(share, order[index], 1, axis=1)

        begin = jnp.zeros((), jnp.int32), jnp.zeros((tokens, down.shape[1]), jnp.float32)
        return lax.while_loop(lambda carry: carry[0] < count, one, begin)[1]


def mixture_table(
    router: str, expert: str, names: tuple[str, str, str], path: tuple[str, ...], sizes: tuple[int, int, int]
) -> dict[str, Parameter]:
    """Of `Mixture`, as `layers.norm_table`: `router` and, behind `expert` with its number in it, gate, up and down.

    `sizes` are the number of experts, the width of one, and D.
    """
    count, hidden, width = sizes
    gates = fused_gates(hidden)
    table = {f"{router}.weight": Parameter((*path, "router", "kernel"), (count, width), precise=True)}
    for i in range(count):
        gate, up, down = (f"{expert.format(i)}{name}.weight" for name in names)
        for part, name in enumerate((gate, up)):
            fused = Fused(gates, (part,))
            table[name] = Parameter((*path, "gate_up"), (hidden, width), fused, 1, gates[0], stacked=(i, count))
        table[down] = Parameter((*path, "down"), (width, hidden), None, 2, gates[0], stacked=(i, count))
    return table
