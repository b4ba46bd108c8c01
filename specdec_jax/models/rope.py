"""Rotary position embeddings (arXiv 2104.09864) in Hugging Face's convention.

The first half of a head is rotated against the second. GGUF files interleave the halves instead; loaders undo that
permutation, nothing here knows of it.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

ROPE_TYPES = ("default", "dynamic", "linear", "llama3")


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The kind of a `rope_scaling` entry; `type` is what transformers before 4.45 called `rope_type`."""
    if scaling is None:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Raises ValueError unless `scaling` is a kind served here, with every number it needs."""
    kind = rope_type(scaling)
    if kind not in ROPE_TYPES:
        raise ValueError(f"unknown rope type {kind!r}; there are {', '.join(ROPE_TYPES)}")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor",
              "original_max_position_embeddings")}.get(kind, ())  # fmt: skip
    for name in needed:
        value = (scaling or {}).get(name)
        if not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"rope type {kind!r} needs a positive {name!r}, got {value!r}")


def rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, from either generation of config.json. Raises ValueError for partial rotation."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor other than 1 is not served, got {rope or config!r}")
    kind = rope_type(rope)
    rope.pop("type", None)
    scaling = None if kind == "default" else {**rope, "rope_type": kind}
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> np.ndarray:
    """Radians a position, [head_dim / 2] float32, as transformers' `ROPE_INIT_FUNCTIONS` gives them.

    `dynamic` equals `default` up to the context the model states, and nothing beyond it is decoded: past it every
    cached key would have to be rotated anew. Raises ValueError on a scaling `check_scaling` refuses.
    """
    check_scaling(scaling)
    kind = rope_type(scaling)
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None and kind == "linear":
        frequency = frequency / scaling["factor"]
    elif scaling is not None and kind == "llama3":
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: slow, fully scaled; 1: fast, left alone
        frequency = kept * frequency + (1 - kept) * frequency / scaling["factor"]
    return frequency.astype(np.float32)


def rotation(positions: Array, frequency: np.ndarray) -> tuple[Array, Array]:
    """cos and signed sin, each [B, T, 1, 2, head_dim / 2] float32, of positions [B, T]; once a pass, for every layer.

    The sine comes with the sign of what each half subtracts. The barrier makes them once: XLA's CPU code would fuse
    cosine and sine into each layer, to compile and compute them there anew.
    """
    angle = positions.astype(jnp.float32)[:, :, None, None, None] * jnp.asarray(frequency)[None, None, None, None, :]
    sin = jnp.sin(angle)
    cos = jnp.broadcast_to(jnp.cos(angle), (*sin.shape[:3], 2, sin.shape[4]))
    return lax.optimization_barrier((cos, jnp.concatenate([sin, -sin], axis=3)))


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Rotates x [B, T, H, head_dim] float32: first * cos - second * sin, second * cos + first * sin.

    Of heads wider than `cos_sin` the first part is rotated, the rest is left as it is (partial rotary positions).
    The halves change places by `rev`, not by a concatenation: XLA's CPU code compiles each of those by itself, however
    many are alike, and fuses none. As a difference, so that compilers round the product of the sine in either half and
    fuse the other into the subtraction.
    """
    cos, sin = cos_sin
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], cos_sin), x[..., rotated:]], axis=-1)
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return (halves * cos - lax.rev(halves, (halves.ndim - 2,)) * sin).reshape(x.shape)
