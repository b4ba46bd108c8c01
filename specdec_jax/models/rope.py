"""Rotary position embeddings (arXiv 2104.09864) in Hugging Face's convention.

The first half of a head is rotated against the second. GGUF files interleave the halves; their loader undoes that
permutation.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.types import Array

NEEDED = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Kinds of scaling, as in transformers' `rope_type`, and the positive numbers that each requires."""
NUMBERS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # optional for yarn; 0: missing


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The kind of a `rope_scaling` entry; transformers before 4.45 called `rope_type` `type`."""
    if scaling is None:
        return "default"
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def check_scaling(scaling: Mapping[str, Any] | None) -> None:
    """Raises ValueError unless `scaling` is of a supported kind with all required numbers."""
    kind = rope_type(scaling)
    if kind not in NEEDED:
        raise ValueError(f"unknown rope type {kind!r}; there are {', '.join(NEEDED)}")
    entries = scaling or {}
    numbers = {name: entries[name] for name in NUMBERS if entries.get(name)}
    numbers |= {"attention_factor": entries["attention_factor"]} if entries.get("attention_factor") is not None else {}
    for name, value in ({name: entries.get(name) for name in NEEDED[kind]} | numbers).items():
        if not _is_positive(value):
            raise ValueError(f"rope type {kind!r} needs a positive {name!r}, got {value!r}")
    factors = entries.get("short_factor")
    if kind == "longrope" and not (isinstance(factors, (list, tuple)) and factors and all(map(_is_positive, factors))):
        raise ValueError(f"rope type {kind!r} needs a list 'short_factor' of positive numbers, got {factors!r}")


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf and not isinstance(value, bool)


def rope_from_hf(config: Mapping[str, Any], theta: float) -> tuple[dict[str, Any], Any]:
    """(rope_theta and rope_scaling, partial_rotary_factor or None), from either format of config.json.

    `theta` is the family's default. The context before the scaling and the scaling factor may follow from numbers
    outside the entry, as for Phi-3. Raises ValueError for an entry of the wrong type.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            raise ValueError(f"{name} must be an object, got {config[name]!r}")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = _first(rope.pop("rope_theta", None), config.get("rope_theta"), theta)
    part = _first(rope.pop("partial_rotary_factor", None), config.get("partial_rotary_factor"))
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        if value is not None and not _is_positive(value):
            raise ValueError(f"{name} must be a number above 0, got {value!r}")
    kind, context = rope_type(rope), config.get("max_position_embeddings")
    rope.pop("type", None)
    if kind in ("longrope", "yarn"):
        before = (
            config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or context
        )
        rope["original_max_position_embeddings"] = before
        if rope.get("factor") is None and context and before:
            rope["factor"] = context / before
    scaling = None if kind == "default" else {**rope, "rope_type": kind}
    return {"rope_theta": float(theta), "rope_scaling": scaling}, part


def rope_to_hf(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entry `rope_parameters` of a config.json."""
    return {**(scaling or {"rope_type": "default"}), "rope_theta": theta}


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> np.ndarray:
    """Radians per position, [head_dim / 2] float32, as in transformers' `ROPE_INIT_FUNCTIONS`.

    `dynamic` equals `default` up to the model's context, which decoding never exceeds: beyond it every cached key would
    have to be rotated again. Likewise `longrope` (LongRoPE, arXiv 2402.13753) uses the short factors, up to the context
    before the scaling. `yarn`: arXiv 2309.00071, section 3.2. Raises ValueError for a scaling that `check_scaling`
    refuses.
    """
    check_scaling(scaling)
    kind = rope_type(scaling)
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None or kind in ("default", "dynamic"):
        return frequency.astype(np.float32)
    if kind == "longrope":
        return (frequency / np.asarray(scaling["short_factor"], np.float64)).astype(np.float32)
    unscaled = 0.0  # 0: low frequency, fully scaled; 1: high frequency, not scaled
    if kind == "llama3":
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        unscaled = np.clip((turns - low) / (high - low), 0.0, 1.0)
    elif kind == "yarn":
        # a ramp between the dimensions with `beta_fast` and `beta_slow` rotations over the context
        turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        angles = (scaling["original_max_position_embeddings"] / (turn * 2 * math.pi) for turn in turns)
        low, high = (head_dim * math.log(angle) / (2 * math.log(theta)) for angle in angles)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        unscaled = 1.0 - np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (unscaled * frequency + (1 - unscaled) * frequency / scaling["factor"]).astype(np.float32)


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """The factor of cosines and sines, as in transformers; 1 except for `longrope` and `yarn`."""
    kind = rope_type(scaling)
    if scaling is None or kind not in ("longrope", "yarn"):
        return 1.0
    factor_given, factor = scaling.get("attention_factor"), scaling["factor"]
    if factor_given is not None or factor <= 1:
        return 1.0 if factor_given is None else float(factor_given)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(scaling["original_max_position_embeddings"]))
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def rope(config: Any, positions: Array, theta: float | None = None) -> tuple[Array, Array]:
    """`rotation` for a config with `rotated`, `rope_theta` and `rope_scaling`; with `theta` there is no scaling."""
    scaling = config.rope_scaling if theta is None else None
    frequency = inverse_frequencies(config.rotated, config.rope_theta if theta is None else theta, scaling)
    return rotation(positions, frequency, attention_factor(scaling))


def rotation(positions: Array, frequency: np.ndarray, factor: float = 1.0) -> tuple[Array, Array]:
    """cos and signed sin, each [B, T, 1, 2, head_dim / 2] float32, of positions [B, T]; once per pass for all layers.

    Both are multiplied by `factor` (`attention_factor`).

    The sine has the sign with which each half is subtracted in `rotate`. Without the barrier XLA's CPU backend would
    fuse cosine and sine into each layer, compiling and computing them again.
    """
    angle = positions.astype(jnp.float32)[:, :, None, None, None] * jnp.asarray(frequency)[None, None, None, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if factor != 1.0:
        sin, cos = factor * sin, factor * cos
    cos = jnp.broadcast_to(cos, (*sin.shape[:3], 2, sin.shape[4]))
    return lax.optimization_barrier((cos, jnp.concatenate([sin, -sin], axis=3)))


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Rotates x [B, T, H, head_dim] float32: first * cos - second * sin, second * cos + first * sin.

    If heads are wider than `cos_sin` only their first part is rotated (partial rotary positions). The halves are
    swapped by `rev`, not by a concatenation, which XLA's CPU backend compiles separately for each use and does not
    fuse. The result is a difference, so that compilers round the product with the sine in both halves and fuse the
    other product into the subtraction.
    """
    cos, sin = cos_sin
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], cos_sin), x[..., rotated:]], axis=-1)
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return (halves * cos - lax.rev(halves, (halves.ndim - 2,)) * sin).reshape(x.shape)
