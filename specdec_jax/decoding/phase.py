"""The phases of a text, as policies, drafters and verifiers read them."""

import jax.numpy as jnp

from specdec_jax.types import Array, MonitorState, RoundContext

ROUTINE, REASONING = 0, 1  # low running entropy, and above the threshold that calibration learnt


def phase_of(context: RoundContext) -> Array:
    """The phase [B] int32 each row was in when the round began; routine everywhere if no monitor watches phases.

    `build_decoder` refuses a policy or verifier that needs phases without such a monitor; several drafters do without,
    as enumerations and contract tests do, and see one phase.
    """
    return recorded_phase(context.monitor, context.length)


def recorded_phase(monitor: MonitorState, like: Array) -> Array:
    """The phase of a monitor's state, or routine where it has none."""
    return monitor.phase if hasattr(monitor, "phase") else jnp.full_like(like, ROUTINE)
