"""The target's distributions as labels: its most probable next tokens at every position of texts that exist already."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.distillation.shards import Shard, token_dtype
from specdec_jax.types import Array, LanguageModel, Params

STEP = 64  # texts are padded to multiples of it, so that few programs are compiled
POSITIONS = 2048  # positions a pass: their logits are 400 MB at 49,152 tokens in float32


def build_labeller(
    model: LanguageModel, k: int, *, positions: int = POSITIONS
) -> Callable[[Params, Sequence[np.ndarray]], list[tuple[np.ndarray, np.ndarray]]]:
    """`label(params, texts) -> [(top [T, k] int32, log_prob [T, k] float32), ...]`, one a text, in order.

    Entry t is of the token after t. Texts of similar length share a pass.
    """

    @jax.jit
    def top(params: Params, tokens: Array) -> tuple[Array, Array]:
        cache = model.init_cache(params, *tokens.shape)
        logits, _ = model.apply(params, tokens, cache)
        best, index = lax.top_k(logits, k)
        return index, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def label(params: Params, texts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for width, members in _by_width(texts, positions):
            rows = np.zeros((max(1, positions // width), width), np.int32)
            for row, member in enumerate(members):
                rows[row, : len(texts[member])] = texts[member]
            index, log_prob = jax.tree.map(np.asarray, top(params, jnp.asarray(rows)))
            for row, member in enumerate(members):
                size = len(texts[member])
                found[member] = (index[row, :size], log_prob[row, :size])
        return [found[member] for member in range(len(texts))]

    return label


def label_shard(
    label: Callable[..., list[tuple[np.ndarray, np.ndarray]]],
    params: Params,
    shard: Shard,
    vocab_size: int,
    dtype: Any = np.float16,
) -> Shard:
    """The shard with labels, old ones replaced. `dtype` is that of the log-probabilities."""
    texts = np.split(shard.tokens.astype(np.int32), shard.offsets[1:-1])
    found = label(params, texts)
    top = np.concatenate([index for index, _ in found]).astype(token_dtype(vocab_size))
    return shard._replace(top=top, log_prob=np.concatenate([log_prob for _, log_prob in found]).astype(dtype))


def _by_width(texts: Sequence[np.ndarray], positions: int) -> list[tuple[int, list[int]]]:
    """(padded length, members) of every pass."""
    groups: dict[int, list[int]] = {}
    for member in np.argsort([len(text) for text in texts], kind="stable"):
        groups.setdefault(-(-max(len(texts[member]), 1) // STEP) * STEP, []).append(int(member))
    passes = []
    for width, members in groups.items():
        size = max(1, positions // width)
        passes += [(width, members[at : at + size]) for at in range(0, len(members), size)]
    return passes
