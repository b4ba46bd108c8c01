"""Routine and reasoning phases of a text, from the running entropy of the target's distributions.

Entropy-aware decoding treats text differently where the model is uncertain. A row is in one of two phases: when a
running mean of the target's entropy rises above `enter` it changes to reasoning, when it falls below `leave` to
routine. Two thresholds and a minimum number of tokens between changes prevent a single hard token from changing it.

The phase is a function of the emitted tokens only, not of the rounds: every emitted token is observed once, in order.
Therefore the phase never depends on the current draft, and decoding stays lossless; and a replay computes the phases of
a trace independently of rounds.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from specdec_jax.decoding.phase import REASONING, ROUTINE
from specdec_jax.decoding.sampling import distribution
from specdec_jax.decoding.sampling import raw_entropy as raw_entropy_of
from specdec_jax.hyperparameters import full, select_rows
from specdec_jax.ranges import Between, Length, NotNegative
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Monitor, RoundContext, VerificationResult


class Phases(NamedTuple):
    """The state of the monitor; policies, drafters and verifiers read `phase`."""

    phase: Array  # [B] int32, 0 routine, 1 reasoning
    entropy: Array  # [B] float32, nats, running mean of the target's over the emitted tokens
    seen: Array  # [B] int32, tokens observed
    lasted: Array  # [B] int32, tokens since the phase began
    enter: Array  # [B] float32, nats
    leave: Array  # [B] float32, nats
    minimum_length: Array  # [B] int32, tokens
    decay: Array  # [B] float32


@strategy
def phases(raw_entropy: bool = True) -> Monitor:
    """A monitor of the phases of each row.

    Args:
        raw_entropy: use the entropy at temperature 1 without truncation, so that calibrated thresholds apply to all
            temperatures; otherwise that of the sampled distribution.

    Hyperparameters (`init`): enter 1.6 and leave 1.1 (nats, enter >= leave), minimum_length 8 (minimum tokens of a
    phase), decay 0.9 (of the running mean, in [0, 1); the first tokens have a plain mean). `experiments.calibrate` fits
    them to a pair of models.

    Raises:
        ValueError: leave above enter, or a number out of range.
    """

    def init(
        batch: int,
        enter: NotNegative = 1.6,
        leave: NotNegative = 1.1,
        minimum_length: Length = 8,
        decay: Annotated[Any, Between(0, 0.9999)] = 0.9,
    ) -> Phases:
        concrete = not isinstance(enter, Tracer) and not isinstance(leave, Tracer)
        if concrete and np.any(wrong := np.asarray(leave) > np.asarray(enter)):
            low, high = (float(values[np.argmax(wrong)]) for values in (leave, enter))
            raise ValueError(f"leave must not exceed enter, got leave={low:g} and enter={high:g}")
        return Phases(
            phase=full(batch, ROUTINE, dtype=jnp.int32),
            entropy=full(batch, 0.0),
            seen=full(batch, 0, dtype=jnp.int32),
            lasted=full(batch, 0, dtype=jnp.int32),
            enter=enter,
            leave=leave,
            minimum_length=minimum_length,
            decay=decay,
        )

    def observe(state: Phases, logits: Array, result: VerificationResult, context: RoundContext) -> Phases:
        def body(index: Array, state: Phases) -> Phases:
            seen = lax.dynamic_index_in_dim(logits, index, axis=1, keepdims=False)
            value = raw_entropy_of(seen) if raw_entropy else distribution(seen, context.warp).entropy
            return select_rows(index < result.length, observe_token(state, value), state)

        return lax.fori_loop(0, jnp.max(result.length), body, state)

    return Monitor(init, observe)


def observe_token(state: Phases, entropy: Array) -> Phases:
    """The state after one more emitted token of every row; `entropy` [B] is of the distribution it was drawn from."""
    weight = jnp.maximum(1.0 - state.decay, 1.0 / (state.seen + 1).astype(jnp.float32))
    running = state.entropy + weight * (entropy.astype(jnp.float32) - state.entropy)
    reasoning = jnp.where(state.phase == ROUTINE, running > state.enter, running >= state.leave)
    wanted = jnp.where(reasoning, REASONING, ROUTINE)
    lasted = state.lasted + 1
    changes = (wanted != state.phase) & (lasted >= state.minimum_length)
    return state._replace(
        phase=jnp.where(changes, wanted, state.phase),
        entropy=running,
        seen=state.seen + 1,
        lasted=jnp.where(changes, 0, lasted),
    )
