"""Initialisation of a drafter with an induction circuit, so that it can copy before training.

Small targets often repeat text from their context, which a small drafter learns late: the circuit (a head that attends
to the previous token, and one that finds the token after an earlier occurrence of the current one; Olsson et al.
2209.11895) appears in training only after many more tokens than are used on a laptop. Here it is constructed in the
first two layers; the rest is random, and training starts from there.

The residual stream has `reserved` dimensions that embeddings do not use: one holds a constant, so that a query can
select a position independent of content, the others a signature of the previous token. Rotary positions rotate a head's
fast pairs by the distance, which selects the previous token, and hardly its slow pairs, which compare signatures.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models.attention import fused_heads
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.rope import inverse_frequencies

SIGNATURE = 40  # maximum dimensions of the residual stream for the signature of the previous token
CONSTANT = 4.0  # last dimension of every embedding, in standard deviations of the others
NEAR = 3  # number of fast pairs that select the previous token; slower ones do not distinguish positions
LOOK_BACK, MATCH = 9.0, 16.0  # score margins in nats of the previous token, and of a matching signature
OTHER = "shape.init to projection or random"  # alternatives for drafters that are too small for the circuit
QUIET = 0.1  # factor of the random parts of the two layers
COPY = 4.0  # factor of a copied token's embedding


def signature_size(width: int) -> int:
    """Dimensions of a signature: an even number, at most a quarter of the width."""
    return min(SIGNATURE, width // 8 * 2)


def reserved(width: int) -> int:
    """Dimensions that embeddings do not use: the signature's and a constant's."""
    return signature_size(width) + 1


def check(layers: int, width: int, head_dim: int) -> None:
    """Raises ValueError if the circuit does not fit."""
    if layers < 2:
        raise ValueError(f"an induction circuit needs two layers, got {layers}: set shape.layers to 2, or {OTHER}")
    if width < 64:
        raise ValueError(
            f"an induction circuit needs a width of at least 64, got {width}: set shape.width to 64, or {OTHER}"
        )
    if head_dim < 2 * NEAR + signature_size(width):
        raise ValueError(
            f"an induction circuit of width {width} needs heads of at least "
            f"{2 * NEAR + signature_size(width)}, got {head_dim}: set shape.head-dim to that, or {OTHER}"
        )


def built_in(params: Any, content: np.ndarray, config: LlamaConfig, counts: Any, seed: int) -> Any:
    """`params` with the circuit. `content` [V, width - reserved] float32: the initial embeddings."""
    rng = np.random.default_rng(seed)
    vocab, content_size = content.shape
    # All of equal length, because the norm divides by it, and positions are compared after the norm.
    spread, length = content.std(), np.linalg.norm(content, axis=1, keepdims=True)
    content = content * (spread * np.sqrt(content_size) / np.maximum(length, 1e-6))
    constant = CONSTANT * spread
    embedding = np.zeros((vocab, config.hidden_size), np.float32)
    embedding[:, :content_size], embedding[:, -1] = content, constant
    # The signature: a projection [size, content_size + 1] of an embedding's content and constant to mean 0, variance 1.
    size = signature_size(config.hidden_size)
    weight = np.sqrt(np.asarray(counts, np.float64) + 1.0)
    weight /= weight.sum()
    mean = weight @ content
    spread = np.sqrt(weight @ (content - mean) ** 2)
    turn = np.linalg.qr(rng.normal(size=(content_size, size)))[0].T / spread[None, :]
    signature = np.concatenate([turn, -(turn @ mean)[:, None] / constant], axis=1)
    params = jax.tree.map(np.array, params)
    params["embedding"] = embedding
    for layer in ("layer_0", "layer_1"):  # small random parts, because noise would hide the matches
        for part in ("attention", "mlp"):
            outward = params[layer][part]["output" if part == "attention" else "down"]
            outward["kernel"] = outward["kernel"] * QUIET
    scale = float(np.sqrt(np.mean(np.sum(embedding**2, axis=1)) / config.hidden_size))  # the norm divides by it
    d, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    stored = np.append(np.arange(content_size), content_size + size)  # content and constant in the residual stream
    # In the first layer the first head attends to the previous token and writes its signature.
    output = params["layer_0"]["attention"]["output"]["kernel"]
    query, key, value = _heads(params["layer_0"]["attention"], config, 0)
    turn = inverse_frequencies(d, config.rope_theta, config.rope_scaling)[:NEAR].astype(np.float64)
    gap = float(np.sum(1.0 - np.cos(turn)))  # margin of the previous position
    strength = np.sqrt(LOOK_BACK / gap * np.sqrt(d)) / (constant / scale)
    fast = np.arange(NEAR)
    query[:], key[:], value[:] = 0.0, 0.0, 0.0
    query[fast, -1] = strength
    key[fast, -1] = strength * np.cos(turn)
    key[d // 2 + fast, -1] = strength * np.sin(turn)
    value[:size, stored] = signature * scale  # unit size, undoing the norm
    output[:, :d] = 0.0
    output[content_size + np.arange(size), np.arange(size)] = scale
    # In the second a group's first head attends to positions after an occurrence of the current token, and copies.
    output = params["layer_1"]["attention"]["output"]["kernel"]
    half = size // 2
    slow = np.concatenate([np.arange(d // 2 - half, d // 2), np.arange(d - half, d)])
    strength = np.sqrt(MATCH / size * np.sqrt(d))
    for kv in range(config.num_key_value_heads):
        query, key, value = _heads(params["layer_1"]["attention"], config, kv)
        query[:], key[:], value[:] = 0.0, 0.0, 0.0
        query[slow[:, None], stored[None, :]] = signature * scale * strength
        key[slow, content_size + np.arange(size)] = strength
        copied, first = np.arange(kv * d, min((kv + 1) * d, content_size)), kv * group * d
        value[copied - kv * d, copied] = 1.0
        output[:, first : first + d] = 0.0
        output[copied, first + copied - kv * d] = COPY * scale
    return jax.tree.map(jnp.asarray, params)


def _heads(attention: Any, config: LlamaConfig, kv: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of a group's first query head, its key and its value, [head_dim, D] each (`attention.fused_heads`)."""
    heads = fused_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    fused = attention["qkv"]["kernel"].reshape(*heads, -1)[kv]
    return fused[0], fused[-2], fused[-1]
