"""Generation of conversations by the target: rows of a batch that start, end and are replaced on the device.

Every row feeds one token per step, of the prompt or its own: at the batch sizes used here the cost is per token, so
feeding a prompt this way costs as much as a prefill and also produces its labels. A row whose conversation has ended
starts the next one from a slot that the host refills between calls, so that no row waits for the longest (the share of
idle steps is reported with every block).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specdec_jax.decoding import sampling
from specdec_jax.sharding import by_rows
from specdec_jax.types import Array, Cache, LanguageModel, Params
from specdec_jax.verification._common import at_position

USER, ASSISTANT = 0, 1  # whose turn is open
GIVEN, BY_USER, BY_ASSISTANT = 0, 1, 2  # origin of a token: the prompt or template, the model as user, as assistant


class Opening(NamedTuple):
    """The start of a conversation; the fields of a row, or of a batch with a leading axis B."""

    tokens: Any  # [S] int32, the prompt, padded
    length: Any  # int32, tokens of the prompt
    role: Any  # int32, USER: the model continues as the user; ASSISTANT: it answers
    turn_limit: Any  # int32, maximum tokens of a turn that the model writes as the user
    turns: Any  # int32, number of answers until the conversation ends
    temperature: Any  # float32, of the answers; 0: greedy
    user_temperature: Any  # float32
    seed: Any  # uint32
    id: Any  # int32, the conversation's number; -1: none


class Turns(NamedTuple):
    """The tokens of a chat template between turns. Host arrays, static in the program."""

    close_user: np.ndarray  # [N] int32, from the token that ends the user's turn to the first of the answer
    close_assistant: np.ndarray  # [N] int32, from the token that ends an answer to the first of the next user's turn
    ends: np.ndarray  # [E] int32, tokens that end an answer


class Rows(NamedTuple):
    """The state of the batch. Donated by every call."""

    now: Opening  # the current conversations; `tokens`, `known`, `role` and `turns` are updated
    spare: Opening  # the next conversation of each row
    position: Array  # [B] int32, the next token to feed
    writer: Array  # [B, S] int32, who wrote each token
    turn_start: Array  # [B] int32
    end: Array  # [B] int32, the length at which the conversation ends
    cache: Cache


class Written(NamedTuple):
    """The tokens fed in steps and the target's labels; with a leading axis of steps. Device arrays, then host ones."""

    id: Any  # [N, B] int32, -1: the row was idle
    token: Any  # [N, B] int32
    writer: Any  # [N, B] int32
    top: Any  # [N, B, k] int32, the most probable next tokens
    log_prob: Any  # [N, B, k] float32, their log-probabilities at temperature 1
    hidden: Any  # [N, B, F, D] bfloat16, of the requested layers


def empty_opening(batch: int, slots: int) -> Opening:
    """Empty spares, on the host."""

    def row(value: int, dtype: Any = np.int32) -> np.ndarray:  # separate arrays, because callers fill them in place
        return np.full((batch,), value, dtype)

    tokens, real = np.zeros((batch, slots), np.int32), np.float32
    return Opening(tokens, row(0), row(0), row(0), row(0), row(1, real), row(1, real), row(0, np.uint32), row(-1))


def build_writer(
    model: LanguageModel, turns: Turns, *, steps: int, k: int, layers: tuple[int, ...] = ()
) -> tuple[Callable[[Params, int, int], Rows], Callable[[Params, Rows], tuple[Rows, Written]]]:
    """(start, write): `start(params, batch, slots)` gives idle rows, `write(params, rows)` runs `steps` steps.

    Compiled once per batch size and number of slots. `k` is the number of labels per position (0: none), `layers` (F)
    are those whose hidden states are kept.
    """
    apply = with_hidden(model, layers)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def start(params: Params, batch: int, slots: int) -> Rows:
        fresh = jax.tree.map(jnp.asarray, empty_opening(batch, slots))
        zeros, cache = jnp.zeros((batch,), jnp.int32), model.init_cache(params, batch, slots)
        return by_rows(Rows(fresh, fresh, zeros, jnp.zeros((batch, slots), jnp.int32), zeros, zeros, cache))

    def step(params: Params, rows: Rows) -> tuple[Rows, Written]:
        rows = _take_spares(model, rows)
        logits, hidden, cache = apply(params, at_position(rows.now.tokens, rows.position)[:, None], rows.cache)
        logits, hidden = logits[:, 0], hidden[:, 0].astype(jnp.bfloat16)
        top, log_prob = top_labels(logits, k)
        token, writer = at_position(rows.now.tokens, rows.position), at_position(rows.writer, rows.position)
        fed = Written(rows.now.id, token, writer, top, log_prob, hidden)
        live = rows.now.id >= 0
        rows = rows._replace(position=rows.position + live.astype(jnp.int32))
        rows = rows._replace(cache=model.with_length(cache, rows.position))
        return _append(rows, _sample(logits, rows), turns), fed

    def write(params: Params, rows: Rows) -> tuple[Rows, Written]:
        rows, fed = lax.scan(lambda rows, _: step(params, rows), rows, None, length=steps)
        return by_rows(rows), fed

    return start, jax.jit(write, donate_argnums=(1,))


def top_labels(logits: Array, k: int) -> tuple[Array, Array]:
    """The k most probable tokens of logits [..., V] and their log-probabilities, [..., k]."""
    if not k:
        return jnp.zeros((*logits.shape[:-1], 0), jnp.int32), jnp.zeros((*logits.shape[:-1], 0), jnp.float32)
    best, top = lax.top_k(logits, k)
    return top, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def with_hidden(model: LanguageModel, layers: tuple[int, ...]) -> Callable[..., tuple[Array, Array, Cache]]:
    """(params, tokens [B, T], cache, positions=None, mask=None) -> (logits [B, T, V], hidden [B, T, F, D], cache).

    F is 0 without layers.
    """
    streams = model.hidden.streams
    if streams is not None and layers:
        return lambda params, tokens, cache, *where: streams(params, tokens, cache, layers, *where)

    def plain(params: Params, tokens: Array, cache: Cache, *where: Any) -> tuple[Array, Array, Cache]:
        logits, cache = model.apply(params, tokens, cache, *where)
        return logits, jnp.zeros((*tokens.shape, 0, 0), jnp.float32), cache

    return plain


def check_layers(model: LanguageModel, layers: Sequence[int]) -> None:
    """Raises ValueError for layers whose hidden states the model does not provide."""
    if layers and model.hidden.streams is None:
        raise ValueError("this target's family does not give hidden states: its LanguageModel has no hidden.streams")
    num_layers = model.hidden.num_layers
    for layer in layers:
        if not 0 <= layer <= num_layers:
            raise ValueError(f"the target has layers 0 (the embedding) to {num_layers}, {layer} was asked for")


def _take_spares(model: LanguageModel, rows: Rows) -> Rows:
    """Rows that have ended start their spare conversation, or are idle without one."""
    over = rows.position >= rows.end
    batch, slots = rows.writer.shape

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(over.reshape((batch,) + (1,) * (old.ndim - 1)), new, old)

    now = jax.tree.map(chosen, rows.spare, rows.now)
    zero = jnp.zeros((batch,), jnp.int32)
    position = chosen(zero, rows.position)
    spare = rows.spare._replace(id=jnp.where(over, -1, rows.spare.id))
    return Rows(
        now,
        spare,
        position,
        chosen(jnp.zeros_like(rows.writer), rows.writer),
        chosen(now.length, rows.turn_start),
        chosen(jnp.where(now.id >= 0, slots, 0), rows.end),
        model.with_length(rows.cache, position),
    )


def _sample(logits: Array, rows: Rows) -> Array:
    """The next token of every row [B], by its seed and position."""
    now = rows.now
    temperature = jnp.where(now.role == USER, now.user_temperature, now.temperature)
    zero = jnp.zeros_like(rows.position)
    uniform = sampling.uniforms(now.seed, zero, rows.position, sampling.NEXT)
    divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor)
    return jnp.where(temperature > 0, sampling.draw(weights, uniform), sampling.argmax(logits))


def _append(rows: Rows, token: Array, turns: Turns) -> Rows:
    """Writes the sampled token if the next one is not given, and the template after a token that ends a turn."""
    now, slots = rows.now, rows.writer.shape[1]
    free = (rows.position == now.length) & (now.length < slots) & (now.id >= 0)
    user = now.role == USER
    long = user & (now.length + 1 - rows.turn_start >= now.turn_limit)
    token = jnp.where(long, turns.close_user[0], token)
    ends = jnp.any(token[:, None] == jnp.asarray(turns.ends)[None, :], axis=-1)
    closes = free & jnp.where(user, token == turns.close_user[0], ends)
    last = closes & ~user & (now.turns <= 1)
    turned = closes & ~last
    tokens = _put(now.tokens, now.length, token, free)
    writer = _put(rows.writer, now.length, jnp.where(user, BY_USER, BY_ASSISTANT), free)
    length = now.length + free.astype(jnp.int32)
    for side, closing in ((user, turns.close_user[1:]), (~user, turns.close_assistant[1:])):
        for offset, closing_token in enumerate(closing):
            tokens = _put(tokens, length + offset, jnp.asarray(closing_token, jnp.int32), turned & side)
    added = jnp.where(user, len(turns.close_user) - 1, len(turns.close_assistant) - 1)
    length = jnp.minimum(length + jnp.where(turned, added, 0), slots)
    now = now._replace(
        tokens=tokens,
        length=length,
        role=jnp.where(turned, 1 - now.role, now.role),
        turns=now.turns - (closes & ~user).astype(jnp.int32),
    )
    return rows._replace(
        now=now,
        writer=writer,
        turn_start=jnp.where(turned, length, rows.turn_start),
        end=jnp.where(last, length, rows.end),
    )


def _put(values: Array, index: Array, new: Array, where: Array) -> Array:
    """values [B, S] with `new` [B] (or scalar) at index [B] in the rows of `where`; indices beyond S are ignored."""
    slot = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where((slot == index[:, None]) & where[:, None], jnp.broadcast_to(new, index.shape)[:, None], values)
