"""Sampling: warping of logits, entropy, and drawing a token from one uniform.

Warps follow Hugging Face's order (temperature, top-k, top-p, min-p) with every number traced and per row. The top-k and
top-p thresholds are found by bisection over the ordered bit patterns of the log-probabilities: at most 31 counts, not a
sort (a full sort of 49,152 entries takes 8.5 ms on a CPU core, a count about 0.01 ms). It is exact and keeps ties.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from specdec_jax.hyperparameters import select_rows
from specdec_jax.ranges import Between, Count, NotNegative, Share
from specdec_jax.strategy import by_row
from specdec_jax.types import Array, Distribution, RoundContext, Warp

DRAFT, ACCEPT, NEXT = 0, 1, 2  # roles of a uniform
POLICY = 2**32 - 1  # folded into a key for the seeds of policies; larger than any count of emitted tokens
BY_CANDIDATE = 4096
"""Stride in the index of uniforms between the candidates of a position; exceeds any draft length."""
_BLOCK = 128  # block size when drawing; summing blocks first keeps the cumulative sums short


@by_row
def make_warp(
    batch: int,
    temperature: NotNegative = 0.0,
    top_k: Count = 0,
    top_p: Annotated[Any, Between(0, 1, "low")] = 1.0,
    min_p: Share = 0.0,
) -> Warp:
    """A Warp for `batch` rows from scalars or per-row values.

    Raises:
        ValueError: negative temperature or top-k, top-p outside (0, 1], min-p outside [0, 1].
    """
    return Warp(temperature, top_k, top_p, min_p)


def distribution(logits: Array, warp: Warp) -> Distribution:
    """The Distribution, with the statistics that rules read, of [B, V] logits under a Warp.

    Entropies are in nats and skip zero probabilities. At temperature 0 the sampled distribution is one-hot and has no
    information about uncertainty, so `entropy`, `max_prob` and `margin` are those of the raw distribution (AdaEDL does
    not specify the greedy case).
    """
    top, is_sampled = argmax(logits), warp.temperature > 0
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    raw = _sums(shifted)

    def greedy() -> tuple[Array, _Sums]:
        is_top = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :] == top[:, None]
        return jnp.where(is_top, jnp.zeros((), logits.dtype), jnp.array(-jnp.inf, logits.dtype)), raw

    def sampled() -> tuple[Array, _Sums]:
        divisor = jnp.where(warp.temperature > 0, warp.temperature, 1.0).astype(shifted.dtype)
        scores = shifted / divisor[:, None]  # all <= 0, as `_bisect` requires
        every = jnp.full_like(divisor, -jnp.inf)
        # The branch returns the lowest score that stays: it would copy scores.
        low = lax.cond(jnp.any((warp.top_k > 0) | (warp.top_p < 1)), _lowest, lambda warp, scores: every, warp, scores)
        low = jnp.maximum(low, jnp.log(warp.min_p).astype(scores.dtype))
        scores = jnp.where(scores >= low[:, None], scores, -jnp.inf)
        sums = _sums(scores)
        return select_rows(is_sampled, (scores - jnp.log(sums.norm)[:, None], sums), greedy())

    # Branches return sums, not statistics: as few operations as possible run in each, and none twice.
    log_prob, sums = lax.cond(jnp.any(is_sampled), sampled, greedy)
    (_, *statistics), (raw_norm, *of_raw, _) = _statistics(sums), _statistics(raw)
    return Distribution(log_prob, top, *statistics, *of_raw, raw_log_prob=shifted - raw_norm[:, None])


def distributions(logits: Array, warp: Warp) -> Distribution:
    """`distribution` for [B, T, V] logits with one Warp per row; every field gets a T axis after B."""
    batch, width, vocab = logits.shape
    wide = jax.tree.map(lambda number: jnp.repeat(number, width), warp)
    flat = distribution(logits.reshape(batch * width, vocab), wide)
    return jax.tree.map(lambda field: field.reshape(batch, width, *field.shape[1:]), flat)


def entropy(log_prob: Array) -> Array:
    """Shannon entropy [...] of [..., V] log-probabilities, in nats, over the nonzero probabilities."""
    finite = log_prob > -jnp.inf
    return -_sum(jnp.where(finite, jnp.exp(log_prob) * jnp.where(finite, log_prob, 0.0), 0.0))


def raw_entropy(logits: Array) -> Array:
    """Entropy [...] in nats of [..., V] logits at temperature 1 without truncation."""
    return _statistics(_sums(logits - jnp.max(logits, axis=-1, keepdims=True)))[1]


def log_prob_of(distribution: Distribution, token: Array) -> Array:
    """The log-probability [B] of the drawn `token` [B] in the sampled distribution; also available in replays."""
    return pick(distribution.log_prob, token) if distribution.token_log_prob is None else distribution.token_log_prob


def pick(values: Array, index: Array) -> Array:
    """The entries [...] of values [..., N] at `index` [...] of the last axis."""
    return jnp.take_along_axis(values, index[..., None], axis=index.ndim)[..., 0]


def argmax(values: Array) -> Array:
    """First index of the maximum of [B, V] as [B] int32. By two reductions: XLA's CPU argmax takes a scalar path."""
    vocab = values.shape[-1]
    index = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    hit = values == jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(hit, index, vocab - 1), axis=-1)


def draw(weights: Array, uniform: Array) -> Array:
    """Inverse of the cumulative sum of [B, V] non-negative weights at [B] uniforms in [0, 1): tokens [B] int32.

    Weights need not be normalised. A token of weight zero is never drawn, regardless of rounding; if all weights are
    zero the last token is returned.
    """
    batch, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(batch, -1, _BLOCK)
    block_sums = jnp.sum(padded, axis=-1)  # [B, blocks]
    reached = jnp.cumsum(block_sums, axis=-1)
    goal = uniform.astype(weights.dtype) * reached[:, -1]
    block = _first(reached > goal[:, None], block_sums > 0)
    before = pick(reached, block) - pick(block_sums, block)
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    offset = _first(jnp.cumsum(inside, axis=-1) > (goal - before)[:, None], inside > 0)
    return jnp.minimum(block * _BLOCK + offset, vocab - 1).astype(jnp.int32)


def draw_token(distribution: Distribution, warp: Warp, uniform: Array) -> Array:
    """A token [B] int32 drawn from the distribution; at temperature 0 its most probable one."""
    is_sampled, top = warp.temperature > 0, distribution.top_token

    def drawn() -> Array:
        return jnp.where(is_sampled, draw(jnp.exp(distribution.log_prob), uniform), top)

    return lax.cond(jnp.any(is_sampled), drawn, lambda: top)


def without(values: Array, token: Array, instead: float) -> Array:
    """[B, V] values with the entry at `token` [B] replaced by `instead`."""
    here = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :] == token[:, None]
    return jnp.where(here, jnp.asarray(instead, values.dtype), values)


def normalised(weights: Array) -> Array:
    """Weights [..., V] scaled to sum to 1; all-zero weights stay zero."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def uniforms(seed: Array, emitted: Array, position: Array, role: int) -> Array:
    """One float32 uniform in [0, 1) per row: a function of (seed, tokens emitted when the round began, position, role).

    Keying on the position in the text alone would be biased: rejected drafts have already used those uniforms.

    Args:
        seed: [B, 2] uint32, a request's key (`DecodeState.key`), or [B], equivalent to the key (0, seed).
        emitted: [B] int32; position: [] or [B] int32; role: DRAFT, ACCEPT or NEXT.
    """
    positions = jnp.broadcast_to(position, seed.shape[:1]).astype(jnp.int32)
    return _uniforms(seed, emitted, positions[:, None] * 3 + role)[:, 0]


def round_uniforms(seed: Array, emitted: Array, positions: int) -> Array:
    """`uniforms` of all positions and roles, [B, positions, 3], in one call. A round needs most of them, and separate
    calls made up half of a round's operations outside the models' passes.
    """
    index = jnp.broadcast_to(jnp.arange(positions * 3, dtype=jnp.int32), (seed.shape[0], positions * 3))
    return _uniforms(seed, emitted, index).reshape(-1, positions, 3)


def _uniforms(seed: Array, emitted: Array, index: Array) -> Array:
    """Uniforms [B, N] at `index` [B, N]."""

    @jax.vmap
    def row(seed: Array, emitted: Array, index: Array) -> Array:
        key = jax.random.fold_in(_key(seed), emitted)
        return jax.vmap(lambda each: jax.random.uniform(jax.random.fold_in(key, each)))(index)

    return row(seed, emitted, index)


def prompt_hashes(*texts: tuple[Any, Any]) -> Any:
    """[B] uint32, a hash of each request's inputs: its prompt, and the encoder's source if there is one.

    The hashes are the high halves of the requests' keys. Rules do not see the prompt, so they cannot find the uniforms
    in a table over all seeds; and the turns of a chat, which share a seed, get different numbers. Traced if a text is.

    Args:
        texts: (tokens [B, P], lengths [B]); tokens beyond the lengths do not count.
    """
    joined: Any = np.zeros(1, np.uint32)
    for tokens, lengths in texts:
        index = np.arange(tokens.shape[1], dtype=np.uint32)[None, :]
        sizes = lengths.astype(np.uint32)
        mixed = _mixed(tokens.astype(np.uint32) + _mixed(index)) * (index < sizes[:, None]).astype(np.uint32)
        joined = _mixed(mixed.sum(axis=1, dtype=np.uint32) + sizes + joined * np.uint32(5))
    return joined


def _mixed(words: Any) -> Any:
    """The finalizer of MurmurHash3, a bijection of uint32 that mixes all bits, of words + 1."""
    words = (words + np.uint32(1)) * np.uint32(0x9E3779B1)
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))


def _key(seed: Array) -> Array:
    """The jax.random key for a seed of shape [2] or [], uint32."""
    return jax.random.key(seed) if seed.ndim == 0 else jax.random.wrap_key_data(seed, impl="threefry2x32")


def seeds_of(seed: Any, batch: int) -> Any:
    """Seeds as numbers, [] or [B], not yet checked; keys of `jax.random` become numbers in [0, 2**32).

    A key's number is the exclusive or of the last two words of its data, so `jax.random.key(7)` is seed 7. Keys may
    be typed (`key`) or raw words (`PRNGKey`) [2] or [B, 2].

    Raises:
        ValueError: a jax array uint32[2] for two rows, which is ambiguous: one raw key or two seeds.
    """
    is_key = lambda value: isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)  # noqa: E731
    keys: Any = jnp.stack(seed) if isinstance(seed, (list, tuple)) and seed and is_key(seed[0]) else seed
    raw = isinstance(keys, jax.Array) and keys.dtype == jnp.uint32 and keys.shape[-1:] == (2,)
    if raw and keys.shape == (batch,):
        raise ValueError("seed is uint32[2] for 2 rows, two seeds or one raw key: give a list, or jax.random.key")
    if raw or is_key(keys):
        words = keys if raw else jax.random.key_data(keys)
        keys = words[..., -2] ^ words[..., -1]
    return keys if isinstance(keys, Tracer) else np.asarray(keys)


def policy_seeds(seed: Array) -> Array:
    """Seeds [B] uint32 for the random numbers of policies, from requests' keys [B, 2] or seeds [B] as in `uniforms`.

    They do not reveal the key: half of it is a hash of the prompt, so a table of keys to look them up in is infeasible.
    """

    @jax.vmap
    def row(seed: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(_key(seed), np.uint32(POLICY)), dtype=jnp.uint32)

    return row(seed)


def policy_uniforms(context: RoundContext, count: int) -> Array:
    """`count` float32 uniforms in [0, 1) per row, [B, count], for policies, verifiers or monitors with randomness.

    A function of the request and the number of tokens emitted when the round began, independent of other rows and
    constant during a round.
    """
    columns = [uniforms(context.policy_seed, context.emitted, jnp.int32(index), 0) for index in range(count)]
    return jnp.stack(columns, axis=1)


def _sum(values: Any) -> Any:
    """Sums over the last axis of an array, or of a tuple of arrays of one shape, by a single reduction.

    On CPUs over columns first, which XLA vectorises and which reduces the rounding error.
    """
    *_, vocab = shape = jax.tree.leaves(values)[0].shape

    def by_columns(values: Array) -> Array:
        return jnp.sum(jnp.sum(values.reshape(*shape[:-1], vocab // _BLOCK, _BLOCK), axis=-2), axis=-1)

    def at_once(values: Any) -> Any:
        zeros = jax.tree.map(lambda each: jnp.zeros((), each.dtype), values)
        return lax.reduce(values, zeros, partial(jax.tree.map, lax.add), [len(shape) - 1])

    if vocab % _BLOCK or vocab == _BLOCK:
        return jax.tree.map(partial(jnp.sum, axis=-1), values)
    with jax.named_scope("by_platform"):
        return lax.platform_dependent(values, cpu=partial(jax.tree.map, by_columns), default=at_once)


class _Sums(NamedTuple):
    """Sums over the tokens of scores [..., V] whose maximum is 0, each of shape [...]."""

    norm: Array  # of exp(score)
    moment: Array  # of score * exp(score)
    ties: Array  # number of tokens with score 0
    below: Array  # exp of the largest score below 0


def _sums(scores: Array) -> _Sums:
    """The sums of scores [..., V] whose maximum is 0; excluded tokens have minus infinity.

    They depend on the scores only, not on one another, so that the compiler can fuse them into one pass.
    """
    finite, weight = scores > -jnp.inf, jnp.exp(scores)
    norm, moment = _sum((weight, weight * jnp.where(finite, scores, 0.0)))
    ties = _sum((scores == 0).astype(scores.dtype))
    return _Sums(norm, moment, ties, jnp.exp(jnp.max(jnp.where(scores < 0, scores, -jnp.inf), axis=-1)))


def _statistics(sums: _Sums) -> tuple[Array, ...]:
    """Log of the norm, entropy in nats over the nonzero probabilities, the largest probability, and its margin over the
    second largest one, each of shape [...]."""
    log_norm = jnp.log(sums.norm)
    margin = jnp.where(sums.ties > 1, 0.0, 1 - sums.below) / sums.norm
    return log_norm, log_norm - sums.moment / sums.norm, 1 / sums.norm, margin


def _lowest(warp: Warp, scores: Array) -> Array:
    """The lowest score [B] among the k largest, and in the nucleus of these; with k = 0 and top-p 1 of all."""
    vocab = scores.shape[-1]
    wanted = jnp.where(warp.top_k > 0, jnp.minimum(warp.top_k, vocab), vocab)

    def has_k_above(keys: Array, key: Array) -> Array:
        return jnp.sum((keys > key[:, None]).astype(jnp.int32), axis=-1) >= wanted

    low = _bisect(has_k_above, scores, warp.top_k > 0)
    scores = jnp.where(scores >= low[:, None], scores, -jnp.inf)
    prob = jnp.exp(scores - jnp.log(_sum(jnp.exp(scores)))[..., None])
    mass = jnp.where(warp.top_p < 1, warp.top_p, 2.0).astype(scores.dtype)

    def has_mass_above(keys: Array, key: Array) -> Array:
        return _sum(jnp.where(keys > key[:, None], prob, 0.0)) >= mass

    return jnp.maximum(low, _bisect(has_mass_above, scores, warp.top_p < 1))


def _bisect(too_low: Callable[[Array, Array], Array], scores: Array, rows: Array) -> Array:
    """The smallest score [B] that is not too low, of scores [B, V] <= 0; the smallest of all where `rows` [B] is False.

    Keys are the scores as integers <= 0 in the same order. `too_low` (keys [B, V], key [B]) is monotone, and false at
    the largest key. Without rows the loop ends before its first turn.
    """
    integer = jnp.int64 if scores.dtype == jnp.float64 else jnp.int32
    largest = jnp.iinfo(integer).max
    bits = lax.bitcast_convert_type(scores, integer)
    keys = jnp.where(bits < 0, bits ^ largest, 0)

    def halve(bounds: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        width, low, high = bounds
        middle = low + (high - low) // jnp.array(2, integer)
        above = too_low(keys, middle)
        low, high = jnp.where(above, middle + jnp.array(1, integer), low), jnp.where(above, high, middle)
        return width // jnp.array(2, integer), low, high

    low = jnp.min(keys, axis=-1)
    high = jnp.where(rows, jnp.max(keys, axis=-1), low)
    # The widest interval says when to end, not each row's: devices that share the rows ask each other once.
    *_, key = lax.while_loop(lambda bounds: bounds[0] > 0, halve, (jnp.max(high - low), low, high))
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ largest, 0), scores.dtype)


def _first(hit: Array, possible: Array) -> Array:
    """First index of [B, N] with both `hit` and `possible`, else the last possible index."""
    size = hit.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)[None, :]
    first = jnp.min(jnp.where(hit & possible, index, size), axis=-1)
    last = jnp.max(jnp.where(possible, index, -1), axis=-1)
    return jnp.where(first < size, first, jnp.where(last >= 0, last, size - 1))
