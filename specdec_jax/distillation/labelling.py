"""The target's distributions as labels: its most probable next tokens at every position of existing texts.

Also its hidden states, for drafters that read them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.distillation.shards import Shard, token_dtype
from specdec_jax.distillation.writing import check_layers, top_labels, with_hidden
from specdec_jax.meshes import row_groups
from specdec_jax.sharding import placed
from specdec_jax.types import Array, LanguageModel, Params

STEP = 64  # texts are padded to multiples of it, so that few programs are compiled
POSITIONS = 2048  # positions per pass: their logits are 400 MB for 49,152 tokens in float32


class Labels(NamedTuple):
    """The labels of a text of T tokens."""

    top: Any  # [T, k] int32, most probable next tokens
    log_prob: Any  # [T, k] float32
    hidden: Any  # [T, F, D] bfloat16, hidden states of its layers


def build_labeller(
    model: LanguageModel, k: int, *, layers: tuple[int, ...] = (), positions: int = POSITIONS
) -> Callable[[Params, Sequence[np.ndarray]], list[Labels]]:
    """A function `label(params, texts)` for the labels of each text, in order. Texts of similar length share a pass.

    `layers` (F) are those whose hidden states are kept. Raises ValueError for layers that the model does not provide.
    """
    check_layers(model, layers)
    apply, shares = with_hidden(model, layers), row_groups()

    @jax.jit
    def top_tokens(params: Params, tokens: Array) -> Labels:
        logits, hidden, _ = apply(params, tokens, model.init_cache(params, *tokens.shape))
        return Labels(*top_labels(logits, k), hidden.astype(jnp.bfloat16))

    def label(params: Params, texts: Sequence[np.ndarray]) -> list[Labels]:
        by_text: dict[int, Labels] = {}
        for width, size, members in _by_width(texts, positions, shares):
            rows = np.zeros((size, width), np.int32)
            for row, member in enumerate(members):
                rows[row, : len(texts[member])] = texts[member]
            whole = jax.tree.map(np.asarray, top_tokens(params, placed(rows)))
            for row, member in enumerate(members):
                by_text[member] = Labels(*(leaf[row, : len(texts[member])] for leaf in whole))
        return [by_text[member] for member in range(len(texts))]

    return label


def label_shard(
    label: Callable[..., list[Labels]], params: Params, shard: Shard, vocab_size: int, dtype: Any = np.float16
) -> Shard:
    """The shard with labels and hidden states, old ones replaced. `dtype` is that of the log-probabilities."""
    texts = np.split(shard.tokens.astype(np.int32), shard.offsets[1:-1])
    labels = label(params, texts)
    top, log_prob, hidden = (np.concatenate(leaves) for leaves in zip(*labels, strict=True))
    return shard._replace(top=top.astype(token_dtype(vocab_size)), log_prob=log_prob.astype(dtype), hidden=hidden)


def _by_width(texts: Sequence[np.ndarray], positions: int, shares: int) -> list[tuple[int, int, list[int]]]:
    """(padded length, rows, indices of texts) of every pass."""
    groups: dict[int, list[int]] = {}
    for member in np.argsort([len(text) for text in texts], kind="stable"):
        groups.setdefault(-(-max(len(texts[member]), 1) // STEP) * STEP, []).append(int(member))
    passes = []
    for width, members in groups.items():
        size = shares * max(1, positions // width)
        passes += [(width, size, members[at : at + size]) for at in range(0, len(members), size)]
    return passes
