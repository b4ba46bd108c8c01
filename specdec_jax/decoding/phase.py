"""The phases of a text, for policies, drafters and verifiers."""

import jax.numpy as jnp

from specdec_jax.types import Array, RoundContext

ROUTINE, REASONING = 0, 1  # running entropy below or above the calibrated threshold


def phase_of(context: RoundContext) -> Array:
    """The phase [B] int32 of each row when the round began; ROUTINE for all rows without a monitor of phases.

    `build_decoder` refuses a policy or verifier that needs phases without such a monitor. Enumerations and contract
    tests work without one and see a single phase.
    """
    monitor = context.monitor
    return monitor.phase if hasattr(monitor, "phase") else jnp.full_like(context.length, ROUTINE)
