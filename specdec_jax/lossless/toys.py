"""Toy models whose distributions can be enumerated: tables of logits by the last two tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.phase import REASONING, ROUTINE
from specdec_jax.decoding.sampling import pick
from specdec_jax.models.adapters import TokenCache, from_function
from specdec_jax.monitors.phases import Phases, phases
from specdec_jax.types import (
    Array,
    DraftModel,
    Hidden,
    LanguageModel,
    ModelSpec,
    Monitor,
    Params,
    Reading,
    RoundContext,
    VerificationResult,
)

NEVER = -1e4  # a logit whose probability is exactly zero at every temperature here
FADES = 0.5  # decay per draft of the target's influence on a reading drafter


class Toy(NamedTuple):
    """A target and a drafter; entry [a, b] holds the logits [V] after the tokens a, b.

    A drafter may read its target, whose hidden state identifies its token: `read[c]` is added to the logits of a
    round's first draft, with c the token before the last, and to those of each later one with a further factor FADES.
    """

    target: np.ndarray  # [V, V, V] float32
    drafter: np.ndarray  # [V, V, V] float32
    read: np.ndarray | None = None  # [V, V] float32


def toy_pair(vocab_size: int = 3, seed: int = 0, distance: float = 1.0) -> Toy:
    """A random pair. Contexts differ in sharpness, so that entropies range from near 0 to near log V and every stopping
    policy stops in some and continues in others; `distance` is that of the drafter's logits from the target's.
    """
    rng = np.random.default_rng(seed)
    shape = (vocab_size,) * 3
    sharpness = rng.uniform(0.3, 4.0, (vocab_size, vocab_size, 1))
    target = rng.normal(size=shape)
    drafter = target + distance * rng.normal(size=shape)
    return Toy((target * sharpness).astype(np.float32), (drafter * sharpness).astype(np.float32))


def with_reading(toy: Toy, seed: int = 0, size: float = 2.0) -> Toy:
    """The pair with a drafter that reads its target, with random weights of standard deviation `size`."""
    vocab = toy.target.shape[0]
    return toy._replace(read=(size * np.random.default_rng(seed).normal(size=(vocab, vocab))).astype(np.float32))


def drawn_pair(rng: np.random.Generator, vocab_size: int, choices: float, reads: bool = False) -> Toy:
    """A random pair whose drafter has about `choices` possible tokens in most contexts, and all in some.

    Either model has tokens of probability zero that the other has, some pairs share them, and logits may be tied. The
    drafter may be equal to the target or unlike it.
    """
    shape = (vocab_size,) * 3
    sharpness = np.exp(rng.uniform(np.log(0.3), np.log(10.0), (vocab_size, vocab_size, 1)))
    target = rng.normal(size=shape)
    drafter = target + rng.choice([0.0, 0.3, 1.0, 3.0]) * rng.normal(size=shape)
    size = np.floor(choices + rng.uniform(size=sharpness.shape))
    size = np.where(rng.uniform(size=sharpness.shape) < 0.05, vocab_size, np.clip(size, 1, vocab_size))
    place = np.argsort(rng.normal(size=shape), axis=-1)
    other = place if rng.uniform() < 0.5 else np.argsort(rng.normal(size=shape), axis=-1)
    more = rng.choice([0, 1, vocab_size], p=[0.3, 0.4, 0.3])
    logits = target * sharpness, drafter * sharpness
    if rng.uniform() < 0.3:  # ties
        logits = np.round(logits[0]), np.round(logits[1])
    target, drafter = np.where(other < size + more, logits[0], NEVER), np.where(place < size, logits[1], NEVER)
    read = 2.0 * rng.normal(size=shape[:2]).astype(np.float32) if reads else None
    return Toy(target.astype(np.float32), drafter.astype(np.float32), read)


@functools.lru_cache(maxsize=64)
def table_model(vocab_size: int, eos_ids: tuple[int, ...] = (), context: int = 4096) -> LanguageModel:
    """The language model of a table; its parameters are the table [V, V, V]. Token 0 precedes a text."""

    def init_cache(params: Params, batch: int, slots: int) -> TokenCache:
        return TokenCache(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def apply(
        params: Params, tokens: Array, cache: TokenCache, positions: Any = None, mask: Any = None
    ) -> tuple[Array, TokenCache]:
        """The previous token of each token is in the last earlier slot of its mask."""
        slots = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        text = cache.tokens.at[rows, slots].set(tokens, mode="drop", unique_indices=True)
        every = jnp.arange(text.shape[1], dtype=jnp.int32)[None, None, :]
        seen = every < slots[:, :, None]
        last = jnp.max(jnp.where(seen if mask is None else seen & mask, every, -1), axis=2)
        before = jnp.take_along_axis(text, jnp.maximum(last, 0), axis=1, mode="clip")
        before = jnp.where(last >= 0, before, 0)
        return jnp.asarray(params)[before, tokens], TokenCache(text, cache.length + tokens.shape[1])

    def tapped(
        params: Params, tokens: Array, cache: Any, layers: tuple[int, ...], positions: Any = None, mask: Any = None
    ) -> tuple[Array, Array, Any]:
        logits, cache = apply(params, tokens, cache, positions, mask)
        return logits, jnp.stack([jax.nn.one_hot(tokens, vocab_size)] * len(layers), axis=2), cache

    spec = ModelSpec(vocab_size, context, eos_ids, by_position=True)
    plain = from_function(apply, init_cache, spec)
    return plain.replace(apply=apply, hidden=Hidden(streams=tapped, width=vocab_size))


class ReadingTable(NamedTuple):
    """Parameters of a toy's drafter that reads."""

    table: Any  # [V, V, V]
    read: Any  # [V, V]


def reading_table_model(vocab_size: int) -> DraftModel:
    """The drafter of a toy that reads its target; its parameters are a `ReadingTable`."""
    plain = table_model(vocab_size)

    def reading_pass(
        params: ReadingTable, tokens: Array, reads: Array, cache: TokenCache, positions: Any = None, mask: Any = None
    ) -> Any:
        logits, cache = plain.apply(params.table, tokens, cache, positions, mask)
        return logits + reads @ jnp.asarray(params.read), reads, cache

    def refuse_pass(params: Params, tokens: Array, cache: TokenCache, positions: Any = None, mask: Any = None) -> Any:
        raise ValueError("this toy reads its target: it decodes nothing alone")

    reading = Reading(
        layers=(0,),
        target_width=vocab_size,
        width=vocab_size,
        dtype=jnp.float32,
        read=lambda params, hidden: hidden[:, :, 0],
        stand_in=lambda params, hidden: FADES * hidden,
        apply=reading_pass,
    )
    return DraftModel(plain.init_cache, refuse_pass, plain.with_length, plain.spec, reading=reading)


def toy_phases() -> Monitor:
    """Phases for toys: reasoning after an odd token, routine after an even one and at the beginning.

    Otherwise as `monitors.phases`.
    """
    real = phases()

    def observe(state: Phases, logits: Array, result: VerificationResult, context: RoundContext) -> Phases:
        last = pick(result.tokens, result.length - 1)
        phase = jnp.where(last % 2 == 1, REASONING, ROUTINE).astype(state.phase.dtype)
        return real.observe(state, logits, result, context)._replace(phase=phase)

    return Monitor(lambda batch: real.init(batch), observe)
