"""Products of a few rows on a CPU at the speed of its memory; XLA's where there are none (docs/performance.md).

XLA's CPU code reads weights at a fraction of the memory's speed when few rows multiply them, and a row's sums depend on
the rows beside it. These products are compiled by the machine's own compiler when a process first needs them
(`compiled`). SPECDEC_JAX_KERNELS in the environment: `off`, or a path of `compiled.PATHS`; else the fastest one here.
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
MOST_ROWS = 512  # of a product; XLA's are as fast with AMX, and without it a tenth faster, from 128 on
MOST_NUMBERS = 1 << 20  # of rows that are summed: those of training are left to XLA
PRODUCTS = {"bfloat16": "specdec_bfloat16_product", "int8": "specdec_int8_product"}
ATTENTION, SUMS = "specdec_attention", "specdec_sums"
TARGETS = *PRODUCTS.values(), ATTENTION, SUMS
"""Names of custom calls in a CPU's programs: `jax.export` wants them in `disabled_checks`."""


@functools.cache
def path() -> str | None:
    """The path of this process's products; None: they are XLA's, and one line on standard error says why.

    Without a line where nothing failed: another device, a processor without any path, or `off`.

    Raises:
        ValueError: SPECDEC_JAX_KERNELS names no path that this processor has.
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
            reason = reason or str(error)
            continue
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
        return name
    if reason:
        compiled.say(f"products are XLA's, which are slower here: {reason}")
    return None


def serve(x: Array, weights: Any) -> bool:
    """Whether `product` takes x [..., D] and weights [F, D]: of few rows, on one CPU, in bfloat16 or int8."""
    rows = x.size // max(x.shape[-1], 1)
    fits = x.dtype == jnp.bfloat16 and weights.ndim == 2 and str(weights.dtype) in PRODUCTS
    return fits and 0 < rows <= MOST_ROWS and _here()


def serve_attention(query: Array, keys: Array) -> bool:
    """Whether `attention` takes them: on one CPU, in bfloat16."""
    return query.dtype == keys.dtype == jnp.bfloat16 and _here()


def _here() -> bool:
    return jax.sharding.get_abstract_mesh().empty and path() is not None


@jax.custom_jvp
def product(x: Array, weights: Array, scale: Array | None = None) -> Array:
    """x [..., D] bfloat16 times weights [F, D] -> [..., F] float32; of int8 weights times `scale` [F] float32.

    An entry's sum is taken in the same order however many rows there are. Derivatives are those of XLA's product, and
    so is the product itself where a program is compiled for another device.
    """
    operands = (x, weights) if scale is None else (x, weights, scale)
    return lax.platform_dependent(*operands, cpu=_native, default=by_xla)


@product.defjvp
def _(primals: Any, tangents: Any) -> Any:
    primals, tangents = ([value for value in each if value is not None] for each in (primals, tangents))
    return _with_derivative(product, by_xla, primals, tangents)


def _with_derivative(native: Callable[..., Array], by_xla: Callable[..., Array], primals: Any, tangents: Any) -> Any:
    """Native values, and XLA's derivative by the primals that vary: whole numbers do not."""
    varies = [value.dtype != jax.dtypes.float0 for value in tangents]

    def function(*changed: Array) -> Array:
        rest = iter(changed)
        return by_xla(*(next(rest) if vary else value for value, vary in zip(primals, varies, strict=True)))

    at, along = ([value for value, vary in zip(each, varies, strict=True) if vary] for each in (primals, tangents))
    return native(*primals), jax.jvp(function, at, along)[1]


def by_xla(x: Array, weights: Array, scale: Array | None = None) -> Array:
    """`product` by XLA."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    out = lax.dot_general(x, weights.astype(x.dtype), dims, preferred_element_type=jnp.float32)
    return out if scale is None else out * scale.reshape(*(1,) * (out.ndim - 1), -1)


@custom_batching.custom_vmap
def _native(*operands: Array) -> Array:
    x, weights, *_ = operands
    target = PRODUCTS[str(weights.dtype)]
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((*x.shape[:-1], weights.shape[0]), jnp.float32))(*operands)


@_native.def_vmap
def _(size: int, batched: list[bool], *operands: Array) -> tuple[Array, bool]:
    """More rows of the same weights; of several weights XLA's products."""
    del size
    if batched[0] and not any(batched[1:]):
        return _native(*operands), True
    return jax.vmap(by_xla, in_axes=[0 if mapped else None for mapped in batched])(*operands), True


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def attention(by_xla: Callable[..., Array], cap: float, *operands: Array) -> Array:
    """Grouped-query attention of few tokens: [B, T, H head_dim] float32.

    A row's sums go over the slots that it sees, in order, however many others there are and wherever they lie.

    Args:
        by_xla: the same function of the operands, for derivatives, `vmap` and other devices.
        cap: of scores (`models.layers.soft_cap`); 0: none.
        operands: query [B, T, H, head_dim] bfloat16, scaled; keys and values [B, Hkv, S, head_dim] bfloat16; mask
            [B, T, S] bool; perhaps what is added to scores, [B, H, T, S] float32.
    """

    @custom_batching.custom_vmap
    def native(*operands: Array) -> Array:
        batch, width, heads, dim = operands[0].shape
        out = jax.ShapeDtypeStruct((batch, width, heads * dim), jnp.float32)
        return jax.ffi.ffi_call(ATTENTION, out)(*operands, cap=np.float32(cap))

    @native.def_vmap
    def _(size: int, batched: list[bool], *operands: Array) -> tuple[Array, bool]:
        del size
        return jax.vmap(by_xla, in_axes=[0 if mapped else None for mapped in batched])(*operands), True

    return lax.platform_dependent(*operands, cpu=native, default=by_xla)


@attention.defjvp
def _(by_xla: Callable[..., Array], cap: float, primals: Any, tangents: Any) -> Any:
    return _with_derivative(functools.partial(attention, by_xla, cap), by_xla, primals, tangents)


def mean(x: Array, squared: bool = False) -> Array:
    """Means of the last axis of x [..., D] float32, or of its squares, as [..., 1].

    Natively a row's sum is taken in the same order however many rows there are; in XLA's CPU code it changes with them.
    """
    function = functools.partial(_mean_by_xla, squared=squared)
    if x.dtype != jnp.float32 or x.size > MOST_NUMBERS or not _here():
        return function(x)
    return _native_mean(squared, x)


def _mean_by_xla(x: Array, squared: bool) -> Array:
    return jnp.mean(jnp.square(x) if squared else x, axis=-1, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _native_mean(squared: bool, x: Array) -> Array:
    @custom_batching.custom_vmap
    def native(x: Array) -> Array:
        out = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
        return jax.ffi.ffi_call(SUMS, out)(x, squared=squared)[..., None] / x.shape[-1]

    native.def_vmap(lambda size, batched, x: (native(x), True))
    return lax.platform_dependent(x, cpu=native, default=functools.partial(_mean_by_xla, squared=squared))


@_native_mean.defjvp
def _(squared: bool, primals: Any, tangents: Any) -> Any:
    function = functools.partial(_mean_by_xla, squared=squared)
    return _with_derivative(functools.partial(_native_mean, squared), function, primals, tangents)
