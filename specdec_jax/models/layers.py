"""Layers shared by model families: projections, norms, MLPs, and the tables of their weights.

Activations and the residual stream are float32; only inputs of a matmul are rounded to `dtype`. Weights are [out, in],
Hugging Face's layout: it needs no transpose at loading, and in bfloat16 on CPU it is twice as fast as [in, out].
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from specdec_jax import kernels
from specdec_jax.models.int8 import Int8, Matrix, by_sums, product
from specdec_jax.models.weights import Fused, Parameter
from specdec_jax.types import Array

MOST_BLOCKS, NARROW, TILE = 16, 2048, 128  # `fused_gates`: blocks, and columns
FEW = 16  # up to this many rows a CPU multiplies with an int8 kernel by sums
ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_fast": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
WEIGHT_INIT = nn.initializers.normal(0.02)


def is_lone(rows: int, dtype: Any) -> bool:
    """Whether a product's single row is duplicated: below float32 a single row takes XLA's matrix-vector path on CPU,
    which converts the whole matrix to float32 first and is ten times slower than two rows."""
    return rows == 1 and jnp.finfo(dtype).bits < 32


def project(x: Array, kernel: Matrix, dtype: Any) -> Array:
    """x [..., D] times kernel [F, D] -> [..., F] float32, rounded to `dtype` before the product, summed in float32.

    For few rows on a CPU by a native kernel (`kernels`), in which a row's sums do not depend on the other rows.
    """
    x, leaves = x.astype(dtype), kernel if isinstance(kernel, Int8) else (kernel,)

    def contract(x: Array, kernel: Array) -> Array:
        return lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def by_xla(x: Array, weights: Array, *scale: Array) -> Array:
        kernel, rows = Int8(weights, *scale) if scale else weights, x.size // x.shape[-1]
        lone = is_lone(rows, dtype)
        if lone:
            x = jnp.concatenate([x, x], axis=-2)
        out = product(x, kernel, dtype, contract, by_sums if rows <= FEW else None)
        return out[..., :1, :] if lone else out

    return kernels.product(by_xla, x, *leaves) if kernels.serve(x, leaves[0]) else by_xla(x, *leaves)


class Projection(nn.Module):
    """A linear layer [..., D] -> [..., features] float32, kernel [features, D]."""

    features: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", WEIGHT_INIT, (self.features, x.shape[-1]), self.dtype)
        out = project(x, kernel, self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
            out += bias.astype(jnp.float32).reshape((1,) * (out.ndim - 1) + (-1,))
        return out


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) in float32."""

    eps: float
    dtype: Any  # dtype of the stored scale
    offset: float = 0.0  # added to the stored scale: Gemma stores its difference from one

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.constant(1.0 - self.offset)
        scale = self.param("scale", init, (x.shape[-1],), self.dtype).astype(jnp.float32)
        if self.offset:
            scale += self.offset
        x = x * lax.rsqrt(kernels.mean(x, squared=True) + self.eps)
        return x * scale.reshape((1,) * (x.ndim - 1) + (-1,))


class LayerNorm(nn.Module):
    """Layer norm (arXiv 1607.06450) in float32, with scale and shift."""

    eps: float
    dtype: Any  # dtype of the stored scale and shift

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (1,) * (x.ndim - 1) + (-1,)
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.dtype).astype(jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), self.dtype).astype(jnp.float32)
        x = x - kernels.mean(x)
        x = x * lax.rsqrt(kernels.mean(x, squared=True) + self.eps)
        return x * scale.reshape(shape) + bias.reshape(shape)


def soft_cap(x: Array, cap: float | None) -> Array:
    """Soft cap of x to -cap ... cap (Gemma 2, arXiv 2408.00118, section 2); None: no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def fused_gates(hidden: int) -> tuple[int, int, int]:
    """[N, 2, F / N], the layout of the rows of a fused projection: N blocks, each with gate, then up.

    N is up to 16, the number of devices that can share it, each with a contiguous part. A narrow projection that fills
    whole tiles of a TPU is a single block: every split costs two more operations, and sharing would save less.
    """
    blocks = 1 if hidden < NARROW and hidden % TILE == 0 else math.gcd(hidden, MOST_BLOCKS)
    return blocks, 2, hidden // blocks


def gated(fused: Array, activation: str) -> Array:
    """activation(gate) * up, [..., F], of a fused projection [..., 2 F] with the layout of `fused_gates`."""
    hidden = fused.shape[-1] // 2
    blocks, *_ = fused_gates(hidden)
    gate, up = jnp.split(fused.reshape(*fused.shape[:-1], blocks, -1), 2, axis=-1)
    return (ACTIVATIONS[activation](gate) * up).reshape(*fused.shape[:-1], hidden)


class GatedMLP(nn.Module):
    """down(activation(gate x) * up x), SwiGLU by default (arXiv 2002.05202).

    Gate and up are one fused projection (`fused_gates`).
    """

    hidden: int
    use_bias: bool
    dtype: Any
    activation: str = "silu"  # as Hugging Face names it, one of ACTIVATIONS

    @nn.compact
    def __call__(self, x: Array) -> Array:
        fused = Projection(2 * self.hidden, self.use_bias, self.dtype, name="gate_up")(x)
        inner = gated(fused, self.activation)
        return Projection(x.shape[-1], self.use_bias, self.dtype, name="down")(inner)


class MLP(nn.Module):
    """down(activation(up x))."""

    hidden: int
    use_bias: bool
    dtype: Any
    activation: str  # as Hugging Face names it, one of ACTIVATIONS

    @nn.compact
    def __call__(self, x: Array) -> Array:
        up = Projection(self.hidden, self.use_bias, self.dtype, name="up")(x)
        return Projection(x.shape[-1], self.use_bias, self.dtype, name="down")(ACTIVATIONS[self.activation](up))


def norm_table(name: str, path: tuple[str, ...], width: int) -> dict[str, Parameter]:
    """`LayerNorm`'s weights: Hugging Face's names with prefix `name`, and their places below `path`."""
    return {
        f"{name}.{ours}": Parameter((*path, leaf), (width,)) for ours, leaf in (("weight", "scale"), ("bias", "bias"))
    }


def mlp_table(
    names: tuple[str, str], path: tuple[str, ...], hidden: int, width: int, bias: bool = True, turned: bool = False
) -> dict[str, Parameter]:
    """`MLP`'s weights, as `norm_table`; `names` are those of the projections up and down."""
    up, down = names
    table = in_table(up, (*path, "up"), (hidden, width), hidden, bias, turned=turned)
    return table | out_table(down, (*path, "down"), (width, hidden), hidden, bias, turned)


def gated_mlp_table(
    names: tuple[tuple[str, ...], str], path: tuple[str, ...], hidden: int, width: int, bias: bool = False
) -> dict[str, Parameter]:
    """`GatedMLP`'s weights, as `norm_table`; `names`: gate and up, or both in one tensor, then down."""
    gates, (inputs, down) = fused_gates(hidden), names
    parts = ((0,), (1,)) if len(inputs) == 2 else ((0, 1),)
    table: dict[str, Parameter] = {}
    for name, at in zip(inputs, parts, strict=True):
        table |= in_table(name, (*path, "gate_up"), (len(at) * hidden, width), gates[0], bias, Fused(gates, at))
    return table | out_table(down, (*path, "down"), (width, hidden), gates[0], bias)


def in_table(
    name: str,
    path: tuple[str, ...],
    shape: tuple[int, int],
    units: int,
    bias: bool,
    fused: Fused | None = None,
    turned: bool = False,
) -> dict[str, Parameter]:
    """Weights of a `Projection` [out, in] whose rows are sharded in `units` equal parts, as `norm_table`."""
    kernel = Parameter((*path, "kernel"), shape[::-1] if turned else shape, fused, 0, units, turned)
    table = {f"{name}.weight": kernel}
    return table | ({f"{name}.bias": Parameter((*path, "bias"), shape[:1], fused, 0, units)} if bias else {})


def out_table(
    name: str, path: tuple[str, ...], shape: tuple[int, int], units: int, bias: bool, turned: bool = False
) -> dict[str, Parameter]:
    """Weights of a `Projection` to the residual stream, sharded by its inputs; the bias is on every device."""
    kernel = Parameter((*path, "kernel"), shape[::-1] if turned else shape, None, 1, units, turned)
    return {f"{name}.weight": kernel} | ({f"{name}.bias": Parameter((*path, "bias"), shape[:1])} if bias else {})
