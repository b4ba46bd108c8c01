"""CPU kernels for products of few rows at memory bandwidth, with XLA as the fallback (docs/performance.md).

XLA's CPU backend reads weights at a fraction of the memory bandwidth for products of few rows, and a row's sums depend
on the other rows. These kernels are compiled by the machine's compiler on first use (`compiled`). The environment
variable SPECDEC_JAX_KERNELS is `off` or a path of `compiled.PATHS`; default: the fastest one available.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax

from specdec_jax.kernels import compiled

Array = jax.Array

VARIABLE, OFF = "SPECDEC_JAX_KERNELS", "off"
MOST_ROWS = 512  # maximum rows of a product; from 128 rows XLA is as fast with AMX, and 10% faster without
MOST_NUMBERS = 1 << 20  # maximum size of arrays that are summed; larger ones, in training, are left to XLA
PRODUCTS = {"bfloat16": "specdec_bfloat16_product", "int8": "specdec_int8_product"}
ATTENTION, SUMS = "specdec_attention", "specdec_sums"
TARGETS = *PRODUCTS.values(), ATTENTION, SUMS
"""Names of custom calls in CPU programs, for `disabled_checks` of `jax.export`."""


@functools.cache
def path() -> str | None:
    """The path of this process's kernels; None: XLA is used. A failure is reported in a line on standard error.

    Nothing is reported on another device, for a processor without a path, or with `off`. Raises ValueError:
    SPECDEC_JAX_KERNELS is not a path that this processor supports.
    """
    here, wanted = compiled.paths_here(), os.environ.get(VARIABLE, "")
    if wanted not in ("", OFF, *here):
        raise ValueError(f"{VARIABLE} must be one of {', '.join((OFF, *here))}, got {wanted!r}")
    if wanted == OFF or jax.default_backend() != "cpu":
        return None
    reason = ""
    for name in (wanted,) if wanted else here:
        try:
            library = compiled.library(name)
        except (OSError, ValueError) as error:
            reason = reason or f"{name}: {error}"
            continue
        if reason:
            compiled.say(f"products take the path {name}, slower and with other last bits: {reason}")
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
        return name
    if reason:
        compiled.say(f"products are XLA's, which are slower here: {reason}")
    return None


def products() -> str:
    """What computes products of few rows: a path of the kernels, or XLA."""
    return (path() if jax.sharding.get_abstract_mesh().empty else None) or "XLA"


def serve(x: Array, weights: Any) -> bool:
    """Whether `product` supports x [..., D] and weights [F, D]: few rows, on one CPU, in bfloat16 or int8."""
    rows = x.size // max(x.shape[-1], 1)
    fits = x.dtype == jnp.bfloat16 and weights.ndim == 2 and str(weights.dtype) in PRODUCTS
    return fits and 0 < rows <= MOST_ROWS and products() != "XLA"


def serve_attention(query: Array, keys: Array) -> bool:
    """Whether `attention` supports these arrays: on one CPU, in bfloat16."""
    return query.dtype == keys.dtype == jnp.bfloat16 and products() != "XLA"


def product(by_xla: Callable[..., Array], x: Array, weights: Array, *scale: Array) -> Array:
    """x [..., D] bfloat16 times weights [F, D] -> [..., F] float32; int8 weights have a scale [F] float32.

    The order of summation does not depend on the number of rows. `by_xla` is the same function of the operands, for
    derivatives, other devices, and `vmap` over weights.
    """

    def native(x: Array, weights: Array, *scale: Array) -> Array:
        out = jax.ShapeDtypeStruct((*x.shape[:-1], weights.shape[0]), jnp.float32)
        return jax.ffi.ffi_call(PRODUCTS[str(weights.dtype)], out)(x, weights, *scale)

    return _natively(native, by_xla, True, x, weights, *scale)


def attention(by_xla: Callable[..., Array], cap: float, *operands: Array) -> Array:
    """Grouped-query attention of few tokens: [B, T, H head_dim] float32.

    A row's sums are over its visible slots in order, independent of the number and position of other slots.

    Args:
        by_xla: the same function of the operands, for derivatives, `vmap` and other devices.
        cap: of scores (`models.layers.soft_cap`); 0: none.
        operands: query [B, T, H, head_dim] bfloat16, scaled; keys and values [B, Hkv, S, head_dim] bfloat16; mask
            [B, T, S] bool; optionally biases of scores [B, H, T, S] float32.
    """

    def native(*operands: Array) -> Array:
        batch, width, heads, dim = operands[0].shape
        out = jax.ShapeDtypeStruct((batch, width, heads * dim), jnp.float32)
        return jax.ffi.ffi_call(ATTENTION, out)(*operands, cap=np.float32(cap))

    return _natively(native, by_xla, False, *operands)


def mean(x: Array, squared: bool = False) -> Array:
    """Means over the last axis of x [..., D] float32, or of its squares, as [..., 1].

    In the kernel the order of summation does not depend on the number of rows; in XLA's CPU backend it does.
    """

    def by_xla(x: Array) -> Array:
        return jnp.mean(jnp.square(x) if squared else x, axis=-1, keepdims=True)

    def native(x: Array) -> Array:
        out = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
        return jax.ffi.ffi_call(SUMS, out)(x, squared=squared)[..., None] / x.shape[-1]

    if x.dtype != jnp.float32 or x.size > MOST_NUMBERS or products() == "XLA":
        return by_xla(x)
    return _natively(native, by_xla, True, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _natively(native: Callable[..., Array], by_xla: Callable[..., Array], any_rows: bool, *operands: Array) -> Array:
    """`native` in CPU programs; `by_xla` on other devices, and for derivatives.

    With `any_rows`, `vmap` over the first operand alone uses `native` with more rows; any other uses `by_xla`.
    """
    call = custom_batching.custom_vmap(native)

    @call.def_vmap
    def _(size: int, batched: list[bool], *operands: Array) -> tuple[Array, bool]:
        del size
        if any_rows and not any(batched[1:]):
            return call(*operands), True
        return jax.vmap(by_xla, in_axes=[0 if mapped else None for mapped in batched])(*operands), True

    return lax.platform_dependent(*operands, cpu=call, default=by_xla)


@_natively.defjvp
def _(native: Any, by_xla: Callable[..., Array], any_rows: bool, primals: Any, tangents: Any) -> Any:
    """The derivative by the floating-point primals."""
    varies = [value.dtype != jax.dtypes.float0 for value in tangents]

    def function(*changed: Array) -> Array:
        rest = iter(changed)
        return by_xla(*(next(rest) if vary else value for value, vary in zip(primals, varies, strict=True)))

    at, along = ([value for value, vary in zip(each, varies, strict=True) if vary] for each in (primals, tangents))
    return _natively(native, by_xla, any_rows, *primals), jax.jvp(function, at, along)[1]
