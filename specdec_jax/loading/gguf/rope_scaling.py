"""Rope scalings in GGUF files: read as Hugging Face states them, and written.

Metadata say a linear one. Llama 3's is a tensor of divisors, from which only those of the published models can be told.
"""

from typing import Any

import numpy as np

from specdec_jax.loading.gguf.metadata import architecture_name, exact, number
from specdec_jax.loading.gguf.reader import GGUF, dequantise
from specdec_jax.models.rope import inverse_frequencies, rope_type

ROPE_FREQUENCIES = "rope_freqs.weight"
LLAMA3_SCALINGS = tuple(  # what Llama 3.1 and 3.2 were published with; the file keeps only the resulting divisors
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192}
    for factor in (8.0, 16.0, 32.0)
)  # fmt: skip


def scaling_of(file: GGUF, head_dim: int, theta: float) -> dict[str, Any]:
    """The rope scaling, in Hugging Face's terms; {"rope_type": "default"} when there is none.

    Raises ValueError naming the file for one that cannot be told.
    """
    if ROPE_FREQUENCIES in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    architecture = architecture_name(file)
    factor = file.metadata.get(f"{architecture}.rope.scale_linear")  # what files of 2023 call it
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none":
        return {"rope_type": "default"}
    if kind != "linear":
        raise ValueError(f"{file.path} has the rope scaling {kind!r}, which is not served in GGUF files")
    return {"rope_type": kind, "factor": exact(number(file, "rope.scaling.factor", factor))}


def scaling_numbers(config: Any) -> dict[str, Any]:
    """A config's scaling as metadata, where they say it. Another than Llama 3's published ones would be lost to every
    reader but llama.cpp: raises ValueError."""
    scaling = config.rope_scaling or {}
    kind = rope_type(config.rope_scaling)
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    published = any(all(scaling.get(name) == value for name, value in known.items()) for known in LLAMA3_SCALINGS)
    if kind == "default" or (kind == "llama3" and published):
        return {}
    raise ValueError(f"a GGUF file cannot state the rope scaling {config.rope_scaling}")


def divisors(config: Any) -> np.ndarray | None:
    """What the file's tensor `rope_freqs.weight` holds, [head_dim / 2] float32; None: the file has none."""
    if rope_type(getattr(config, "rope_scaling", None)) != "llama3":
        return None
    plain = inverse_frequencies(config.head_dim, config.rope_theta, None)
    return plain / inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)


def _llama3_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any]:
    """Recognises the divisors of Llama 3.1's rope scaling; anything else is refused rather than guessed."""
    stored = dequantise(file, ROPE_FREQUENCIES).reshape(-1)
    plain = inverse_frequencies(head_dim, theta, None)
    for scaling in LLAMA3_SCALINGS:
        expected = plain / inverse_frequencies(head_dim, theta, scaling)
        if stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-3):
            return scaling
    raise ValueError(
        f"{file.path}: {ROPE_FREQUENCIES} is none of Llama 3's published rope scalings; "
        "load the Hugging Face folder, whose config.json states the scaling"
    )
