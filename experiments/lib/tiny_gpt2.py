"""A language model in the manner of GPT-2, small enough to train here in a minute, and the texts it is trained on.

Learned positions, layer norms before each part, a GELU between the two matrices of the feed-forward part, biases
everywhere, the head tied to the embedding (Radford et al. 2019). It has no cache: it comes to the decoders through
`models.adapters.from_logits_function`, which computes a text again in every pass. Loading GPT-2 is not its business.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from specdec_jax.distillation.training import Schedule, optimiser
from specdec_jax.models.adapters import from_logits_function
from specdec_jax.types import Array, LanguageModel, ModelSpec, Params


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int = 4


class Block(nn.Module):
    """Attention and feed-forward, each added to what comes in."""

    size: Size

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        width, before = hidden.shape[-1], nn.make_causal_mask(hidden[..., 0])
        normed = nn.LayerNorm(epsilon=1e-5)(hidden)
        hidden = hidden + nn.MultiHeadDotProductAttention(self.size.heads)(normed, mask=before)
        inner = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm(epsilon=1e-5)(hidden)))
        return hidden + nn.Dense(width)(inner)


class GPT2(nn.Module):
    """tokens [B, T] int32 -> logits [B, T, V] float32; positions from `context` on share the last one's embedding."""

    size: Size
    vocab_size: int
    context: int

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        table = nn.Embed(self.vocab_size, self.size.width, embedding_init=nn.initializers.normal(0.05))
        places = nn.Embed(self.context, self.size.width, embedding_init=nn.initializers.normal(0.02))
        at = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), self.context - 1)
        hidden = table(tokens) + places(at)[None]
        for _ in range(self.size.layers):
            hidden = Block(self.size)(hidden)
        return table.attend(nn.LayerNorm(epsilon=1e-5)(hidden)).astype(jnp.float32)


def language_model(size: Size, vocab_size: int, context: int) -> LanguageModel:
    """At the seam of the decoders."""
    module = GPT2(size, vocab_size, context)
    return from_logits_function(lambda p, t: _apply(module, p, t), ModelSpec(vocab_size, context, ()))


def _apply(module: GPT2, params: Params, tokens: Array) -> Array:
    logits = module.apply({"params": params}, tokens)
    assert isinstance(logits, jax.Array)
    return logits


def train(
    size: Size,
    vocab_size: int,
    context: int,
    tokens: np.ndarray,
    steps: int,
    *,
    batch: int = 16,
    length: int = 64,
    rate: float = 3e-3,
    seed: int = 0,
    progress: Callable[[int], Any] = lambda step: None,
) -> tuple[Params, float]:
    """Parameters after `steps` of next-token prediction on `tokens` [N], and the mean loss of the last tenth, nats."""
    module = GPT2(size, vocab_size, context)
    params = module.init(jax.random.key(seed), jnp.zeros((1, length), jnp.int32))["params"]
    schedule = Schedule(max(steps, 2), rate, warmup=max(steps // 20, 1), decay=0.01, betas=(0.9, 0.999))
    adam = optimiser(schedule)

    def loss_of(params: Params, rows: Array) -> Array:
        logits = _apply(module, params, rows[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]))

    @jax.jit
    def step(params: Params, state: Any, rows: Array) -> tuple[Params, Any, Array]:
        loss, gradient = jax.value_and_grad(loss_of)(params, rows)
        change, state = adam.update(gradient, state, params)
        return optax.apply_updates(params, change), state, loss

    state, losses, rng = adam.init(params), [], np.random.default_rng(seed)
    for done in range(steps):
        first = rng.integers(0, len(tokens) - length - 1, batch)
        params, state, loss = step(params, state, tokens[first[:, None] + np.arange(length + 1)].astype(np.int32))
        losses.append(float(loss))
        progress(done + 1)
    return params, float(np.mean(losses[-max(steps // 10, 1) :]))


def corpus(size: int) -> str:
    """The first `size` characters of what every machine with this Python holds: the standard library's modules."""
    parts, have = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts.append(text[: size - have])
        have += len(parts[-1])
        if have >= size:
            break
    return "".join(parts)


def bpe(text: str, vocab_size: int) -> Backend:
    """A byte-level vocabulary learnt from the text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        text.splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    return backend
